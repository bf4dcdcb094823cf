"""A sweep whose trials crash and which is killed itself: each trial is recorded exactly once."""

import csv
import io
import signal
from collections import Counter

import pytest

from tests.support.commands import Trainbox, finish, wait_until
from tests.support.faults import needs_linux
from tests.support.paths import ROOT
from tests.support.ranks import Ranks
from trainbox.processes.environment import LaunchFacts

pytestmark = [pytest.mark.slow, needs_linux]
_TRIALS = 200
_DIES = 10  # each tenth trial is killed once


@pytest.mark.rare
def test_200_trials_a_tenth_of_which_crash_and_three_kills_of_the_sweep(
    trainbox: Trainbox, ranks: Ranks
) -> None:
    """The first start is the real command; the later ones and their workers are forks."""
    command = ("sweep", f"{ROOT}/tests/trainer/sweep/tasks.py:Brittle", "--name", "s")
    command += ("--seeds", str(_TRIALS // 2), "--grid", "width=4,8")
    command += ("--set", f"dies={_DIES}", "--retries", "5")
    trained = trainbox.folder / "trained"

    def started(number: int) -> bool:
        return trained.exists() and len(trained.read_text().split()) >= number

    process = trainbox.start(
        *command, "--device", "cpu", "--processes", "2", env={"PYTHONPATH": str(ROOT)}
    )
    wait_until(lambda: started(15), process)
    process.send_signal(signal.SIGKILL)
    assert finish(process).code == -signal.SIGKILL

    slots = LaunchFacts("cpu", slots=(("CPU slot 0", ""), ("CPU slot 1", ""))).variable()
    for number, kill, code in ((90, signal.SIGTERM, 75), (150, signal.SIGKILL, -signal.SIGKILL)):
        sweep = ranks.start(1, *command, env=slots)
        wait_until(lambda n=number: started(n), sweep)  # type: ignore[misc]
        sweep.send_signal(kill)
        assert sweep.wait().codes == [code]
    ended = ranks(1, *command, env=slots)
    assert ended.codes == [0], ended
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
