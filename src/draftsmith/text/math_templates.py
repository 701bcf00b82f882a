"""Word problems written for this project (MIT): templates of different structure."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from draftsmith.text.templates import Template, filled

# fmt: off
NAMES = (
    "Amara", "Bogdan", "Chiara", "Daniel", "Esi", "Farid", "Greta", "Hiro", "Ines", "Jonas", "Kavya", "Leila", "Mateo",
    "Nadia", "Omar", "Priya", "Quentin", "Rosa", "Samir", "Tomas", "Uma", "Viktor", "Wanda", "Yusuf", "Zofia",
)
# fmt: on
GOODS = (  # plural, lowest and highest price in dollars
    ("notebooks", 2, 6),
    ("tomato plants", 3, 9),
    ("ceramic mugs", 7, 18),
    ("bus tickets", 2, 5),
    ("bicycle lamps", 9, 25),
    ("jars of honey", 5, 14),
    ("paint brushes", 3, 12),
    ("concert tickets", 18, 60),
    ("wool scarves", 12, 35),
    ("chess sets", 15, 45),
)
ANIMALS = (("goats", 4), ("ponies", 4), ("chickens", 2), ("geese", 2), ("beetles", 6), ("spiders", 8))
PLACES = ("library", "bakery", "harbour", "school", "museum", "workshop", "market hall", "garden centre")
JOBS = ("paint a fence", "sort the archive", "lay a path", "clean the hall", "pack all the parcels", "weed the beds")
DISHES = (("soup", "lentils"), ("bread", "flour"), ("curry", "rice"), ("cake", "sugar"), ("stew", "beans"))
ENDINGS = (
    "",
    "",
    " Show each step.",
    " Explain how you get the answer.",
    " Give the answer with its unit, if it has one.",
    " Write down the calculation first, then the result.",
    " Check your result at the end.",
)
FOLLOW_UPS = (
    "Now solve it a second way and compare the two results.",
    "How would the answer change if every number in the question were doubled?",
    "Explain the same solution to a ten-year-old.",
    "Write one similar problem of your own and solve it.",
    "Which step is the easiest to get wrong, and why?",
)


def math_problems(seed: int, *, count: int) -> Iterator[tuple[str, ...]]:
    """At most `count` different problems as user turns (see `filled`)."""
    return filled(TEMPLATES, endings=ENDINGS, follow_ups=FOLLOW_UPS, seed=seed, count=count)


def _shopping(rng: Random) -> str:
    (first, low, high), (second, low2, high2) = rng.sample(GOODS, 2)
    return (
        f"{rng.choice(NAMES)} buys {rng.randint(2, 9)} {first} at ${rng.randint(low, high)} each and "
        f"{rng.randint(2, 9)} {second} at ${rng.randint(low2, high2)} each, and pays with a "
        f"${rng.choice((500, 800, 1000))} voucher. How much of the voucher is left?"
    )


def _discount(rng: Random) -> str:
    goods, low, high = rng.choice(GOODS)
    return (
        f"A shop sells {goods} for ${rng.randint(low, high) * 10} a box. During a sale the price falls by "
        f"{rng.choice((10, 15, 20, 25, 30, 40))}%, and members get another {rng.choice((5, 10))}% off the reduced "
        f"price. What does a member pay for {rng.randint(2, 6)} boxes?"
    )


def _meeting_trains(rng: Random) -> str:
    a, b = rng.sample(range(60, 140, 5), 2)
    return (
        f"Two trains start towards each other from stations {(a + b) * rng.randint(2, 5)} km apart. One travels at "
        f"{a} km/h, the other at {b} km/h. After how many hours do they meet, and how far has the faster one gone?"
    )


def _catch_up(rng: Random) -> str:
    slow, fast = rng.sample(NAMES, 2)
    speed = rng.randint(4, 12)
    return (
        f"{slow} cycles away from the {rng.choice(PLACES)} at {speed} km/h. {rng.choice((20, 30, 40, 60))} minutes "
        f"later {fast} follows on the same road at {speed + rng.randint(2, 8)} km/h. "
        f"How long does {fast} need to catch up?"
    )


def _work_together(rng: Random) -> str:
    first, second = rng.sample(NAMES, 2)
    job = rng.choice(JOBS)
    return (
        f"{first} can {job} in {rng.randint(3, 9)} hours, and {second} can do it in {rng.randint(4, 12)} hours. "
        f"They start together, but {second} leaves after one hour. How long does {first} need for the rest?"
    )


def _tank(rng: Random) -> str:
    return (
        f"A tank of {rng.randrange(300, 1500, 50)} litres is empty. A pump fills it with {rng.randint(12, 40)} litres "
        f"a minute while a leak loses {rng.randint(2, 10)} litres a minute. "
        f"After how many minutes is it half full, and when is it full?"
    )


def _ages(rng: Random) -> str:
    older, younger = rng.sample(NAMES, 2)
    times, age, years = rng.randint(2, 5), rng.randint(5, 17), rng.randint(4, 15)
    return (
        f"{older} is {times} times as old as {younger}. In {years} years the sum of their ages will be "
        f"{age * (times + 1) + 2 * years}. How old is each of them now?"
    )


def _mixture(rng: Random) -> str:
    low, high = rng.choice((5, 10, 15, 20)), rng.choice((30, 40, 50, 60))
    return (
        f"A chemist has {rng.randint(2, 9) * 100} ml of a {low}% salt solution. How many millilitres of a {high}% "
        f"solution must be added so that the mixture has {low + rng.choice((3, 5, 8))}% salt?"
    )


def _interest(rng: Random) -> str:
    return (
        f"{rng.choice(NAMES)} puts ${rng.randrange(500, 9000, 250)} in an account that pays "
        f"{rng.choice((2, 2.5, 3, 4, 5))}% interest a year, added once a year. "
        f"How much is there after {rng.randint(2, 4)} years if nothing is taken out?"
    )


def _rectangle(rng: Random) -> str:
    shape = rng.choice(("vegetable bed", "playground", "carpet", "car park", "courtyard"))
    base = rng.choice(("its width", "twice its width"))
    width, more = rng.randint(4, 30), rng.randint(2, 9)
    length = width * (2 if base.startswith("twice") else 1) + more
    return (
        f"The length of a rectangular {shape} is {more} metres more than {base}. "
        f"Its perimeter is {2 * (width + length)} metres. Find its width, its length and its area."
    )


def _tiles(rng: Random) -> str:
    return (
        f"A floor of {rng.randint(3, 9)} m by {rng.randint(2, 8)} m is covered with square tiles of "
        f"{rng.choice((20, 25, 30, 40, 50))} cm. Tiles come in boxes of {rng.choice((8, 10, 12, 16))}, and "
        f"{rng.choice((5, 10))}% extra is needed for breakage. How many boxes are bought?"
    )


def _average(rng: Random) -> str:
    scores = [str(rng.randint(52, 98)) for _ in range(rng.randint(3, 5))]
    return (
        f"{rng.choice(NAMES)} scored {', '.join(scores[:-1])} and {scores[-1]} in the first {len(scores)} tests. "
        f"What must the next score be to bring the average to {rng.randint(75, 90)}? "
        f"Is that possible if the best score is 100?"
    )


def _ratio(rng: Random) -> str:
    parts = rng.sample(range(2, 10), 3)
    first, second, third = rng.sample(NAMES, 3)
    return (
        f"{first}, {second} and {third} share a prize in the ratio {parts[0]} : {parts[1]} : {parts[2]}. The largest "
        f"share is ${(max(parts) - min(parts)) * rng.randint(12, 60)} more than the smallest. How much does each get?"
    )


def _legs(rng: Random) -> str:
    few, many = rng.sample(ANIMALS, 2)
    while few[1] == many[1]:
        few, many = rng.sample(ANIMALS, 2)
    a, b = rng.randint(5, 25), rng.randint(5, 25)
    return (
        f"A farm museum keeps {few[0]} and {many[0]}, {a + b} animals in all, with {a * few[1] + b * many[1]} legs "
        f"together. How many {few[0]} and how many {many[0]} are there?"
    )


def _draw(rng: Random) -> str:
    one, other = rng.sample(("red", "blue", "green", "yellow", "white"), 2)
    event = rng.choice((f"both are {one}", "they differ in colour", f"at least one is {other}"))
    return (
        f"A bag holds {rng.randint(3, 9)} {one} and {rng.randint(3, 9)} {other} marbles. Two are drawn without putting "
        f"the first one back. What is the probability that {event}?"
    )


def _orders(rng: Random) -> str:
    things = rng.choice(("letters", "flags", "books", "paintings", "parcels"))
    rule = rng.choice(("stand next to each other", "not stand next to each other", "be at the two ends"))
    return (
        f"In how many orders can {rng.randint(5, 8)} different {things} be placed in a row if two particular ones must "
        f"{rule}?"
    )


def _committee(rng: Random) -> str:
    rule = rng.choice(("at least one woman and at least one man", "more women than men", "exactly two men"))
    return (
        f"A club has {rng.randint(4, 9)} women and {rng.randint(4, 9)} men. In how many ways can a committee of "
        f"{rng.randint(3, 5)} be chosen that has {rule}?"
    )


def _sequence(rng: Random) -> str:
    start, step = rng.randint(2, 30), rng.randint(3, 17)
    return (
        f"An arithmetic sequence begins {start}, {start + step}, {start + 2 * step}. Which term is the first to exceed "
        f"{rng.randrange(200, 900, 10)}, and what is the sum of all terms up to and including that one?"
    )


def _digits(rng: Random) -> str:
    low, high = sorted(rng.sample(range(1, 10), 2))
    return (
        f"The digits of a two-digit number add up to {low + high}. When the digits are swapped the number grows by "
        f"{9 * (high - low)}. Find the number."
    )


def _remainder(rng: Random) -> str:
    a, b = rng.sample((4, 5, 6, 7, 8, 9, 11), 2)
    return (
        f"Find the smallest number of eggs, more than {rng.randint(10, 60)}, that leaves {rng.randint(1, a - 1)} over "
        f"when packed in boxes of {a} and {rng.randint(1, b - 1)} over when packed in boxes of {b}. "
        f"If there is no such number, prove it."
    )


def _two_prices(rng: Random) -> str:
    (first, low, high), (second, low2, high2) = rng.sample(GOODS, 2)
    p, q = rng.randint(low, high), rng.randint(low2, high2)
    a, b, c, d = rng.randint(2, 6), rng.randint(2, 6), rng.randint(2, 6), rng.randint(2, 6)
    if a * d == b * c:
        d += 1
    return (
        f"{a} {first} and {b} {second} cost ${a * p + b * q} together, while {c} {first} and {d} {second} cost "
        f"${c * p + d * q}. Find the price of one of each."
    )


def _quadratic(rng: Random) -> str:
    r, s = rng.sample([value for value in range(-9, 10) if value], 2)
    linear, constant = -(r + s), r * s
    middle = f" {'+-'[linear < 0]} {'' if abs(linear) == 1 else abs(linear)}x" if linear else ""
    way = rng.choice(("factoring", "completing the square", "the quadratic formula"))
    return f"Solve x^2{middle} {'+-'[constant < 0]} {abs(constant)} = 0 by {way}."


def _ladder(rng: Random) -> str:
    foot, top = rng.choice(((3, 4), (5, 12), (8, 15), (7, 24), (20, 21)))
    scale = rng.randint(1, 4)
    return (
        f"A ladder leans against a wall. Its foot is {foot * scale} dm from the wall and its top is {top * scale} dm "
        f"above the ground. How long is the ladder, and how far does its top slip if the foot is pulled "
        f"{rng.randint(1, 2 * scale)} dm further away?"
    )


def _timetable(rng: Random) -> str:
    return (
        f"Two buses leave the {rng.choice(PLACES)} together at {rng.randint(6, 9)}:{rng.choice(('00', '10', '30'))}. "
        f"One runs every {rng.choice((8, 9, 12, 15, 18))} minutes, the other every {rng.choice((10, 14, 16, 20, 21))} "
        f"minutes. At what time do they next leave together?"
    )


def _recipe(rng: Random) -> str:
    dish, part = rng.choice(DISHES)
    people = rng.randint(3, 6)
    return (
        f"A recipe for {people} people needs {people * rng.randint(40, 95)} g of {part}. {rng.choice(NAMES)} wants to "
        f"make the {dish} for {people + rng.randint(3, 14)} people and has packets of {rng.choice((250, 500))} g. "
        f"How many packets are needed?"
    )


def _savings(rng: Random) -> str:
    first, second = rng.sample(NAMES, 2)
    return (
        f"{first} has ${rng.randrange(20, 120, 5)} and saves ${rng.randint(6, 15)} a week. {second} has "
        f"${rng.randrange(150, 400, 10)} and spends ${rng.randint(4, 12)} a week. "
        f"After how many full weeks does {first} have more than {second}?"
    )


def _printer(rng: Random) -> str:
    return (
        f"A printer makes {rng.randint(12, 40) * 5} pages in {rng.randint(2, 6)} minutes. Working at the same speed, "
        f"how long does it take for {rng.randint(3, 12) * 150} pages, if it stops for {rng.randint(1, 4)} minutes "
        f"after every 500 pages?"
    )


def _trail(rng: Random) -> str:
    return (
        f"{rng.choice(NAMES)} walks {rng.choice(('1/3', '2/5', '3/8', '1/4'))} of a trail before breakfast and "
        f"{rng.choice(('1/2', '2/3', '3/4'))} of the rest before lunch. {rng.randint(2, 9)} km are left. "
        f"How long is the trail?"
    )


TEMPLATES: tuple[Template, ...] = (
    _shopping,
    _discount,
    _meeting_trains,
    _catch_up,
    _work_together,
    _tank,
    _ages,
    _mixture,
    _interest,
    _rectangle,
    _tiles,
    _average,
    _ratio,
    _legs,
    _draw,
    _orders,
    _committee,
    _sequence,
    _digits,
    _remainder,
    _two_prices,
    _quadratic,
    _ladder,
    _timetable,
    _recipe,
    _savings,
    _printer,
    _trail,
)
