"""A sweep whose trials crash and which is killed itself: each trial is recorded exactly once."""

import csv
import io
import signal
from collections import Counter

import pytest

from tests.support.commands import Trainbox, finish, wait_until
from tests.support.faults import needs_linux
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, needs_linux]
_TRIALS = 200
_DIES = 10  # each tenth trial is killed once


@pytest.mark.timeout(1200)
def test_200_trials_a_tenth_of_which_crash_and_three_kills_of_the_sweep(trainbox: Trainbox) -> None:
    task = f"{ROOT}/tests/trainer/sweep/tasks.py:Brittle"
    command = ("sweep", task, "--device", "cpu", "--processes", "2", "--name", "s")
    command += ("--seeds", str(_TRIALS // 2), "--grid", "width=4,8")
    command += ("--set", f"dies={_DIES}", "--retries", "5")
    env = {"PYTHONPATH": str(ROOT)}
    trained = trainbox.folder / "trained"
    for number, kill in ((40, signal.SIGKILL), (90, signal.SIGTERM), (150, signal.SIGKILL)):
        process = trainbox.start(*command, env=env)
        wait_until(
            lambda n=number: trained.exists() and len(trained.read_text().split()) >= n,  # type: ignore[misc]
            process,
        )
        process.send_signal(kill)
        assert finish(process).code == (75 if kill == signal.SIGTERM else -kill)
    ended = trainbox(*command, env=env)
    assert ended.code == 0, ended.out + ended.err
    results = trainbox("sweep", "show", "s", "--csv").out
    shown = list(csv.DictReader(io.StringIO(results)))
    assert Counter(line["state"] for line in shown) == {"done": _TRIALS}
    assert Counter((line["width"], line["seed"]) for line in shown) == {
        (width, str(seed)): 1 for width in ("4", "8") for seed in range(_TRIALS // 2)
    }
    assert (trainbox.folder / "runs/s/results.csv").read_text() == results
    attempts = len(trained.read_text().split())
    killed = _TRIALS // _DIES
    # Apart from these, only a kill of the sweep repeats trials, of its two slots.
    assert _TRIALS + killed <= attempts <= _TRIALS + killed + 3 * 2
    for number in range(_TRIALS):
        entries = trainbox.entries(f"s/trial-{number:05d}", "validation")
        assert [entry["step"] for entry in entries] == [6]
