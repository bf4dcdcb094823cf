"""Compare the entries of two files, exactly or within a tolerance."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.outputs.entries import Entry, Key


def first_difference(
    reference: Mapping[Key, Entry],
    other: Mapping[Key, Entry],
    tolerance: float = 0.0,
    noun: str = "tensor",
) -> str | None:
    """Describe the first entry that differs and by how much, or return None.

    Without a tolerance, all bits must be equal. With one, two floating-point numbers a and b agree
    if |a - b| <= tolerance * max(1, |a|), where a is the reference. NaN agrees with NaN. All other
    values must be equal.
    """
    keys = [*reference, *(key for key in other if key not in reference)]
    differing = [key for key in keys if not _agree(reference.get(key), other.get(key), tolerance)]
    if not differing:
        return None
    first = differing[0]
    named = f"{noun} {'.'.join(map(str, first))}".strip()
    how = _how(reference.get(first), other.get(first), tolerance)
    if len(keys) == 1:
        return f"{named}: {how}"
    plural = "entries" if noun == "entry" else f"{noun}s"
    return f"{named}: {how}; {len(differing)} of {len(keys)} {plural} differ"


def largest_difference(reference: Mapping[Key, Entry], other: Mapping[Key, Entry]) -> float:
    """Return the largest |a - b| of the floating-point numbers in both files."""
    return max(
        (
            float(np.nanmax(_distance(*numbers), initial=0.0))
            for key in reference.keys() & other.keys()
            if (numbers := _floats(reference[key], other[key]))
        ),
        default=0.0,
    )


def _agree(one: Entry | None, other: Entry | None, tolerance: float) -> bool:
    if one is None or other is None or (one.kind, one.shape) != (other.kind, other.shape):
        return False
    if one.bits.size == other.bits.size and bool((one.bits == other.bits).all()):
        return True
    return not _outside(one, other, tolerance).any()


def _outside(one: Entry, other: Entry, tolerance: float) -> NDArray[np.bool_]:
    """Return for each number whether it differs by more than `tolerance`.

    Without floating-point numbers or without a tolerance, numbers with other bits differ.
    """
    numbers = _floats(one, other)
    if numbers is None or not tolerance:
        return _other_bits(one, other)
    a, b = numbers
    with np.errstate(invalid="ignore", over="ignore"):
        within = np.abs(a - b) <= tolerance * np.maximum(1.0, np.abs(a))
        # An infinite `a` would allow any difference.
        within &= np.isfinite(a) & np.isfinite(b)
        return np.asarray(~(within | (a == b) | (np.isnan(a) & np.isnan(b))))


def _other_bits(one: Entry, other: Entry) -> NDArray[np.bool_]:
    count = max(1, int(np.prod(one.shape)))
    if one.bits.size != other.bits.size or one.bits.size % count:
        return np.ones(1, np.bool_)  # text has any number of bytes
    return np.asarray((one.bits != other.bits).reshape(count, -1).any(axis=1).reshape(one.shape))


def _floats(one: Entry, other: Entry) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Return both entries in double precision, or None if they are not floating-point numbers."""
    if one.numbers is None or other.numbers is None or one.shape != other.shape:
        return None
    kinds = {one.numbers.dtype.kind, other.numbers.dtype.kind}
    if kinds == {"f"}:
        return one.numbers.astype(np.float64), other.numbers.astype(np.float64)
    if kinds == {"c"}:
        return one.numbers.astype(np.complex128), other.numbers.astype(np.complex128)
    return None


def _distance(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(a == b, 0.0, np.abs(a - b))


def _how(one: Entry | None, other: Entry | None, tolerance: float) -> str:
    if one is None or other is None:
        return f"it is only in the {'second' if one is None else 'first'} file"
    if one.kind != other.kind:
        return f"type {one.kind} and {other.kind}"
    if one.shape != other.shape:
        return f"shape {_shape(one)} and {_shape(other)}"
    if one.numbers is None or other.numbers is None:
        return f"the {one.kind} differs"
    return _how_much(one, other, one.numbers, other.numbers, _outside(one, other, tolerance))


def _how_much(
    one: Entry, other: Entry, a: NDArray[Any], b: NDArray[Any], outside: NDArray[np.bool_]
) -> str:
    """Describe the largest difference of the numbers `a` and `b` that are `outside`."""
    floats = _floats(one, other) or (a.astype(np.float64), b.astype(np.float64))
    distance = np.where(outside, _distance(*floats), -1.0)
    # A number beside NaN has the distance NaN, which argmax finds first.
    place = np.unravel_index(int(np.argmax(distance)), distance.shape)
    of_kind = f"{one.kind}, {_shape(one)}" if one.shape else one.kind
    counted = f"({of_kind}) {int(outside.sum())} of {outside.size} values"
    at = f" at [{', '.join(map(str, place))}]" if one.shape else ""
    values = f"{a[place]!s} and {b[place]!s}"
    if distance[place] <= 0:
        return f"{counted} have other bits, first{at}: {values}"
    return f"{counted} differ, most{at}: {values}, by {distance[place]:.3g}"


def _shape(entry: Entry) -> str:
    return "x".join(map(str, entry.shape)) or "one value"
