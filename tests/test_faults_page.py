"""tests/faults/README.md lists a test that exists for each fault of docs/reference/faults.md."""

import ast
import re
from pathlib import Path

_TESTS = Path(__file__).parent
_PAGE = _TESTS.parent / "docs/reference/faults.md"
_TABLE = _TESTS / "faults/README.md"


def _table() -> list[tuple[str, str, str]]:
    """(row, fault, tests) of each row of the table."""
    return re.findall(r"^\| (\d+) \| (.*) \| (.*) \|$", _TABLE.read_text(), re.MULTILINE)


def _listed() -> set[tuple[str, str, str]]:
    """(row, file, test) of each test in the table."""
    return {
        (row, file, test)
        for row, _, tests in _table()
        for file, test in re.findall(r"`(\S+\.py)::(\w+)`", tests)
    }


def _tests(file: str) -> set[str]:
    tree = ast.parse((_TESTS / file).read_text())
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_the_table_has_the_faults_of_the_page() -> None:
    rows = re.findall(r"^\| (.*?) \|.*\|$", _PAGE.read_text(), re.MULTILINE)
    faults = [fault for fault in rows if fault != "Fault"]
    assert len(faults) > 70
    assert sorted(faults) == sorted(fault for _, fault, _ in _table())


def test_each_row_has_tests_that_exist() -> None:
    assert [fault for _, fault, tests in _table() if "::" not in tests] == []
    assert [f"{file}::{test}" for _, file, test in _listed() if test not in _tests(file)] == []


def test_each_test_of_a_row_is_listed() -> None:
    files = (f"faults/{path.name}" for path in (_TESTS / "faults").glob("test_*.py"))
    written = {
        (str(int(test.split("_")[2])), file, test)
        for file in files
        for test in _tests(file)
        if test.startswith("test_row_")
    }
    assert len(written) > 40
    assert written - _listed() == set()
