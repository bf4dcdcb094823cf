"""Where make runs a verb, decided from settings and a machine, and the log of a build."""

import shlex
import sys
from pathlib import Path

import pytest

from deploy import host
from deploy.host import Machine, Refusal

_COMPOSE = "/plugins/docker-compose"


@pytest.mark.parametrize(
    ("env", "machine", "expected"),
    [
        ({}, Machine(), "venv"),
        ({}, Machine(gpu="/dev/x"), "venv"),
        ({}, Machine(compose=_COMPOSE), "docker-cpu"),
        ({}, Machine(compose=_COMPOSE, has_nvidia=True), "docker-gpu"),
        ({"GPUS": "0"}, Machine(compose=_COMPOSE, has_nvidia=True), "docker-cpu"),
        ({"GPUS": "0"}, Machine(compose=_COMPOSE, gpu="/dev/x"), "docker-cpu"),
        ({"RUN_IN": "venv"}, Machine(compose=_COMPOSE, gpu="/dev/x"), "venv"),
        ({"RUN_IN": "docker-gpu"}, Machine(), "docker-gpu"),
        ({"RUN_IN": "docker-gpu", "GPUS": "0"}, Machine(), "docker-cpu"),
    ],
)
def test_where_a_verb_runs(env: dict[str, str], machine: Machine, expected: str) -> None:
    assert host.place(env, machine) == expected


@pytest.mark.parametrize(
    ("env", "machine", "message"),
    [
        ({}, Machine(compose=_COMPOSE, gpu="/dev/x"), "this host has an NVIDIA GPU (/dev/x), and "),
        ({"RUN_IN": "docker"}, Machine(), "RUN_IN=docker is unknown: set RUN_IN=docker-gpu, "),
    ],
)
def test_a_machine_or_setting_that_is_refused(
    env: dict[str, str], machine: Machine, message: str
) -> None:
    with pytest.raises(Refusal) as refused:
        host.place(env, machine)
    assert str(refused.value).startswith(message)


def test_quotes_and_dollars_reach_the_program_as_they_are() -> None:
    arguments = """--set 'name=it is "a" $HOME' --set b=`ls` *"""
    command = host.in_venv("train", {"ARGS": arguments, "SET": "a=1  b='x y'"})
    assert command.argv == [
        ".venv/bin/trainbox",
        *("train", "--set", 'name=it is "a" $HOME', "--set", "b=`ls`", "*"),
    ]
    assert command.variables["SET"] == "a=1  b='x y'"
    assert shlex.split(str(command))[3:] == command.argv


def test_a_quote_that_is_not_closed_is_refused() -> None:
    with pytest.raises(Refusal, match="No closing quotation: close the quotes"):
        host.in_venv("train", {"ARGS": "--set 'a"})


def test_a_pattern_of_files_is_replaced_by_the_files(tmp_path: Path) -> None:
    for name in ("b.png", "a.png"):
        (tmp_path / name).touch()
    env = {"RUN": "runs/x", "FILES": f"{tmp_path}/*.png none*"}
    *_, a, b, missing = host.in_venv("predict", env).argv
    assert (a, b, missing) == (f"{tmp_path}/a.png", f"{tmp_path}/b.png", "none*")


@pytest.mark.parametrize(
    ("script", "project", "expected"),
    [
        ("a.py", "", ("", ["a.py"])),
        ("a.py", "/p", ("/p", ["a.py"])),
        ("/p q/a.py", "", ("/p q", ["a.py"])),
        ("/p/q/a.py", "/p", ("/p", ["q/a.py"])),
        ("/r/a.py", "/p", ("/p", ["/r/a.py"])),
    ],
)
def test_the_folder_of_a_script(script: str, project: str, expected: tuple[str, list[str]]) -> None:
    assert host.project({"SCRIPT": script, "PROJECT_DIR": project}) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("n", True), ("kn --no-print-directory", True), (" --no-print-directory -- N=n", False)],
)
def test_a_dry_run_is_recognised(flags: str, expected: bool) -> None:
    assert host.is_dry({"MAKEFLAGS": flags}) is expected


@pytest.mark.parametrize(
    ("program", "code", "shown"),
    [
        ("print('log')", 0, ""),
        ("print('log'); exit(3)", 3, "log\n"),
        ("import time; print('log', flush=True); time.sleep(0.5)", 0, "log\n"),
    ],
    ids=["fast", "failed", "slow"],
)
def test_the_log_of_a_build_is_shown_if_it_takes_time_or_fails(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    code: int,
    shown: str,
) -> None:
    monkeypatch.setattr(host, "_SHOWN_AFTER_S", 0.2 if "sleep" in program else 60.0)
    assert host._built([sys.executable, "-c", program]) == code
    assert capfd.readouterr() == ("", shown)
