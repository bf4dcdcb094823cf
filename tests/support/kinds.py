"""Cases of which `make test` runs one of each kind."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(kept: Collection[Any], cases: Iterable[Any], *marks: Any) -> list[Any]:
    """Return the cases of a test, all slow but those that are `kept`."""
    return [
        case if case in kept else pytest.param(case, marks=(pytest.mark.slow, *marks))
        for case in cases
    ]
