"""The benchmarks are run by hand, so a test imports them."""

import ast
import importlib

import pytest

from tests.support.paths import ROOT


def _parts() -> list[str]:
    """Return the names in PARTS, without an import, which would run the command."""
    source = ast.parse((ROOT / "benchmarks/__main__.py").read_text(encoding="utf-8"))
    assigned = (node for node in source.body if isinstance(node, ast.Assign))
    (parts,) = (ast.literal_eval(node.value) for node in assigned)
    return list(parts)


@pytest.mark.parametrize("name", _parts())
def test_a_benchmark_can_be_imported(name: str) -> None:
    assert callable(importlib.import_module(f"benchmarks.{name}").measure)
