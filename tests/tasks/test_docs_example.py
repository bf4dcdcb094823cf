"""The tasks in docs/guides/own-task.md train as the page states."""

import re
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.support.here import Here

_PAGE = Path(__file__).parents[2] / "docs/guides/own-task.md"


def test_the_example_trains_as_the_page_states(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    page = _PAGE.read_text()
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "class Gestures" in block
    ]
    assert len(code.splitlines()) <= 45
    (command,) = re.findall(
        r"^trainbox (train my_tasks/gestures\.py:Gestures --set width=64)", page, re.MULTILINE
    )
    (here.folder / "my_tasks").mkdir()
    (here.folder / "my_tasks/gestures.py").write_text(code)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "gestures", raising=False)
    ended, out, err = here.command(*command.split(), "--device", "cpu", "--run", "r")
    assert (ended, err) == (0, "")
    best = max(entry["accuracy"] for entry in here.entries("validation"))
    assert 0.9 < best <= 1
    assert "Gestures, " in out
    ended, out, _ = here.command("tasks", "my_tasks/gestures.py:Gestures")
    assert ended == 0
    assert "--set width=...  int, default 32" in out


def test_the_example_of_pictures_in_folders_trains_with_their_classes(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = _PAGE.read_text(encoding="utf-8")
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "class Pictures" in block
    ]
    (command,) = re.findall(
        r"^trainbox (train my_tasks/pictures\.py:Pictures .*)$", page, re.MULTILINE
    )
    task = here.folder / "my_tasks/pictures.py"
    task.parent.mkdir()
    task.write_text(code, encoding="utf-8")
    for part, count in (("train", 8), ("validation", 3)):
        for colour in ("red", "lime", "blue"):
            folder = here.folder / "data/flowers" / part / colour
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (12 + number, 10), colour).save(folder / f"{number}.png")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "pictures", raising=False)
    options = (
        "--set",
        "size=8",
        "--set",
        "width=4",
        "--batch-size",
        "8",
        "--epochs",
        "8",
        "--lr",
        "0.05",
        "--workers",
        "0",
    )
    ended, out, err = here.command(*command.split(), *options, "--device", "cpu", "--run", "r")
    assert (ended, err) == (0, "")
    assert "24 training and 9 validation examples" in out
    last = here.entries("validation")[-1]
    assert [sum(row) for row in last["confusion"]] == [3, 3, 3]
    assert last["accuracy"] == 1
    (here.folder / "data/flowers/validation/red").rename(
        here.folder / "data/flowers/validation/crimson"
    )
    ended, _, err = here.command(*command.split(), *options, "--device", "cpu", "--run", "s")
    assert ended == 2
    assert "data/flowers/validation has other classes (['blue', 'crimson', 'lime'])" in err
    ended, _, err = here.command(
        *command.split(), *options, "--set", "folder=roses", "--device", "cpu", "--run", "t"
    )
    assert ended == 2
    assert err.startswith("trainbox: task Pictures: with_data() raised FileNotFoundError: ")
    assert ": put the data there, or set its folder with --data-dir; " in err
