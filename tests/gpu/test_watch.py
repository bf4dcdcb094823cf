"""The watch of the hardware beside a training on a busy GPU."""

import json
import signal
import time

import pytest

from tests.gpu.check import Check
from tests.support.commands import logged

_SECONDS = 12  # of full load: more than two samples of the watch


@pytest.mark.gpu(seconds=25, settles="faults.md: no event beside full load; energy and figures")
def test_the_watch_reports_nothing_about_a_healthy_busy_gpu(check: Check) -> None:
    check.needs("sklearn", "tensorboard", "safetensors", "tqdm", "click", "pynvml")
    run = check.folder / "runs" / "r"
    words = ("train", "digits", "--epochs", "100000", "--device", check.device, "--run", "r")
    training = check.start_trainbox(*words)
    seconds = _SECONDS if check.on_gpu else 1
    while not logged(run, "train") and training.poll() is None:
        time.sleep(0.05)
    load = check.program("load", seconds=seconds)
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
