"""Messages recommend commands that work where the user typed."""

from pathlib import Path

import pytest

from tests.support.here import Here
from trainer.system.hints import command, tensorboard

COMPOSE = "docker compose run --rm --no-deps train"
SCRIPT = "deploy/apptainer/trainbox.sh"


@pytest.mark.parametrize(
    ("typed", "doctor", "sweep", "curves"),
    [
        (None, "trainbox doctor", "trainbox sweep --name x", "tensorboard --logdir runs"),
        ("make", "make doctor", 'make sweep ARGS="--name x"', "make tensorboard"),
        (
            COMPOSE,
            f"{COMPOSE} doctor",
            f"{COMPOSE} sweep --name x",
            "docker compose up tensorboard",
        ),
        (
            SCRIPT,
            f"{SCRIPT} doctor",
            f"{SCRIPT} sweep --name x",
            f"{SCRIPT} tensorboard --logdir runs",
        ),
    ],
)
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
    form = (
        'make sweep ARGS="run --x"' if typed == "make" else f"{typed or 'trainbox'} sweep run --x"
    )
    assert command("sweep run", "--x") == form


def test_the_closing_table_recommends_a_command_that_the_host_has(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINBOX_COMMAND", "make")
    code, out, err = here.command(
        "train", "tests.support.tiny:Tiny", "--device", "cpu", "--max-steps", "2", "--run", "r"
    )
    assert code == 0, err
    assert "metrics    runs/r/metrics.jsonl; to view them: make tensorboard\n" in out
    assert "--logdir" not in out
