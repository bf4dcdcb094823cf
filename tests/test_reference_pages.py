"""The reference pages list each option, choice and built-in task, and each exit code."""

import ast
import re
from pathlib import Path

import click
import pytest

from trainbox.errors import ExitCode
from trainbox.options.table import Option, options
from trainbox.task_names.task_spec import built_in_tasks

_DOCS = Path(__file__).parents[1] / "docs"
_OPTIONS = [option for option in options("train") if not option.hidden]


@pytest.mark.parametrize("option", _OPTIONS, ids=lambda option: option.key)
def test_the_page_of_settings_has_each_option(option: Option) -> None:
    page = (_DOCS / "reference/settings.md").read_text()
    assert f"`--{option.key}`" in page or f"`--{option.key} " in page
    if isinstance(option.type, click.Choice) and option.of_trainer:
        assert [choice for choice in option.type.choices if f"`{choice}`" not in page] == []


def test_the_ten_functions_of_a_run_are_where_the_page_states() -> None:
    page = (_DOCS / "concepts/launch.md").read_text().partition("## The plan")[0]
    rows = re.findall(r"^\| \d+ \| `([\w.]+)` \| (\S+) \| (\d+) \|", page, re.MULTILINE)
    assert len(rows) == 10
    for name, file, lines in rows:
        scope: ast.AST = ast.parse((_DOCS.parent / file).read_text(encoding="utf-8"))
        for part in name.split("."):
            (scope,) = [
                node
                for node in ast.iter_child_nodes(scope)
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part
            ]
        assert isinstance(scope, ast.FunctionDef) and scope.end_lineno
        # A small change of a function need not change the page.
        assert abs(scope.end_lineno - scope.lineno + 1 - int(lines)) <= 5, (name, file)


def test_the_page_of_the_launch_plan_has_each_strategy() -> None:
    page = (_DOCS / "concepts/launch.md").read_text().partition("## Strategies")[2]
    (strategy,) = [option.type for option in _OPTIONS if option.key == "strategy"]
    assert isinstance(strategy, click.Choice)
    assert [name for name in strategy.choices if f"| `{name}` |" not in page] == []


def test_the_pages_of_the_tasks_have_each_task() -> None:
    pages = [path.read_text() for path in sorted((_DOCS / "reference/tasks").glob("*.md"))]
    assert [name for name in built_in_tasks() if f"`{name}`" not in "".join(pages)] == []


def test_the_page_of_the_exit_codes_has_each_code_and_its_meaning() -> None:
    page = (_DOCS / "reference/exit-codes.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", page, re.MULTILINE)
    assert [(int(code), meaning) for code, meaning in rows] == [
        (code, code.meaning) for code in ExitCode
    ]
