"""Reports for the page: rounds are drawn at random, and the product's own code makes the bodies from them."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.decoding.rounds import Generation, Round
from draftsmith.evaluation.decoded import Decoded, SpeedPoint
from draftsmith.evaluation.page import PageInput
from draftsmith.evaluation.page_model import Page, page_of
from draftsmith.evaluation.report import DrafterFacts, evaluation_body
from draftsmith.evaluation.samples import Sample, samples_body
from draftsmith.params import Domain

DOMAINS: dict[str, Domain] = {
    "gsm8k": "math", "math500": "math", "aime25": "math", "mbpp": "code", "humaneval": "code",
    "livecodebench": "code", "mt_bench": "chat", "alpaca": "chat", "arena_hard": "chat",
}  # fmt: skip
EASE = {"math": 0.06, "code": 0.0, "chat": -0.12}
REFERENCE = {"gsm8k": 500, "math500": 500, "aime25": 30, "mbpp": 256, "humaneval": 164, "mt_bench": 80}
MACHINE = "2 x CPU, 8 GiB, no GPU, Linux x86_64"
WORDS = (" the", " a", " river", " of", " 12", ".", "\n", "  ", "def", " f(x):", "\n    ", "return", " x", "+1", ",")


@dataclass(frozen=True)
class Made:
    """What a report is made of: how good the drafter is and how much was asked."""

    name: str = "dspark_b7"
    kind: str = "dspark"
    target: str = "smollm2_135m"
    block_size: int = 7
    confidence: bool = True
    quality: float = 0.72
    benchmarks: tuple[str, ...] = ("gsm8k", "humaneval", "mt_bench")
    temperatures: tuple[float, ...] = (0.0, 1.0)
    num_prompts: int = 6
    max_new_tokens: int = 96
    batch_sizes: tuple[int, ...] = (1, 4)
    num_samples: int = 1
    words: tuple[str, ...] = WORDS
    contaminated: tuple[str, ...] = ()
    machine: str = MACHINE
    git_dirty: str = "no"
    seed: int = 3


DSPARK = Made()
DFLASH = replace(DSPARK, name="dflash_b7", kind="dflash", confidence=False, quality=0.6)
MTP = replace(DSPARK, name="mtp1", kind="mtp1", block_size=1, confidence=False, quality=0.75)


def page_input(made: Made, *, samples: bool = True) -> PageInput:
    """evaluate.json and samples.json of one key, as read from the files; the caller may change them."""
    evaluate, answers = json.loads(_texts(made))
    return PageInput(evaluate, answers if samples else None)


def without_intervals(made: PageInput) -> PageInput:
    """As of a benchmark with a single prompt: every interval is null."""

    def stripped(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: stripped(part, key) for key, part in value.items()}
        if name == "conditional_acceptance_interval":
            return [None] * len(value)
        if name.endswith("_interval"):
            return None
        return [stripped(part) for part in value] if isinstance(value, list) else value

    return PageInput(stripped(made.evaluate), made.samples)


def page_of_made(*made: Made) -> Page:
    """The drafters of a page, with their samples."""
    inputs = [page_input(item) for item in made]
    return page_of([(item.evaluate, item.samples) for item in inputs])


@functools.cache
def _texts(made: Made) -> str:
    return json.dumps([evaluate_report(made), samples_report(made)], allow_nan=False)


def evaluate_report(made: Made) -> dict[str, Any]:
    """The body of evaluate.json."""
    return evaluation_body(
        key=key_of(made),
        drafter=DrafterFacts(made.name, made.kind, made.block_size, made.confidence),
        target=made.target,
        dtype="float32",
        benchmarks=[_facts(made, name) for name in made.benchmarks],
        decoded=[_decoded(made, name, temperature) for temperature in made.temperatures for name in made.benchmarks],
        speed=[_speed(made, size, temperature) for temperature in made.temperatures for size in made.batch_sizes],
        max_new_tokens=made.max_new_tokens,
        seed=6,
        machine=made.machine,
        provenance={"git_commit": "0123456789abcdef0123", "git_dirty": made.git_dirty, "hardware": made.machine},
    )


def samples_report(made: Made) -> dict[str, Any]:
    """The body of samples.json: the answers to the first `num_samples` prompts of each benchmark."""
    samples = []
    for temperature in made.temperatures:
        for name in made.benchmarks:
            turns = 2 if name == "mt_bench" else 1
            for answer in generations(made, name, temperature)[: made.num_samples * turns]:
                samples.append(Sample(name, temperature, f"Ask <b>{answer.request_id}</b> & wait.", answer))
    return samples_body(key=key_of(made), samples=samples, decode=lambda ids: decode(made, ids))


def key_of(made: Made) -> str:
    return f"{made.name}-{made.target}"


def decode(made: Made, ids: Sequence[int]) -> str:
    return "".join(made.words[index] for index in ids)


def generations(made: Made, benchmark: str, temperature: float) -> tuple[Generation, ...]:
    """The answers to a benchmark; the same whenever they are asked for."""
    rng = random.Random(f"{made.name!a} {benchmark} {temperature} {made.seed}")
    turns = 2 if benchmark == "mt_bench" else 1
    return tuple(
        _generation(made, f"{benchmark}/{row}/t{turn}", temperature, rng)
        for row in range(made.num_prompts)
        for turn in range(turns)
    )


def _generation(made: Made, request_id: str, temperature: float, rng: random.Random) -> Generation:
    """Answers until a random length or the limit; the confidence of a slot is its chance, seen through noise."""
    domain = DOMAINS[request_id.split("/")[0]]
    chance = made.quality + EASE[domain] - 0.06 * temperature + rng.uniform(-0.12, 0.12)
    length = rng.randrange(made.max_new_tokens // 3, made.max_new_tokens * 3 // 2)
    ids, drafted, rounds, ended = [rng.randrange(len(made.words))], [False], [], False
    while len(ids) < min(length, made.max_new_tokens):
        chances = [min(0.98, max(0.03, chance - 0.035 * slot + rng.gauss(0, 0.15))) for slot in range(made.block_size)]
        accepted = next((slot for slot, value in enumerate(chances) if rng.random() > value), made.block_size)
        logits = [4 * (value - 0.5) + rng.gauss(0, 0.8) for value in chances] if made.confidence else []
        ended = 0 < length - len(ids) <= accepted and length <= made.max_new_tokens
        accepted = length - len(ids) if ended else accepted
        wanted = accepted if ended else accepted + 1
        committed = min(wanted, made.max_new_tokens - len(ids))
        rejected = accepted < made.block_size and not ended
        rounds.append(
            Round(
                anchor_position=len(ids) + 9, verified=made.block_size, accepted=accepted, committed=committed,
                ended=ended, cut=committed < wanted, confidence_logits=tuple(logits),
                rejected_token=rng.randrange(len(made.words)) if rejected else None,
            )
        )  # fmt: skip
        ids += [rng.randrange(len(made.words)) for _ in range(committed)]
        drafted += [slot < accepted for slot in range(committed)]
    finish = "end_of_text" if ended else "length"
    return Generation(request_id, tuple(ids), tuple(drafted), finish, tuple(rounds))


def _decoded(made: Made, benchmark: str, temperature: float) -> Decoded:
    answers = generations(made, benchmark, temperature)
    plain = tuple(
        Generation(item.request_id, item.token_ids, (False,) * len(item.token_ids), item.finish, ()) for item in answers
    )
    seconds = sum(len(item.rounds) for item in answers) / 40
    return Decoded(benchmark, DOMAINS[benchmark], temperature, 16, answers, plain, seconds, seconds * 1.9)


def _facts(made: Made, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "domain": DOMAINS[name],
        "source": f"hub/{name}",
        "revision": "6e4ed1a2a79a",
        "split": "test",
        "prompt_form": "{question}",
        "turns": 2 if name == "mt_bench" else 1,
        "reference_count": REFERENCE.get(name),
        "licence": "MIT",
        "cap": made.num_prompts,
        "num_prompts": made.num_prompts,
        "replaced_by": None,
        "contaminated": [item for item in made.contaminated if item.startswith(f"{name}/")],
    }


def _speed(made: Made, batch_size: int, temperature: float) -> SpeedPoint:
    rng = random.Random(f"{made.name!a} {batch_size} {temperature}")
    draft = 3.0 + 0.2 * batch_size + 0.4 * made.block_size
    verify, sample, plain = 18 + 0.9 * batch_size, 1.2 + 0.25 * batch_size, 16 + 0.6 * batch_size
    steps = 120
    length, whole = 1 + 2 * made.quality, draft + verify + sample
    return SpeedPoint(
        batch_size=batch_size,
        temperature=temperature,
        num_tokens=int(steps * batch_size * length),
        num_rounds=steps * batch_size,
        num_steps=steps,
        tokens_per_s=1000 * batch_size * length / whole,
        rounds_per_s=1000 * batch_size / whole,
        steps_per_s=1000 / whole,
        plain_tokens_per_s=1000 * batch_size / (plain + sample / 2),
        plain_steps_per_s=1000 / (plain + sample / 2),
        draft_ms=draft,
        verify_ms=verify,
        sample_ms=sample,
        plain_verify_ms=plain,
        plain_sample_ms=sample / 2,
        step_ms=tuple(whole * (1 + abs(rng.gauss(0, 0.06))) for _ in range(steps)),
    )
