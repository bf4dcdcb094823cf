"""Signals during a save, signals that come twice, and signals while a worker hangs."""

import os
import re
import signal
import time
from collections.abc import Callable

import pytest

from tests.support.commands import Trainbox, finish, wait_until
from tests.support.faults import GATED, TASKS, Gate, checkpoints, messages, needs_linux
from tests.support.processes import Job
from tests.support.ranks import Ranks


@pytest.mark.parametrize("processes", [1, 2])
def test_row_05_a_signal_before_the_first_step(ranks: Ranks, processes: int) -> None:
    """The data would be read forever."""
    gate = Gate(ranks.folder, 0)
    process = ranks.launch("train", *GATED, "--processes", str(processes))
    gate.wait_for(process)
    process.send_signal(signal.SIGTERM)
    ended = process.wait()
    assert ended.code == 143
    assert "Traceback" not in ended.errs[0]
    stopped = "stopped by SIGTERM, and nothing is lost: start the same command again"
    assert any(text.endswith(stopped) for text in messages(ended))
    assert checkpoints(ranks.folder) == []


def test_row_06_a_signal_during_a_save(ranks: Ranks, digest_of: Callable[..., str]) -> None:
    """Send SIGTERM twice, as `docker compose run` does, while a checkpoint is written.

    This checkpoint and the one of the last step are complete.
    """
    words = (f"{TASKS}:HeldInSaves", *GATED[1:], "--max-steps", "20", "--keep", "99")
    gate = Gate(ranks.folder, "save")
    env = {"HELD_FSYNC": "14"}
    process = ranks.launch("train", *words, "--checkpoint-steps", "1", env=env)
    gate.wait_for(process)
    folder = ranks.folder / "runs/r/checkpoints"
    assert any(folder.glob("*.tmp")) and any(folder.glob("*.pt"))
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    # The command prints this when it has passed the signal on. The training could end before.
    wait_until(lambda: "SIGTERM received" in process.printed("err")[0], process)
    gate.release()
    ended = process.wait()
    assert ended.code == 75, ended
    assert "Traceback" not in ended.errs[0]
    steps = [int(path.stem.removeprefix("step-")) for path in sorted(folder.glob("*.json"))]
    assert checkpoints(ranks.folder) == [
        f"step-{step:08d}{suffix}" for step in steps for suffix in (".json", ".pt")
    ]
    assert f"at step {steps[-1]} of 20, checkpoint saved" in ended.errs[0]
    resumed = ranks.train(1, *words)
    assert f"resume     from step {steps[-1]}, " in resumed.out
    assert "damaged" not in resumed.out
    assert resumed.digest == digest_of(1, *words)


@needs_linux
def test_row_07_a_second_signal(ranks: Ranks, clean: str) -> None:
    """The first signal finds a step that does not end; the second one kills the training."""
    words = (*GATED, "--checkpoint-steps", "30")
    gate = Gate(ranks.folder, 100)
    process = ranks.launch("train", *words)
    gate.wait_for(process)
    job = Job(process, 0)
    for _ in range(40):  # the launcher alone would wait longer than these 20 s
        process.send_signal(signal.SIGINT)
        # An earlier signal counts as an echo of the first one.
        next_s = time.monotonic() + 0.5
        while process.poll() is None and time.monotonic() < next_s:
            time.sleep(0.02)
        if process.poll() is not None:
            break
    assert process.poll() is not None
    ended = process.wait()
    assert ended.code == 130
    assert [line.split(": ")[1] for line in messages(ended)] == ["SIGINT received", "second signal"]
    assert "killed; the same command resumes from the newest checkpoint" in messages(ended)[1]
    job.wait_until_gone()
    gate.release()
    resumed = ranks.train(1, *words)
    assert re.search("^resume +from step [89]0, ", resumed.out, re.MULTILINE)
    assert resumed.digest == clean


@pytest.mark.waits
@needs_linux
def test_row_08_a_signal_and_a_loader_worker_that_hangs(trainbox: Trainbox) -> None:
    """Ranks that wait forever for an example are killed after the budget, with their workers."""
    os.mkfifo(trainbox.folder / "gate-example")
    words = (
        f"{TASKS}:Loaded",
        "--workers",
        "1",
        "--device",
        "cpu",
        "--run",
        "r",
        "--checkpoint-steps",
        "1",
    )
    process = trainbox.start("2", "600", "train", *words, module="tests.support.supervised")
    writer: list[int] = []

    def reached() -> bool:
        try:
            writer.append(os.open(trainbox.folder / "gate-example", os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            return False
        return True

    wait_until(reached, process)
    job = Job(process, 2)
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.code == 137
    assert (
        "not stopped 2 s after the signal: killed; the same command resumes from the newest "
        "checkpoint" in messages(ended)[-1]
    )
    job.wait_until_gone()
    for number in writer:
        os.close(number)
