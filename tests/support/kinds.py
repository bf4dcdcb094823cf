"""Cases of which `make test` and `.ci/run` run one of each kind."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a test; a case that is not `kept` is slow, and rare."""
    marks = pytest.mark.slow, pytest.mark.rare
    return [case if case in kept else pytest.param(case, marks=marks) for case in cases]
