"""Which program `trainbox run` starts, with which command and in which folder."""

import os
import subprocess
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


def test_a_program_with_windows_line_ends_is_refused() -> None:
    program = Path("go.sh")
    program.write_bytes(b"#!/bin/sh\r\nexit 3\r\n")
    program.chmod(0o755)
    with pytest.raises(WrongUse, match="of go.sh has a Windows line end") as refused:
        find_script("go.sh", [], None, {})
    subprocess.run(str(refused.value).split("`")[1], shell=True, check=True)  # noqa: S602
    assert find_script("go.sh", [], None, {}).python is None
    assert subprocess.run("./go.sh", check=False).returncode == 3


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


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("python train.py", "leave out python: `trainbox run train.py`"),
        (
            "python3.11 -u train.py --lr 1",
            "leave out python3.11: `trainbox run train.py -- --lr 1`",
        ),
        ("python -m pack.train -e 3", "leave out python: `trainbox run -m pack.train -- -e 3`"),
        (
            "torchrun --nproc_per_node=2 train.py -e 3",
            "leave out torchrun: `trainbox run --gpus 2 train.py -- -e 3`",
        ),
        (
            "torchrun --standalone --nproc-per-node 4 -m pack.train",
            "leave out torchrun: `trainbox run --gpus 4 -m pack.train`",
        ),
        (
            "bash run.sh",
            "leave out bash: `trainbox run run.sh`, after `chmod +x run.sh` and with the first "
            "line #!/bin/bash",
        ),
        ("python", "leave out python: `trainbox run train.py`"),
        ("app -x", "use `trainbox run app/__main__.py -- -x`"),
    ],
)
def test_a_program_that_starts_scripts_is_left_out(words: str, cure: str) -> None:
    Path("app").mkdir()
    Path("app/__main__.py").touch()
    name, *arguments = words.split()
    with pytest.raises(WrongUse) as refused:
        find_script(name, arguments, None, {})
    assert str(refused.value).endswith(f": {cure}")


def test_a_notebook_gets_the_command_that_makes_a_script() -> None:
    Path("a.ipynb").touch()
    with pytest.raises(WrongUse, match="jupyter nbconvert --to script a.ipynb"):
        find_script("a.ipynb", [], None, {})


def test_a_script_may_have_the_name_of_such_a_program() -> None:
    Path("python").write_text("#!/bin/sh")
    Path("python").chmod(0o755)
    assert find_script("python", ["x"], None, {}).name == "python"
