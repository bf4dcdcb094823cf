"""Which program `trainbox run` starts, with which command and in which folder."""

import errno
import os
import sys
import zipfile
from pathlib import Path

import pytest

from entrypoint.script.manifest import project_folders
from entrypoint.script.sources import source_digests
from entrypoint.script.target import Target, find_module, find_script
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
    target = find_script("train.py", ["--out", "{run}/x", "--lr", "1"])
    assert target.command(RUN, "python") == [
        *("python", "-u", "train.py", "--out", "/runs/r/x", "--lr", "1")
    ]


def test_the_name_of_a_script_may_begin_with_a_dash() -> None:
    program("-x.py", "", 0o644)
    assert find_script("-x.py", ["-y"]).command(RUN, "python") == ["python", "-u", "./-x.py", "-y"]


def test_a_zip_file_with_a_python_line_runs_with_this_python() -> None:
    with zipfile.ZipFile("train.pyz", "w") as packed:
        packed.writestr("__main__.py", "print(1)")
    content = Path("train.pyz").read_bytes()
    Path("train.pyz").write_bytes(b"#!/usr/bin/env python3\n" + content)
    assert find_script("train.pyz", []).command(RUN, "python") == ["python", "-u", "train.pyz"]


def test_a_script_with_a_python_line_runs_with_this_python() -> None:
    program("train", "#!/usr/bin/env python3\nprint(1)\n")
    assert find_script("train", []).command(RUN, "python") == ["python", "-u", "train"]


def test_any_executable_file_is_a_program(folder: Path) -> None:
    program("go")
    assert find_script("go", ["a"]).command(RUN) == [str(folder / "go"), "a"]


def test_the_command_of_a_module() -> None:
    Path("pkg").mkdir()
    program("pkg/__init__.py", "raise SystemExit('executed')\n")
    program("pkg/train.py", "print(1)\n")
    target = find_module("pkg.train", ["--lr", "1"], [str(Path.cwd())])
    assert target.command(RUN, "python") == ["python", "-u", "-m", "pkg.train", "--lr", "1"]
    assert target.file == Path.cwd() / "pkg/train.py"


def test_a_package_is_run_by_its_main_module() -> None:
    Path("pkg").mkdir()
    program("pkg/__main__.py", "print(1)\n")
    assert find_module("pkg", [], [str(Path.cwd())]).file.name == "__main__.py"


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
            "dangling",
            "the script dangling cannot be read (No such file or directory): give the path of a "
            "Python file or a program",
        ),
        ("folder", "folder is a folder: name the script in it, or -m MODULE"),
        ("pipe.py", "pipe.py is not a regular file: name a Python file or a program"),
        (
            "notes.txt",
            "notes.txt is neither a Python file (.py) nor executable: rename it, or use chmod +x",
        ),
        (
            "wrong.py",
            "wrong.py is not valid Python (line 1: expected an indented block after 'if' "
            "statement on line 1): correct it",
        ),
        (
            "binary.py",
            "binary.py is not valid Python (source code string cannot contain null bytes): "
            "correct it",
        ),
    ],
)
def test_a_refused_script_and_its_message(name: str, text: str) -> None:
    Path("folder").mkdir()
    os.mkfifo("pipe.py")
    Path("dangling").symlink_to("nowhere")
    program("train.py", "print(1)\n")
    program("notes.txt", "hello\n", 0o644)
    program("wrong.py", "if True:\n")
    program("binary.py", "\0\0")
    with pytest.raises(WrongUse) as refused:
        find_script(name, [])
    assert str(refused.value) == text


@pytest.mark.parametrize("name", ["no.such", "folder", "..x", ""])
def test_a_module_that_is_not_found(name: str) -> None:
    Path("folder").mkdir()
    with pytest.raises(WrongUse, match="no such module in .* start the command in the"):
        find_module(name, [], [str(Path.cwd())])


def test_the_same_command_has_the_same_run() -> None:
    def name(script: str, *arguments: str, module: bool = False) -> str:
        return Target(script, arguments, module, Path(script)).run_name()

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


@pytest.mark.parametrize("script", ["../../ä b/.py", "x" * 300 + ".py", "-", "...", "a/\n.py"])
def test_the_run_name_of_an_odd_script_is_a_plain_name(script: str) -> None:
    found = Target(script, (), False, Path(script)).run_name()
    assert Path(found).name == found
    assert len(found) < 60
    assert found.isascii() and found.isprintable() and " " not in found


def test_the_sources_are_the_files_of_the_project_that_are_imported() -> None:
    Path("lib").mkdir()
    program("train.py", "import json, lib.model, torch\nfrom near import x\n", 0o644)
    program("near.py", "x = 1\n", 0o644)
    program("lib/__init__.py", "", 0o644)
    program("lib/model.py", "raise SystemExit('executed')\n", 0o644)
    program("other.py", "", 0o644)
    target = find_script("train.py", [])
    found = source_digests(target, [Path.cwd()])
    assert set(found) == {"train.py", "near.py", "lib/__init__.py", "lib/model.py"}
    program("near.py", "x = 2\n", 0o644)
    again = source_digests(target, [Path.cwd()])
    assert {name for name in found if found[name] != again[name]} == {"near.py"}


def test_the_sources_of_a_package_without_an_init_file() -> None:
    Path("lib/deep").mkdir(parents=True)
    program("lib/model.py", "from . import layer\n", 0o644)
    program("lib/layer.py", "import near\n", 0o644)
    program("lib/deep/other.py", "", 0o644)
    program("near.py", "", 0o644)
    program("train.py", "import lib.model\nfrom lib.deep import other\n", 0o644)
    found = source_digests(find_script("train.py", []), [Path.cwd()])
    assert set(found) == {
        *("train.py", "near.py", "lib/model.py", "lib/layer.py", "lib/deep/other.py")
    }


def test_installed_packages_are_not_sources() -> None:
    program("train.py", "", 0o644)
    folders = ["lib", "/opt/lib/python3.11/site-packages", ""]
    assert project_folders(find_script("train.py", []), folders) == [Path.cwd(), Path("lib")]


def test_a_module_that_is_not_valid_python_does_not_stop_the_search() -> None:
    program("train.py", "import broken\n", 0o644)
    program("broken.py", "if True:\n", 0o644)
    assert "train.py" in source_digests(find_script("train.py", []), [Path.cwd()])


def test_a_script_that_must_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    program("train.py", "print(1)\n", 0o000)
    monkeypatch.setattr(Path, "open", refuse)  # root may read every file
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(WrongUse, match="cannot be read .Permission denied"):
        find_script("train.py", [])


def test_the_python_of_trainbox_runs_the_script() -> None:
    program("train.py", "", 0o644)
    assert find_script("train.py", []).command(RUN)[0] == sys.executable
