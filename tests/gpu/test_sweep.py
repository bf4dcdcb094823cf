"""A sweep with several trials on one GPU at the same time."""

import pytest

from tests.gpu.check import Check
from tests.gpu.digests import last

_TASK = ("digits", "--epochs", "2", "--threads", "1")


@pytest.mark.gpu(step=5, seconds=16, settles="sweep.md, G12: a trial has the bits of `train`")
def test_each_trial_of_four_on_one_gpu_has_the_bits_of_train(check: Check) -> None:
    check.needs_training("optuna")
    trials = 4 if check.on_gpu else 2
    slots = ["--per-gpu", "4"] if check.on_gpu else ["--processes", "2"]
    train = check.start_trainbox(*check.training("alone", *_TASK, "--seed", "1"))
    swept = check.trainbox(
        "sweep", *_TASK, "--seeds", str(trials), "--name", "s", "--no-health", *slots
    )
    check.finish(train)
    runs = sorted((check.folder / "runs" / "s").glob("trial-*"))
    check.saw(swept.out.strip().splitlines()[-1])
    assert len(runs) == trials
    digests = [last(run) for run in runs]
    assert len(set(digests)) == trials
    assert last(check.folder / "runs" / "alone") in digests
