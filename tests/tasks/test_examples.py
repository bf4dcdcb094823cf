"""The examples train, and the README shows the same code."""

import re
import sys
from pathlib import Path

import pytest

from tests.support.here import Here

_ROOT = Path(__file__).parents[2]


def test_rings_reaches_the_accuracy_of_its_page(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "rings", raising=False)
    task = f"{_ROOT}/examples/rings/rings.py:Rings"
    code, _, err = here.command("train", task, "--device", "cpu", "--run", "r")
    assert (code, err) == (0, "")
    assert max(entry["accuracy"] for entry in here.entries("validation")) > 0.98


def test_readme_shows_the_example_as_it_is() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", (_ROOT / "README.md").read_text(), re.DOTALL)
    assert shown == (_ROOT / "examples/rings/rings.py").read_text()


def test_each_example_has_a_page_that_the_list_links() -> None:
    folders = sorted(path.name for path in (_ROOT / "examples").iterdir() if path.is_dir())
    page = (_ROOT / "examples/README.md").read_text()
    assert re.findall(r"\]\((\w+)/README\.md\)", page) == folders
    assert all((_ROOT / "examples" / name / "README.md").is_file() for name in folders)
