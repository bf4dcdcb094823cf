"""The task that docs/tasks.md shows works as it stands there."""

import re
from pathlib import Path

from tests.conftest import Trainbox

_PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"


def test_the_example_trains_as_the_page_says(trainbox: Trainbox) -> None:
    page = _PAGE.read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Gestures" in block]
    assert len(code.splitlines()) <= 45
    (command,) = re.findall(r"^trainbox (train my_tasks/gestures\.py:Gestures --set width=64)", page, re.MULTILINE)
    (trainbox.folder / "my_tasks").mkdir()
    (trainbox.folder / "my_tasks/gestures.py").write_text(code)
    ended = trainbox(*command.split(), "--device", "cpu", "--run", "r")
    assert ended.code == 0, ended.err
    assert ended.err == ""
    best = max(entry["accuracy"] for entry in trainbox.entries("r", "validation"))
    assert 0.9 < best <= 1
    assert "Gestures, " in ended.out
    listed = trainbox("tasks", "my_tasks/gestures.py:Gestures")
    assert listed.code == 0
    assert "--set width=...  int, default 32" in listed.out
