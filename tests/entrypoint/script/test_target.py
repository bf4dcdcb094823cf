"""Which program `trainbox run` starts, with which command and in which folder."""

import os
import sys
from pathlib import Path

import pytest

from entrypoint.script.target import Target, find_script
from trainbox.errors import WrongUse


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_name_of_a_script_may_begin_with_a_dash() -> None:
    Path("-x.py").touch()
    command = find_script("-x.py", ["-y"], None, {}).command(Path("/runs/r"))
    assert command == [sys.executable, "-u", "./-x.py", "-y"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "trian.py",
            "the script trian.py cannot be read (No such file or directory): did you mean "
            "train.py?",
        ),
        (
            "no/such",
            "the script no/such cannot be read (No such file or directory): give the path of a "
            "Python file or a program",
        ),
        (
            "pipe.py",
            "the script pipe.py cannot be read (not a regular file): give the path of a Python "
            "file or a program",
        ),
        (
            "notes.txt",
            "notes.txt is neither a Python file (.py) nor executable: rename it, or use chmod +x",
        ),
    ],
)
def test_a_refused_script_and_its_message(name: str, text: str) -> None:
    os.mkfifo("pipe.py")
    Path("train.py").touch()
    Path("notes.txt").write_text("hello\n")
    with pytest.raises(WrongUse) as refused:
        find_script(name, [], None, {})
    assert str(refused.value) == text


def test_the_same_command_has_the_same_run() -> None:
    def name(script: str, *arguments: str, module: bool = False) -> str:
        return Target(script, arguments, module).run_name()

    assert name("a/train.py", "--lr", "1") == name("a/train.py", "--lr", "1")
    names = [
        name("a/train.py", "--lr", "1"),
        name("a/train.py", "--lr", "2"),
        name("a/train.py", "--lr 1"),
        name("b/train.py", "--lr", "1"),
        name("a.train", "--lr", "1", module=True),
    ]
    assert len(set(names)) == len(names)
    assert all(found.startswith("train-") for found in names)
