"""The benchmarks are run by hand, so a test imports them."""

import importlib

import pytest

from tests.support.paths import ROOT

_NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__" not in path.stem)


def test_there_are_benchmarks() -> None:
    assert {"loop", "checkpoint", "startup"} <= set(_NAMES)


@pytest.mark.parametrize("name", _NAMES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    assert callable(importlib.import_module(f"benchmarks.{name}").measure)
