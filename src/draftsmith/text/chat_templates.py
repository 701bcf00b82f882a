"""Everyday requests to an assistant, written for this project (MIT): explaining, drafting, advising, imagining."""

from __future__ import annotations

from collections.abc import Iterator

from draftsmith.text.templates import Template, filled, slots

ENDINGS = (
    "",
    "",
    "",
    " Keep it short.",
    " Use plain language.",
    " Answer in at most five sentences.",
    " Give reasons.",
    " Use a numbered list.",
)
FOLLOW_UPS = (
    "Make it half as long.",
    "Rewrite that for a reader of twelve.",
    "What is the strongest argument against what you just said?",
    "Turn that into a checklist.",
    "Say it again in a more formal tone.",
    "Which part of that are you least sure of?",
)
TOPICS = (
    "the water cycle",
    "inflation",
    "photosynthesis",
    "how a fridge cools",
    "the French Revolution",
    "compound interest",
    "plate tectonics",
    "how vaccines work",
    "the offside rule",
    "black holes",
    "supply and demand",
    "the Silk Road",
    "how bread rises",
    "the tides",
    "recursion",
    "the placebo effect",
    "how bridges carry loads",
    "jet lag",
)
PEOPLE = ("my landlord", "a customer", "my manager", "a neighbour", "the school office", "an old friend", "a supplier")
HOBBIES = (
    "bouldering",
    "watercolours",
    "birdwatching",
    "sourdough",
    "chess",
    "the cello",
    "gardening",
    "sailing",
    "pottery",
)
PLACES = (
    "Lisbon",
    "Kyoto",
    "Nairobi",
    "the Scottish Highlands",
    "Vancouver",
    "Istanbul",
    "the Andes",
    "Sicily",
    "Hanoi",
)
HEROES = (
    "a lighthouse keeper",
    "a retired detective",
    "a robot gardener",
    "an old cartographer",
    "a shy dragon",
    "the last tram driver of a city",
    "a girl who collects sounds",
    "an honest thief",
)

FAMILIES: tuple[Template, ...] = (
    slots(
        "Explain <> to <>.",
        TOPICS,
        (
            "a curious child",
            "a tourist on a train",
            "someone who slept through school",
            "a new colleague",
            "a sceptical uncle",
        ),
    ),
    slots("What are the most common misunderstandings about <>?", TOPICS),
    slots(
        "Write <> to <> about <>.",
        ("a polite e-mail", "a short letter", "a friendly message", "a firm but fair note"),
        PEOPLE,
        (
            "a late payment",
            "a broken heater",
            "a noisy party",
            "changing an appointment",
            "a missing parcel",
            "a mistake in an invoice",
            "borrowing a ladder",
        ),
    ),
    slots(
        "I want to start with <>. I have <> and <>. How do I begin?",
        HOBBIES,
        ("two hours a week", "one free weekend", "half an hour a day"),
        ("almost no money", "no experience at all", "a small flat", "two small children"),
    ),
    slots(
        "Plan <> in <> for <>.",
        ("a long weekend", "four days", "a week", "a single day"),
        PLACES,
        ("a family with a toddler", "two friends who love food", "someone who walks slowly", "a rainy season"),
    ),
    slots(
        "Write a <> about <> who <>.",
        ("very short story", "poem of eight lines", "fable", "scene with dialogue"),
        HEROES,
        (
            "finds an unopened letter",
            "must tell the truth for a day",
            "loses a map",
            "hears a bell under the sea",
            "makes an unlikely friend",
            "is late for the most important day",
        ),
    ),
    slots(
        "Compare <> and <>. Which would you choose for <>, and why?",
        ("trains", "bicycles", "electric cars"),
        ("buses", "scooters", "shared taxis"),
        ("a small town", "a city of ten million", "a village in the hills", "people over seventy"),
    ),
    slots(
        "Give me <> arguments for and against <>.",
        ("three", "four", "five"),
        (
            "a four-day working week",
            "homework in primary school",
            "zoos",
            "tipping in restaurants",
            "free public transport",
            "school uniforms",
            "working from home",
            "banning cars from city centres",
        ),
    ),
    slots(
        "Suggest <> names for <>, with one line on each.",
        ("five", "six", "eight"),
        (
            "a bakery that opens at night",
            "a podcast on old maps",
            "a sailing boat",
            "a book club",
            "a repair café",
            "a street cat",
            "an app that counts birds",
        ),
    ),
    slots(
        "What should I cook with <>, <> and <>?",
        ("lentils", "rice", "noodles", "potatoes"),
        ("spinach", "a leek", "carrots", "half a cabbage"),
        ("two eggs", "a lemon", "some feta", "a tin of tomatoes", "peanut butter"),
    ),
    slots(
        "My <> <>. What would you do in my place?",
        ("flatmate", "sister", "best friend", "colleague", "teenage son"),
        (
            "borrows things and forgets them",
            "is always half an hour late",
            "never answers messages",
            "sings all night",
            "wants to quit a good job",
            "has stopped talking to me",
        ),
    ),
    slots(
        "Summarise what is known about <> in <>.",
        TOPICS,
        ("one paragraph", "five bullet points", "a table of causes and effects", "a dialogue between two experts"),
    ),
    slots(
        "Act as <> and interview me about <>. Ask the first question only.",
        ("a radio host", "a careful doctor", "a sports coach", "a museum guide", "a job recruiter"),
        HOBBIES,
    ),
    slots(
        "Write a product description for <> that is <>.",
        (
            "an umbrella that hums",
            "a lamp made of cork",
            "a backpack for cellists",
            "a kettle with a memory",
            "a silent alarm clock",
        ),
        ("honest about its faults", "funny", "at most forty words", "aimed at engineers"),
    ),
    slots("Write a quiz of <> questions on <>, with the answers at the end.", ("three", "five", "six"), TOPICS),
    slots(
        "How has <> changed over the last hundred years, and what may come next?",
        (
            "travel by rail",
            "school",
            "the kitchen",
            "letter writing",
            "football",
            "farming",
            "weather forecasting",
            "shopping",
        ),
    ),
)


def chat_requests(seed: int, *, count: int) -> Iterator[tuple[str, ...]]:
    """At most `count` different requests as user turns (see `filled`)."""
    return filled(FAMILIES, endings=ENDINGS, follow_ups=FOLLOW_UPS, seed=seed, count=count)
