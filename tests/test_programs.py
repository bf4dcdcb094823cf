"""The table of the programs that Trainbox starts, compared with the code."""

import ast
import functools
import importlib.util
import re
from pathlib import Path

import pytest

from trainbox.processes import programs
from trainbox.processes.programs import PROGRAMS, Program

ROOT = Path(__file__).parents[1]
NAMES = {value: name for name, value in vars(programs).items() if isinstance(value, Program)}
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
    for package in ("entrypoint", "trainbox", "trainer")
    for path in sorted((ROOT / package).rglob("*.py"))
}


def test_the_table_has_each_program() -> None:
    assert {*PROGRAMS} == {*NAMES}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.module)
def test_a_program_can_be_started_and_its_starters_are_those_of_the_table(
    program: Program,
) -> None:
    assert importlib.util.find_spec(program.module)
    if (source := SOURCES.get(program.module)) and f"{program.module}.__main__" not in SOURCES:
        assert 'if __name__ == "__main__"' in source
    starters = {name for name, imported in _imports().items() if NAMES[program] in imported}
    assert starters == {*program.started_by}


@functools.cache
def _trees() -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in SOURCES.items()}


@functools.cache
def _imports() -> dict[str, set[str]]:
    """Return what each source imports from the table."""
    return {
        name: {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == programs.__name__
            for alias in node.names
        }
        for name, tree in _trees().items()
    }


def test_no_source_starts_a_module_by_its_name_as_text() -> None:
    """Only the table has such names, so a moved module has one place to change."""
    named = {program.module for program in PROGRAMS} - {"trainer", "entrypoint"}
    found = {
        (module, node.value)
        for module, tree in _trees().items()
        if module != programs.__name__
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in named
    }
    assert not found
    # `python -m trainer` and `python -m entrypoint` are also names of packages, so only the
    # commands are searched.
    assert not [m for m, text in SOURCES.items() if re.search(r'command_of\(\s*"', text)]
