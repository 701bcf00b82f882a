"""Ids of samples in one buffer."""

from __future__ import annotations

import numpy as np
import pytest

from draftsmith.cache.sample_ids import MOST_COMPARED, SampleIds
from draftsmith.errors import CacheError

NAMES = ["b", "ä/ö", "bb", "a", "b "]


def make(names: list[str]) -> SampleIds:
    return SampleIds.parse("".join(f"{name}\n" for name in names).encode())


def test_ids_come_back_in_their_order() -> None:
    ids = make(NAMES)
    assert [ids[place] for place in range(5)] == NAMES
    assert [name.decode() for name in ids] == NAMES
    assert len(ids) == 5
    assert ids.column().tobytes().decode() == "b\nä/ö\nbb\na\nb \n"
    with pytest.raises(ValueError, match="read-only"):
        ids.column()[0] = 1


def test_an_id_is_found_whole_or_not_at_all() -> None:
    ids = make(NAMES)
    assert [ids.find(name) for name in NAMES] == [0, 1, 2, 3, 4]
    assert [ids.find(name) for name in ("", "b\n", "ö", "c", "bb\na", "\nbb", "ä")] == [None] * 7


@pytest.mark.parametrize("count", [1, 4095, 4096, 4097, 10_000])
def test_more_ids_than_a_block(count: int) -> None:
    names = [f"{number}é" for number in range(count)]
    ids = make(names)
    assert [name.decode() for name in ids] == names
    order = np.random.default_rng(0).permutation(count)
    taken = ids.take(order)
    assert [name.decode() for name in taken] == [taken[place] for place in range(count)] == [names[p] for p in order]
    assert taken.find(names[-1]) == order.tolist().index(count - 1)


@pytest.mark.parametrize("broken", [b"", b"a", b"\n", b"a\n\nb\n", b"\na\n", b"a\nb"])
def test_a_broken_buffer_is_refused(broken: bytes) -> None:
    with pytest.raises(CacheError, match="ids of samples: expected one a line"):
        SampleIds.parse(broken)


def test_near_ids() -> None:
    """Of a few ids the likest, of very many those that begin alike."""
    assert make(["x9f1/t0", "77aa/t0", "x9f1/t1"]).near("x9f1-t0") == ["x9f1/t0", "x9f1/t1", "77aa/t0"]
    many = make([f"{number:08d}" for number in range(MOST_COMPARED + 1)])
    assert set(many.near("0001234x")) == {"00012340", "00012341", "00012342"}
