"""The inner loops over bfloat16 bits, by a small library in C where one was built, else by numpy: the same bytes.

`pip install` builds the library (planes.c) where it finds a C compiler. It does in one pass over memory what numpy
does in many, without Python's lock. Letters as in codec_bf16.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftsmith.cache.scratch import Scratch

BLOCK_NUMBERS = 1 << 17  # that numpy works on at a time, to stay in the processor's cache
SPAN = 16  # differences below it are coded in four bits
LIBRARY = "_planes*.so"
_REST, _EXPONENT = 0x807F, 0x7F80  # sign and mantissa; what is all ones in NaN and infinity
_SCRATCH = Scratch()


@cache
def library() -> ctypes.CDLL | None:
    """The built library, None if there is none or it cannot be loaded here."""
    for path in sorted(Path(__file__).parent.glob(LIBRARY)):
        try:
            found = ctypes.CDLL(str(path))
            found.draftsmith_outliers.restype = ctypes.c_size_t
        except (OSError, AttributeError):
            continue
        return found
    return None


def are_finite(numbers: NDArray[np.uint16]) -> bool:
    """False if one of the numbers is NaN or infinite."""
    if (native := library()) is not None:
        whole = np.ascontiguousarray(numbers)
        return bool(native.draftsmith_are_finite(_pointer(whole), ctypes.c_size_t(whole.size)))
    return not ((numbers & _EXPONENT) == _EXPONENT).any()


def add_exponents(rows: NDArray[np.uint16], *, step: int, sums: NDArray[np.uint32]) -> None:
    """Add the exponents of every `step`-th of rows [R, C] to `sums` [C]."""
    if (native := library()) is not None:
        native.draftsmith_add_exponents(_pointer(rows), *_sizes(*rows.shape), ctypes.c_size_t(step), _pointer(sums))
        return
    sums += np.add.reduce((rows[::step] >> 7) & 0x00FF, axis=0, dtype=np.uint32)


def part(
    upper: NDArray[np.uint16], lower: NDArray[np.uint16], *, shift: NDArray[np.uint8], differences: NDArray[np.uint8],
    rest: NDArray[np.uint8],
) -> None:  # fmt: skip
    """Pairs of rows [P, C] -> `differences` [P * C * 2] of exponents, each less its channel's `shift` [C]; `rest`.

    Rest [2 P * C] holds a pair in two bytes: mantissa of the upper row's number and sign of the lower one's, then
    mantissa of the lower row's number and sign of the upper one's.
    """
    (rows, channels), wide = upper.shape, shift.astype(np.uint16)
    if (native := library()) is not None:
        native.draftsmith_part(
            _pointer(upper), _pointer(lower), _pointer(wide), *_sizes(rows, channels),
            _pointer(differences), _pointer(rest),
        )  # fmt: skip
        return
    words, size = differences.view(np.uint16), upper.size
    flat_upper, flat_lower = np.ascontiguousarray(upper).reshape(-1), np.ascontiguousarray(lower).reshape(-1)
    spare = np.empty((2, min(BLOCK_NUMBERS, size)), dtype=np.uint16)
    for start in range(0, size, BLOCK_NUMBERS):
        block = slice(start, start + BLOCK_NUMBERS)
        a, b, e = flat_upper[block], flat_lower[block], words[block]
        r, t = spare[:, : a.size]
        np.right_shift(a, 7, out=e)
        e &= 0x00FF
        np.left_shift(b, 1, out=t)
        t &= 0xFF00
        e |= t
        np.bitwise_and(b, _REST, out=r)
        np.right_shift(r, 8, out=t)
        r <<= 8
        r |= t
        np.bitwise_and(a, _REST, out=t)
        r |= t
        rest[2 * start : 2 * (start + a.size)] = r.view(np.uint8)
    by_pair = differences.reshape(-1, 2 * channels)
    np.subtract(by_pair, np.repeat(shift, 2), out=by_pair)


def join(
    differences: NDArray[np.uint8], rest: NDArray[np.uint8], *, shift: NDArray[np.uint8], upper: NDArray[np.uint16],
    lower: NDArray[np.uint16],
) -> None:  # fmt: skip
    """The inverse of `part`, into `upper` and `lower` [P, C]; `differences` are overwritten."""
    (rows, channels), wide = upper.shape, shift.astype(np.uint16)
    if (native := library()) is not None:
        native.draftsmith_join(
            _pointer(differences), _pointer(rest), _pointer(wide), *_sizes(rows, channels),
            _pointer(upper), _pointer(lower),
        )  # fmt: skip
        return
    by_pair = differences.reshape(-1, 2 * channels)
    np.add(by_pair, np.repeat(shift, 2), out=by_pair)
    words, flat_upper, flat_lower = differences.view(np.uint16), upper.reshape(-1), lower.reshape(-1)
    spare = np.empty((2, min(BLOCK_NUMBERS, words.size)), dtype=np.uint16)
    for start in range(0, words.size, BLOCK_NUMBERS):
        block = slice(start, start + BLOCK_NUMBERS)
        a, b, e = flat_upper[block], flat_lower[block], words[block]
        r, t = spare[:, : e.size]
        np.copyto(r.view(np.uint8), rest[2 * start : 2 * (start + e.size)])
        np.bitwise_and(e, 0x00FF, out=a)
        a <<= 7
        np.bitwise_and(r, _REST, out=t)
        a |= t
        np.right_shift(r, 8, out=b)
        r <<= 8
        b |= r
        b &= _REST
        e >>= 1
        e &= 0x7F80
        b |= e


def take_outliers(
    differences: NDArray[np.uint8], *, most: int, filler: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint8]] | None:
    """Where the differences of SPAN and more are, ascending, and what they are; `filler` takes their places.

    None if there are more than `most`; the differences are then of no use.
    """
    if (native := library()) is not None:
        places = _SCRATCH.take("places", 4 * most).view(np.uint32)
        far = _SCRATCH.take("far", most)
        num = native.draftsmith_outliers(
            _pointer(differences), ctypes.c_size_t(differences.size), ctypes.c_uint8(SPAN), ctypes.c_uint8(filler),
            ctypes.c_size_t(most), _pointer(places), _pointer(far),
        )  # fmt: skip
        return None if num > most else (places[:num], far[:num])
    is_outlier = np.greater_equal(differences, SPAN, out=_SCRATCH.take("mask", differences.size).view(np.bool_))
    # Eight are looked at at a time, as most eights hold none.
    whole = is_outlier.size // 8 * 8
    eights = np.flatnonzero(is_outlier[:whole].view(np.uint64) != 0)
    found = (eights[:, None] * 8 + np.arange(8)).reshape(-1)
    found = np.concatenate((found[is_outlier[found]], whole + np.flatnonzero(is_outlier[whole:])))
    if found.size > most:
        return None
    values = differences[found]
    differences[found] = filler
    return found.astype(np.uint32), values


def pack(differences: NDArray[np.uint8], *, packed: NDArray[np.uint8]) -> None:
    """Differences [2 h] below SPAN -> `packed` [h]: that of i in the lower four bits, that of h + i in the upper."""
    if (native := library()) is not None:
        native.draftsmith_pack(_pointer(differences), ctypes.c_size_t(packed.size), _pointer(packed))
        return
    np.multiply(differences[packed.size :], SPAN, out=packed)
    packed |= differences[: packed.size]


def unpack(packed: NDArray[np.uint8], *, differences: NDArray[np.uint8]) -> None:
    """The inverse of `pack`."""
    if (native := library()) is not None:
        native.draftsmith_unpack(_pointer(packed), ctypes.c_size_t(packed.size), _pointer(differences))
        return
    np.bitwise_and(packed, SPAN - 1, out=differences[: packed.size])
    np.right_shift(packed, 4, out=differences[packed.size :])


def _pointer(array: NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _sizes(rows: int, channels: int) -> tuple[ctypes.c_size_t, ctypes.c_size_t]:
    return ctypes.c_size_t(rows), ctypes.c_size_t(channels)
