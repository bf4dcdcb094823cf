"""The same bits through kills and resumes (R2, R4) on one GPU."""

import json
import signal
import time

import pytest

from tests.gpu.check import Check
from tests.gpu.digests import by_step, last
from tests.support.commands import logged

# The last digest is from the end; --checkpoint-steps adds entries, which a resume repeats.
_TASK = ("digits_augmented", "--max-steps", "150", "--checkpoint-steps", "25")
_END = 150


@pytest.mark.gpu(
    step=2, seconds=28, settles="R1, R2, R4: SIGTERM, SIGKILL, verify; the manifest's record"
)
def test_a_stopped_a_killed_and_an_undisturbed_run_have_the_same_bits(check: Check) -> None:
    check.needs_training()
    # Three runs at the same time. Two of them are disturbed once they have a checkpoint.
    runs = check.folder / "runs"
    options = (*_TASK, "--log-steps", "5", "--workers", "2")
    undisturbed = check.start_trainbox(*check.training("whole", *options))
    for name, number, codes in (
        ("stopped", signal.SIGTERM, (75,)),
        ("killed", signal.SIGKILL, (-signal.SIGKILL,)),
    ):
        process = check.start_trainbox(*check.training(name, *options))
        while not logged(runs / name, "train") and process.poll() is None:
            time.sleep(0.05)
        while process.poll() is None and logged(runs / name, "train")[-1]["step"] < 40:
            time.sleep(0.01)
        process.send_signal(number)
        ended = check.finish(process, codes=(*codes, 0))
        steps = logged(runs / name, "train")[-1]["step"]
        check.saw(f"{name} at step {steps} of {_END}" if ended.code else f"{name} too late")
    check.finish(undisturbed)
    # `verify` trains the undisturbed run again, while the others resume.
    words = ("--device", check.device, "--no-health")
    repeated = check.start_trainbox("verify", str(runs / "whole"), *words)
    resumes = {
        name: check.start_trainbox(*check.training(name, *options))
        for name in ("stopped", "killed")
    }
    for name, process in resumes.items():
        resumed = check.finish(process)
        check.saw(next((x.strip() for x in resumed.out.splitlines() if "resume" in x), "complete"))
        assert last(runs / name) == last(runs / "whole")
        check.trainbox("verify", str(runs / "whole"), str(runs / name))
    check.saw(check.finish(repeated).out.strip().splitlines()[-1])
    assert max(by_step(runs / "whole")) == _END
    record = json.loads((runs / "whole" / "manifest.json").read_text())["device"]
    check.saw(f"manifest: {record}")
    assert record["type"] == check.device


@pytest.mark.gpu(step=4, seconds=30, long=True, settles="the drill on one GPU")
def test_the_drill_passes(check: Check) -> None:
    check.needs_training()
    words = [] if check.on_gpu else ["--gpus", "0", "--shards", "1"]
    steps = ["--steps", "40"] if check.on_gpu else ["--steps", "10"]
    ended = check.trainbox("drill", "digits", *steps, "--seed", "1", *words, env={"HEALTH": "0"})
    check.tables.append(("`trainbox drill`", ["```", *ended.out.splitlines(), "```"]))
    assert "the same bits in all" in ended.out
