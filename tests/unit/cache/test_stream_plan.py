"""Which shard is needed when, and how much room that takes: against a walk sample by sample."""

from __future__ import annotations

import numpy as np
import pytest

from draftsmith.cache.layout import CacheSpec, Codec, SampleLength, array_layouts
from draftsmith.cache.plan import plan_cache
from draftsmith.cache.shard import ShardCodec
from draftsmith.cache.stream_plan import (
    FIRST_PASS,
    LIMIT_VARIABLE,
    RECORD_BYTES,
    check_room,
    most_bytes,
    needed_bytes,
    parse_bytes,
    plan_slots,
    storage_limit,
)
from draftsmith.errors import CacheError, MachineError
from tests.unit.cache.toy import toy_plan


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500000000", 500_000_000), ("20GB", 20 * 10**9), ("1.5 TiB", 1_649_267_441_664), ("64kib", 65_536),
        (" 3 MB ", 3_000_000), ("2tb", 2 * 10**12),
    ],
)  # fmt: skip
def test_bytes_are_read(text: str, expected: int) -> None:
    assert parse_bytes(text, where="X") == expected


@pytest.mark.parametrize(
    "text", ["20 parsecs", "GB", "-5", "0", "0GB", "1e9", "20GB please", "1,5GB", "0.1", "9" * 400]
)
def test_other_texts_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, text)
    with pytest.raises(MachineError) as caught:
        storage_limit()
    assert text in str(caught.value)
    assert LIMIT_VARIABLE in str(caught.value)


def test_without_a_limit_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    assert storage_limit() is None
    monkeypatch.setenv(LIMIT_VARIABLE, "")
    assert storage_limit() is None


def shuffled(epoch: int) -> np.ndarray:
    """An order of the toy's samples in which shards overlap at random."""
    return np.random.default_rng(epoch).permutation(toy_plan().num_samples)


def walk_of(members: list[int], epochs: int) -> list[tuple[int, int]]:
    """(epoch, shard) of every tick, one by one."""
    plan = toy_plan()
    return [(e, plan.samples[int(i)].shard) for e in range(epochs) for i in shuffled(e) if int(i) in members]


MEMBERS = [index for index in range(18) if index % 5 != 2]


def test_slots_are_those_of_a_walk_sample_by_sample() -> None:
    plan = toy_plan()
    first, stop = 9, 40
    first_pass = [0, 2, 3, 7, 12]
    slots = plan_slots(plan, first_pass=first_pass, members=MEMBERS, order=shuffled, first=first, stop=stop)
    expected: dict[tuple[int, int], list[int]] = {}
    for tick, index in enumerate(first_pass, start=first - len(first_pass)):
        expected.setdefault((FIRST_PASS, plan.samples[index].shard), []).append(tick)
    for tick, slot in enumerate(walk_of(MEMBERS, 4)):
        if first <= tick < stop:
            expected.setdefault(slot, []).append(tick)
    found = list(zip(slots.epoch, slots.shard, slots.first_use, slots.last_use, strict=True))
    assert {(e, s): (a, b) for e, s, a, b in found} == {key: (t[0], t[-1]) for key, t in expected.items()}
    assert len(found) == len(expected)
    assert list(slots.first_use) == sorted(slots.first_use)
    assert slots.first == first
    assert {int(epoch) for epoch in slots.epoch} == {FIRST_PASS, 0, 1, 2}


def test_a_finished_run_needs_no_slot() -> None:
    slots = plan_slots(toy_plan(), first_pass=[], members=MEMBERS, order=shuffled, first=30, stop=30)
    assert len(slots) == 0
    assert needed_bytes(slots, sizes=lambda shard: 10**9, ahead=3) == 0


def test_another_sequence_has_another_digest() -> None:
    def digest(**changed: object) -> str:
        given = {"first_pass": [1], "members": MEMBERS, "order": shuffled, "first": 0, "stop": 20}
        return plan_slots(toy_plan(), **(given | changed)).digest  # type: ignore[arg-type]

    digests = [digest(), digest(first_pass=[]), digest(members=MEMBERS[:-1]), digest(first=4), digest(stop=15)]
    assert len(set(digests)) == len(digests)
    assert digest() == digests[0]


@pytest.mark.parametrize("ahead", [0, 3, 11])
@pytest.mark.parametrize("first", [0, 9])
def test_needed_room_is_that_of_the_worst_moment(ahead: int, first: int) -> None:
    """Tick by tick: what the loader may have read up to then and training has not passed yet lies in the store."""
    plan = toy_plan()
    first_pass = list(range(0, 18, 3))
    slots = plan_slots(plan, first_pass=first_pass, members=MEMBERS, order=shuffled, first=first, stop=40)
    sizes = {shard: 1000 + 137 * shard**2 for shard in range(len(plan.shards))}
    worst = 0
    for tick in range(first - len(first_pass), 40):
        reach = tick if tick < first else min(tick + ahead, 39)
        live = (slots.first_use <= reach) & (slots.last_use >= tick)
        worst = max(worst, sum(sizes[int(shard)] for shard in slots.shard[live]))
    assert needed_bytes(slots, sizes=sizes.__getitem__, ahead=ahead) == worst
    assert worst > max(sizes.values()), "else the sum of one shard would do"


def test_too_little_room_is_refused_with_the_number_needed() -> None:
    assert check_room(1000, needed=700, kept=300) == 700
    with pytest.raises(CacheError, match=r"got 999 bytes, expected at least 1000: 700 .*300.*" + LIMIT_VARIABLE):
        check_room(999, needed=700, kept=300)


@pytest.mark.parametrize("codec", ["plain", "bf16", "int8"])
@pytest.mark.parametrize(("num_layers", "hidden_size", "chunk_tokens"), [(1, 4, 8), (3, 64, 128)])
def test_no_numbers_make_a_shard_larger_than_its_bound(
    codec: Codec, num_layers: int, hidden_size: int, chunk_tokens: int
) -> None:
    """Random bits: what no codec can shrink. Two samples, so that the last chunk is a part of one."""
    spec = CacheSpec(num_layers, hidden_size, codec, "all", 8 * chunk_tokens, chunk_tokens, 8 * chunk_tokens, 1)
    tokens = 3 * chunk_tokens + 3
    plan = plan_cache([SampleLength("a", tokens, tokens - 1), SampleLength("b", tokens, 0)], spec=spec)
    draw, total = np.random.default_rng(0), 0
    for layout in array_layouts(spec):
        largest = {"int32": 2**31, "uint8": 2, "uint16": 2**16}[layout.dtype]
        rows = draw.integers(0, largest, (2 * tokens, *layout.row_shape), dtype=layout.dtype)
        # int8 takes finite numbers only: an exponent with a zero bit.
        rows = rows & 0xBFFF if codec == "int8" and layout.dtype == "uint16" else rows
        scales = np.ones(int(np.prod(layout.row_shape)), np.float32) if codec == "int8" else None
        data = ShardCodec(layout, spec=spec, scales=scales if layout.dtype == "uint16" else None).encode(rows)
        assert data is not None
        total += len(data)
    assert total + RECORD_BYTES <= most_bytes(plan, 0)
    if codec == "plain":
        assert most_bytes(plan, 0) < 1.01 * total + RECORD_BYTES + 4 * 7 * 128, "else the bound wastes room"
