"""The reference pages list each option, choice and built-in task, and each exit code."""

import re
from pathlib import Path

import click
import pytest

from entrypoint.cli.train import train as launch
from trainbox.contract.errors import ExitCode
from trainer.cli.train import train
from trainer.task_loading.spec import built_in_tasks

_DOCS = Path(__file__).parents[1] / "docs"
_TRAINING = [p for p in train.params if isinstance(p, click.Option) and not p.hidden]
_LAUNCH = [p for p in launch.params if isinstance(p, click.Option) and p.name != "help"]


@pytest.mark.parametrize("option", [*_TRAINING, *_LAUNCH], ids=lambda option: str(option.name))
def test_the_page_of_settings_has_each_option(option: click.Option) -> None:
    page = (_DOCS / "reference/settings.md").read_text()
    assert f"`{option.opts[0]}`" in page or f"`{option.opts[0]} " in page
    if isinstance(option.type, click.Choice) and option in _TRAINING and option.name != "device":
        assert [choice for choice in option.type.choices if f"`{choice}`" not in page] == []


def test_the_page_of_the_launch_plan_has_each_strategy() -> None:
    page = (_DOCS / "concepts/launch.md").read_text().partition("## Strategies")[2]
    (strategy,) = [option.type for option in _LAUNCH if option.name == "strategy"]
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
