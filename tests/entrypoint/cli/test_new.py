"""`trainbox new` writes the examples of the pages, which other tests train."""

import re

import pytest

from tests.support.commands import Trainbox
from tests.support.paths import ROOT

_EXAMPLES = {
    "classification": ("guides/own-task.md", "train my_tasks/mine.py:Gestures"),
    "regression": ("guides/own-task.md", "train my_tasks/mine.py:Waves"),
    "sequence": ("guides/own-task.md", "train my_tasks/mine.py:Rising"),
    "images": ("reference/task.md", "train my_tasks/mine.py:Pictures"),
    "script": ("guides/library.md", "run my_tasks/mine.py"),
}


@pytest.mark.parametrize("kind", _EXAMPLES)
def test_a_new_file_is_the_example_of_the_page(forked: Trainbox, kind: str) -> None:
    ended = forked("new", "my_tasks/mine.py", "--kind", kind)
    page, command = _EXAMPLES[kind]
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == f"written to my_tasks/mine.py; to train it: trainbox {command}\n"
    text = (forked.folder / "my_tasks/mine.py").read_text(encoding="utf-8")
    assert text in re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL
    )


def test_a_file_that_cannot_be_new_is_refused(forked: Trainbox) -> None:
    (forked.folder / "mine.py").write_text("mine")
    for words, message in (
        (("mine.py",), "new mine.py: the file exists: give the path of a new file"),
        (("mine",), "new mine: this is not the name of a Python file: did you mean mine.py?"),
        (
            ("a/q.ipynb",),
            "new a/q.ipynb: this is not the name of a Python file: did you mean a/q.py",
        ),
        (
            ("q.v2.txt",),
            "new q.v2.txt: this is not the name of a Python file: did you mean q_v2.py",
        ),
        ((".",), "new .: this is not the name of a Python file: did you mean mine.py?"),
        (("..",), "new ..: this is not the name of a Python file: did you mean mine.py?"),
        (("v1.2",), "new v1.2: this is not the name of a Python file: did you mean v1_2.py?"),
        (("random.py",), "task file random.py has the name of the standard library's module ran"),
        (("mine.py/b.py",), "cannot write mine.py"),
        (("b.py", "--kind", "gan"), "Invalid value for '--kind': 'gan' is not one of 'classifi"),
    ):
        ended = forked("new", *words)
        assert ended.code in (2, 4), ended
        assert ended.err.startswith(f"trainbox: {message}"), ended.err
    assert (forked.folder / "mine.py").read_text() == "mine"
    assert [path.name for path in forked.folder.iterdir()] == ["mine.py"]
