"""Messages recommend commands that work where the user typed."""

from pathlib import Path

import pytest

from tests.support.here import Here
from trainbox.disclosure.suggested_commands import command, run_command_line, tensorboard

COMPOSE = "docker compose run --rm --no-deps train"
SCRIPT = "deploy/apptainer/trainbox.sh"


# fmt: off
_TYPEDS = [
    (None, "trainbox doctor", "trainbox sweep --name x", "tensorboard --logdir runs"),
    ("make", "make doctor", 'make sweep ARGS="--name x"', "make tensorboard"),
    (COMPOSE, f"{COMPOSE} doctor", f"{COMPOSE} sweep --name x", "docker compose up tensorboard"),
    (SCRIPT, f"{SCRIPT} doctor", f"{SCRIPT} sweep --name x", f"{SCRIPT} tensorboard --logdir runs"),
]
# fmt: on


@pytest.mark.parametrize(("typed", "doctor", "sweep", "curves"), _TYPEDS)
def test_a_command_has_the_form_that_was_typed(
    monkeypatch: pytest.MonkeyPatch, typed: str | None, doctor: str, sweep: str, curves: str
) -> None:
    monkeypatch.delenv("TRAINBOX_COMMAND", raising=False)
    if typed:
        monkeypatch.setenv("TRAINBOX_COMMAND", typed)
    assert (command("doctor"), command("sweep", "--name x"), tensorboard(Path("runs"))) == (
        doctor,
        sweep,
        curves,
    )
    if typed is None:
        assert tensorboard(Path("my runs")) == "tensorboard --logdir 'my runs'"
    form = (
        'make sweep ARGS="run --x"' if typed == "make" else f"{typed or 'trainbox'} sweep run --x"
    )
    assert command("sweep run", "--x") == form


# fmt: off
_TYPEDS_AND_SCRIPT = [
    ("", "trainbox run --gpus 1 a.py -- --lr 1", "trainbox run --gpus 1 -m a.b"),
    ("make", 'make run SCRIPT=a.py RUN_OPTIONS="--gpus 1" ARGS="--lr 1"',
     'make run MODULE=a.b RUN_OPTIONS="--gpus 1"'),
    (COMPOSE, "docker compose run --rm --no-deps run --gpus 1 a.py -- --lr 1",
     "docker compose run --rm --no-deps run --gpus 1 -m a.b"),
    (SCRIPT, f"{SCRIPT} run --gpus 1 a.py -- --lr 1", f"{SCRIPT} run --gpus 1 -m a.b"),
]
# fmt: on


@pytest.mark.parametrize(("typed", "script", "module"), _TYPEDS_AND_SCRIPT)
def test_the_command_of_a_script_has_the_form_that_was_typed(
    monkeypatch: pytest.MonkeyPatch, typed: str, script: str, module: str
) -> None:
    monkeypatch.setenv("TRAINBOX_COMMAND", typed)
    assert run_command_line(["--gpus", "1"], "a.py", False, ["--lr", "1"]) == script
    assert run_command_line(["--gpus", "1"], "a.b", True, []) == module


def test_the_command_of_a_script_has_its_paths_but_not_its_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRAINBOX_COMMAND", raising=False)
    arguments = ["--init", "/data/runs/digits-7d2c/model.pt", "--api-key", "abc"]
    shown = run_command_line([], "a.py", False, arguments).partition(" -- ")[2]
    assert shown == "--init /data/runs/digits-7d2c/model.pt --api-key '(not shown)'"


def test_the_closing_table_recommends_a_command_that_the_host_has(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINBOX_COMMAND", "make")
    out = here.succeeds(
        "train", "tests.support.tiny:Tiny", "--device", "cpu", "--max-steps", "2", "--run", "r"
    )
    assert "metrics    runs/r/metrics.jsonl; to view them: make tensorboard\n" in out
    assert "--logdir" not in out
