"""The watch of the hardware beside a training on a busy GPU."""

import json
import signal
import time

import pytest

from tests.gpu.check import Check
from tests.support.commands import logged

_SECONDS = 6  # of full load: several samples of the watch


@pytest.mark.gpu(
    step=4, seconds=18, settles="faults.md: no event beside full load; energy and figures"
)
def test_the_watch_reports_nothing_about_a_healthy_busy_gpu(check: Check) -> None:
    check.needs_training()
    run = check.folder / "runs" / "r"
    words = ("train", "digits", "--device", check.device, "--run", "r")
    # Without validations, the watch is all that happens beside the steps.
    words = (*words, "--epochs", "100000", "--eval-every", "100000", "--log-steps", "100")
    training = check.start_trainbox(*words)
    seconds = _SECONDS if check.on_gpu else 1
    while not logged(run, "train") and training.poll() is None:
        time.sleep(0.05)
    watch = check.start_program("watch", folder=str(check.folder), seconds=seconds)
    load = check.program("load", seconds=seconds)
    watched = check.results(watch)
    training.send_signal(signal.SIGTERM)
    ended = check.finish(training, codes=(75,))
    check.saw(f"{load['products']} products in {seconds} s beside the training")
    events = logged(run, "health")
    for event in events:
        check.saw(f"{event.get('check')}: {event.get('result')} ({event.get('read')})")
    figures = logged(run, "train")[-1]
    shown = {
        n: v
        for n, v in figures.items()
        if any(part in n for part in ("gpu", "energy", "power", "utili", "memory", "data_"))
    }
    check.saw(f"figures of an entry: {json.dumps(shown)}")
    energy = [line.strip() for line in ended.out.splitlines() if "energy" in line or "kWh" in line]
    check.saw(f"energy: {'; '.join(energy) or 'not shown'}")
    assert not events
    check.needs_gpu()
    check.saw(f"a watch beside it: {watched}")
    assert watched["values"], "no sample of the watch arrived"
    assert all(watched["values"]), watched
