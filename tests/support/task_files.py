"""Task files that a test writes into its own folder."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer.load_task import task_class
from trainer.task_fields import TaskField, fields_of_class

HEAD = "from dataclasses import dataclass\nfrom trainbox.task import Task\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], str]]:
    """Write a task file into the working folder. The test's end forgets the modules from there."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)

    def write_file(name: str, text: str) -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
        return name

    yield write_file
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def loaded(spec: str) -> list[TaskField]:
    """Return the fields of the task `spec` after its import."""
    return fields_of_class(task_class(spec))
