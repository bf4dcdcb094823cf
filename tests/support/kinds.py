"""Cases of which `make test` runs some, and `.ci/run` all or one of each kind."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def slow_but(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a test; a case that is not `kept` is slow, and rare."""
    marks = pytest.mark.slow, pytest.mark.rare
    return [case if case in kept else pytest.param(case, marks=marks) for case in cases]


def slow_after(count: int, cases: Sequence[Any]) -> list[Any]:
    """Return the cases of a test; the cases after the first `count` are slow, but not rare."""
    slow = [
        pytest.param(*case, marks=pytest.mark.slow)
        if isinstance(case, tuple)
        else pytest.param(case, marks=pytest.mark.slow)
        for case in cases[count:]
    ]
    return [*cases[:count], *slow]
