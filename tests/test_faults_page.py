"""docs/reference/faults.md names tests that exist, and each test of a row stands in its row."""

import ast
import re
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def _named() -> list[tuple[str, str, str]]:
    """(row, file, test) of each test that the page names."""
    rows = re.findall(
        r"^\| (\d+) \|(.*)$", (_ROOT / "docs/reference/faults.md").read_text(), re.MULTILINE
    )
    return [
        (number, file, test)
        for number, line in rows
        for file, test in re.findall(r"`(\S+\.py)::(\w+)`", line)
    ]


def _tests(file: str) -> set[str]:
    tree = ast.parse((_ROOT / "tests" / file).read_text())
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_each_test_that_the_page_names_exists() -> None:
    named = _named()
    assert len(named) > 40
    assert [f"{file}::{test}" for _, file, test in named if test not in _tests(file)] == []


def test_each_row_names_a_test_and_each_test_of_a_row_is_named() -> None:
    named = _named()
    rows = re.findall(
        r"^\| (\d+) \|", (_ROOT / "docs/reference/faults.md").read_text(), re.MULTILINE
    )
    assert {number for number, _, _ in named} == set(rows)
    files = (f"faults/{path.name}" for path in (_ROOT / "tests/faults").glob("test_*.py"))
    written = {
        (str(int(test.split("_")[2])), file, test)
        for file in files
        for test in _tests(file)
        if test.startswith("test_row_")
    }
    assert written - set(named) == set()
