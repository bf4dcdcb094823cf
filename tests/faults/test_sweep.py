"""A sweep whose trials crash and which is killed itself: each trial is recorded exactly once."""

import csv
import io
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.support.commands import Trainbox, finish, wait_until
from tests.support.faults import needs_linux

pytestmark = [pytest.mark.slow, needs_linux]
_TRIALS = 200


@pytest.mark.timeout(1200)
def test_200_trials_a_tenth_of_which_crash_and_three_kills_of_the_sweep(trainbox: Trainbox) -> None:
    words = (
        "sweep",
        "tests.trainer.sweep.tasks:Brittle",
        "--device",
        "cpu",
        "--processes",
        "2",
        "--epochs",
        "1",
        "--name",
        "s",
    )
    words += (
        "--seeds",
        str(_TRIALS // 2),
        "--grid",
        "width=4,8",
        "--set",
        "dies=true",
        "--retries",
        "5",
    )
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    trained = trainbox.folder / "trained"
    for number, kill in ((40, signal.SIGKILL), (90, signal.SIGTERM), (150, signal.SIGKILL)):
        process = trainbox.start(*words, env=env)
        wait_until(
            lambda n=number: trained.exists() and len(trained.read_text().split()) >= n, process
        )  # type: ignore[misc]
        process.send_signal(kill)
        assert finish(process).code == (75 if kill == signal.SIGTERM else -kill)
    ended = trainbox(*words, env=env)
    assert ended.code == 0, ended.out + ended.err
    shown = list(csv.DictReader(io.StringIO(trainbox("sweep", "show", "s", "--csv").out)))
    assert Counter(line["state"] for line in shown) == {"done": _TRIALS}
    assert Counter((line["width"], line["seed"]) for line in shown) == {
        (width, str(seed)): 1 for width in ("4", "8") for seed in range(_TRIALS // 2)
    }
    assert (trainbox.folder / "runs/s/results.csv").read_text() == trainbox(
        "sweep", "show", "s", "--csv"
    ).out
    attempts = len(trained.read_text().split())
    killed = _TRIALS // 10  # each tenth trial, once
    # Nothing else was done twice, but for what a kill of the sweep interrupted on two slots.
    assert _TRIALS + killed <= attempts <= _TRIALS + killed + 3 * 2
    for number in range(_TRIALS):
        entries = trainbox.entries(f"s/trial-{number:05d}", "validation")
        assert [entry["step"] for entry in entries] == [6]
