"""Which program `trainbox run` starts, with which command and in which folder."""

import os
import sys
from pathlib import Path

import pytest

from entrypoint.script.target import Target, find_script
from trainbox.contract.errors import WrongUse

RUN = Path("/runs/r")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def program(name: str, text: str = "#!/bin/sh\n", mode: int = 0o755) -> Path:
    file = Path(name)
    file.write_text(text)
    file.chmod(mode)
    return file


def test_the_command_of_a_python_file() -> None:
    program("train.py", "print(1)\n", 0o644)
    target = find_script("train.py", ["--out", "{run}/x", "--lr", "1"], None, {})
    assert target.command(RUN) == [
        *(sys.executable, "-u", "train.py", "--out", "/runs/r/x", "--lr", "1")
    ]


def test_the_name_of_a_script_may_begin_with_a_dash() -> None:
    program("-x.py", "", 0o644)
    assert find_script("-x.py", ["-y"], None, {}).command(RUN) == [
        sys.executable,
        "-u",
        "./-x.py",
        "-y",
    ]


def test_any_executable_file_is_a_program(folder: Path) -> None:
    program("go")
    assert find_script("go", ["a"], None, {}).command(RUN) == [str(folder / "go"), "a"]


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
    program("train.py", "print(1)\n")
    program("notes.txt", "hello\n", 0o644)
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
