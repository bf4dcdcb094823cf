"""Checkpoints that are saved while the training continues."""

import os
import shutil
import signal
import time

import pytest

from tests.gpu.check import Check
from tests.support.commands import logged


@pytest.mark.gpu(
    step=1, seconds=10, settles="a save during training is exact; its pause (benchmarks.md)"
)
def test_each_checkpoint_has_the_weights_of_its_step(check: Check) -> None:
    check.needs_training()
    found = check.program("saves", folder=str(check.folder), layers=25 if check.on_gpu else 1)
    steps = {name: same for name, same in found.items() if name.startswith("step ")}
    check.saw(f"{found['mib']} MiB: pauses of {found['pauses_ms']} ms, after waits of "
              f"{found['waits_ms']} ms for the save before")  # fmt: skip
    assert list(steps) == ["step 10", "step 20", "step 30", "step 40"]
    assert all(steps.values()), steps


@pytest.mark.gpu(
    step=1, seconds=22, settles="a save of 2 GB under SIGTERM, within a notice of 30 s"
)
def test_a_stop_saves_two_gigabytes(check: Check) -> None:
    check.needs_training()
    run = check.folder / "runs" / "r"
    layers = 170 if check.on_gpu else 1
    words = ("tests.gpu.tasks:Heavy", "--set", f"layers={layers}", "--log-steps", "1")
    words = (*words, "--epochs", "1000", "--eval-every", "1000", "--digest-steps", "100000")
    process = check.start_trainbox(*check.training("r", *words))
    while not logged(run, "train") and process.poll() is None:
        time.sleep(0.05)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    check.finish(process, codes=(75,))
    seconds = time.monotonic() - begin
    files = sorted((run / "checkpoints").glob("step-*.pt"))
    mib = files[-1].stat().st_size / 2**20
    check.saw(f"{mib:,.0f} MiB: exit {seconds:.1f} s after SIGTERM")
    # This compares the file with the digest of its step.
    shutil.copytree(run, check.folder / "same", copy_function=os.link)
    check.trainbox("verify", str(run), str(check.folder / "same"))
