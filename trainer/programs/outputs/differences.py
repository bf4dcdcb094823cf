"""Compare the entries of two files, exactly or within a tolerance."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.programs.outputs.contents import Entry, Key

_FLOATS = "fc"  # NumPy's kinds of floating-point numbers
# NumPy warns of differences of infinities and NaN.
_QUIET = np.errstate(invalid="ignore", over="ignore")


@_QUIET
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
    keys = {**reference, **other}
    found = {
        key: how
        for key in keys
        if (how := _difference(reference.get(key), other.get(key), tolerance))
    }
    if not found:
        return None
    first, how = next(iter(found.items()))
    named = f"{noun} {'.'.join(map(str, first))}".strip()
    if len(keys) == 1:
        return f"{named}: {how}"
    plural = "entries" if noun == "entry" else f"{noun}s"
    return f"{named}: {how}; {len(found)} of {len(keys)} {plural} differ"


@_QUIET
def largest_difference(reference: Mapping[Key, Entry], other: Mapping[Key, Entry]) -> float:
    """Return the largest |a - b| of the floating-point numbers in both files."""
    both = [(reference[key].values, other[key].values) for key in reference.keys() & other.keys()]
    return max(
        (
            float(np.nanmax(_distance(a, b), initial=0.0))
            for a, b in both
            if a.dtype.kind == b.dtype.kind and a.dtype.kind in _FLOATS and a.shape == b.shape
        ),
        default=0.0,
    )


def _difference(one: Entry | None, other: Entry | None, tolerance: float) -> str | None:
    """Describe how two entries differ, or return None."""
    if one is None or other is None:
        return f"it is only in the {'second' if one is None else 'first'} file"
    if one.kind != other.kind:
        return f"type {one.kind} and {other.kind}"
    if one.bits.shape != other.bits.shape:
        return f"shape {_shape(one)} and {_shape(other)}"
    differs = _differs(one, other, tolerance)
    if not differs.any():
        return None
    return (_greatest if one.is_numeric else _first_text)(one, other, differs)


def _differs(one: Entry, other: Entry, tolerance: float) -> NDArray[np.bool_]:
    """Return for each value whether it differs: see `first_difference`."""
    if not tolerance or not any(e.values.dtype.kind in _FLOATS for e in (one, other)):
        return np.asarray(one.bits != other.bits)
    a, b = _double(one.values), _double(other.values)
    absolute = np.isclose(b, a, rtol=0, atol=tolerance, equal_nan=True)
    return np.asarray(~(absolute | np.isclose(b, a, rtol=tolerance, atol=0)))


def _greatest(one: Entry, other: Entry, differs: NDArray[np.bool_]) -> str:
    """Describe the largest difference of the numbers that differ."""
    a, b = one.values, other.values
    distance = np.where(differs, _distance(a, b), -1.0)
    # A number beside NaN has the distance NaN, which argmax finds first.
    place = np.unravel_index(int(np.argmax(distance)), distance.shape)
    of_kind = f"{one.kind}, {_shape(one)}" if a.shape else one.kind
    counted = f"({of_kind}) {int(differs.sum())} of {differs.size} values"
    at = f" at [{', '.join(map(str, place))}]" if a.shape else ""
    values = f"{a[place]!s} and {b[place]!s}"
    if distance[place] <= 0:
        return f"{counted} have other bits, first{at}: {values}"
    return f"{counted} differ, most{at}: {values}, by {distance[place]:.3g}"


def _first_text(one: Entry, other: Entry, differs: NDArray[np.bool_]) -> str:
    """Show the first text that differs, from shortly before its first different character."""
    place = np.unravel_index(int(np.argmax(differs)), differs.shape)
    a, b = str(one.values[place]), str(other.values[place])
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    begin = max(0, len([*same]) - 20)
    at = f" at [{', '.join(map(str, place))}]" if differs.shape else ""
    shown = [("..." if begin else "") + text[begin : begin + 60] for text in (a, b)]
    return f"({one.kind}){at} {shown[0]} and {shown[1]}"


def _distance(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    a, b = _double(a), _double(b)
    return np.where(a == b, 0.0, np.abs(a - b))


def _double(numbers: NDArray[Any]) -> NDArray[Any]:
    return numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64)


def _shape(entry: Entry) -> str:
    return "x".join(map(str, entry.bits.shape)) or "one value"
