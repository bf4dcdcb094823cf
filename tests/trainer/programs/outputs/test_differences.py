"""The comparison of entries, exactly and within a tolerance."""

import math
from typing import Any

import numpy as np
import pytest

from trainer.programs.outputs.contents import (
    Entry,
    Key,
    digest,
    entry_of_array,
    entry_of_value,
    leaves,
)
from trainer.programs.outputs.differences import first_difference, largest_difference


def _entries(**values: Any) -> dict[Key, Entry]:
    return {
        (name,): entry_of_array(value) if isinstance(value, np.ndarray) else entry_of_value(value)
        for name, value in values.items()
    }


def _floats(*values: float) -> Any:
    return np.array(values, np.float32)


_OTHER_NAN = np.array([0x7FC00001], np.uint32).view(np.float32)


# fmt: off
_ONES = [
    (_floats(1, 2), _floats(1, 2), None),
    (_floats(math.nan), _floats(math.nan), None),
    (np.zeros((0, 3)), np.zeros((0, 3)), None),
    (_floats(1, 2), np.array([1.0, 2.0]), "tensor w: type float32 and float64"),
    (_floats(1, 2), _floats(1, 2).reshape(2, 1), "tensor w: shape 2 and 2x1"),
    (_floats(1, 2, 3), _floats(1, 2.5, 3.25),
     "tensor w: (float32, 3) 2 of 3 values differ, most at [1]: 2.0 and 2.5, by 0.5"),
    (_floats(1, 2), _floats(1, math.nan),
     "tensor w: (float32, 2) 1 of 2 values differ, most at [1]: 2.0 and nan, by nan"),
    (_floats(0.0, 1), _floats(-0.0, 1),
     "tensor w: (float32, 2) 1 of 2 values have other bits, first at [0]: 0.0 and -0.0"),
    (_floats(math.nan), _OTHER_NAN,
     "tensor w: (float32, 1) 1 of 1 values differ, most at [0]: nan and nan, by nan"),
    (3, 4, "tensor w: (int64) 1 of 1 values differ, most: 3 and 4, by 1"),
    ("cat", "dog", "tensor w: (text) 'cat' and 'dog'"),
    (["a", "b"], ["a", "bc"], "tensor w: (text) at [1] 'b' and 'bc'"),
    (f"{'a' * 90}1 to {'b' * 90}", f"{'a' * 90}2 to {'b' * 90}",
     f"tensor w: (text) ...{'a' * 20}1 to {'b' * 35} and ...{'a' * 20}2 to {'b' * 35}"),
    (2**70, 2**70 + 1, f"tensor w: (text) ...{str(2**70)[1:]} and ...{str(2**70 + 1)[1:]}"),
]
# fmt: on


@pytest.mark.parametrize(("one", "other", "expected"), _ONES)
def test_an_exact_comparison(one: Any, other: Any, expected: str | None) -> None:
    assert first_difference(_entries(w=one), _entries(w=other)) == expected
    same = digest(_entries(w=one)) == digest(_entries(w=other))
    assert same == (expected is None)


def test_the_first_of_several_differences_is_named() -> None:
    one = _entries(a=_floats(1), b=_floats(1), c=_floats(1))
    other = _entries(a=_floats(1), b=_floats(2), c=_floats(3))
    assert first_difference(one, other) == (
        "tensor b: (float32, 1) 1 of 1 values differ, most at [0]: 1.0 and 2.0, by 1; "
        "2 of 3 tensors differ"
    )


def test_an_entry_of_one_file_is_a_difference() -> None:
    less, more = _entries(a=1), _entries(a=1, b=2)
    assert first_difference(less, more, noun="entry") == (
        "entry b: it is only in the second file; 1 of 2 entries differ"
    )
    assert first_difference(more, less, noun="entry") == (
        "entry b: it is only in the first file; 1 of 2 entries differ"
    )


_INF, _NAN = math.inf, math.nan
# A tolerance of 0.01 is absolute up to 1, and relative above. Integers must be equal.
_AGREE = [(0.0, 0.009), (0.5, 0.509), (1000.0, 1009.0), (_NAN, _NAN), (_INF, _INF)]
_DIFFER = [
    *((0.0, 0.011), (1000.0, 1011.0), (1.0, _NAN), (_NAN, 1.0), (_INF, -_INF), (_INF, 1e30)),
    *((1e30, _INF), (1e308, -1e308), (1000, 1001), (True, False), ("a", "b")),
]


@pytest.mark.parametrize(("one", "other"), [*_AGREE, *_DIFFER])
def test_a_comparison_within_a_tolerance(one: Any, other: Any) -> None:
    found = first_difference(_entries(w=one), _entries(w=other), tolerance=0.01)
    assert (found is None) == ((one, other) in _AGREE)


def test_complex_numbers_have_a_tolerance_too() -> None:
    one, other = _entries(w=np.array([1 + 1j])), _entries(w=np.array([1 + 1.005j]))
    assert first_difference(one, other, 0.01) is None
    assert first_difference(one, other, 0.001) == (
        "tensor w: (complex128, 1) 1 of 1 values differ, most at [0]: (1+1j) and (1+1.005j), "
        "by 0.005"
    )


def test_only_values_outside_the_tolerance_are_counted() -> None:
    one, other = _entries(w=_floats(1, 2, 3)), _entries(w=_floats(1.001, 2.5, 3))
    assert first_difference(one, other, tolerance=0.01) == (
        "tensor w: (float32, 3) 1 of 3 values differ, most at [1]: 2.0 and 2.5, by 0.5"
    )


def test_the_largest_difference() -> None:
    one = _entries(a=_floats(1, math.nan, math.inf), b=_floats(1), n=1, only=_floats(9))
    other = _entries(a=_floats(1.25, math.nan, math.inf), b=_floats(1.5), n=5)
    assert largest_difference(one, other) == 0.5
    assert largest_difference(_entries(n=1), _entries(n=2)) == 0


def test_the_leaves_of_a_nested_value() -> None:
    tree = {"model": {"0.weight": 1.5}, "losses": [1, 2.5], "steps": (3, 4), "rows": [[1], "x"]}
    assert dict(leaves(tree | {"none": [], "empty": {}})) == {
        ("model", "0.weight"): 1.5,
        ("losses",): [1, 2.5],
        ("steps",): [3, 4],
        ("rows", 0): [1],
        ("rows", 1): "x",
        ("none",): [],
        ("empty",): {},
    }
    assert list(leaves(3)) == [((), 3)]


def test_names_with_dots_do_not_collide() -> None:
    assert len(dict(leaves({"a.b": 1, "a": {"b": 2}}))) == 2
