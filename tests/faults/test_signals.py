"""Told to stop at the worst moment: while it saves, twice, and while it hangs."""

import os
import re
import signal
import subprocess

import pytest

from tests.support.commands import Trainbox, finish, wait_until
from tests.support.faults import (
    GATED,
    TASKS,
    Gate,
    checkpoints,
    clean_digest,
    messages,
    needs_linux,
)
from tests.support.processes import Job


def test_row_06_a_signal_during_a_save(
    trainbox: Trainbox, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It comes twice, as `docker compose run` delivers it; the checkpoint under way and that of the
    last step are whole.
    """
    words = (*GATED, "--set", "width=1000", "--max-steps", "20", "--keep", "99")
    process = trainbox.start("train", *words, "--checkpoint-steps", "1")
    folder = trainbox.folder / "runs/r/checkpoints"
    wait_until(lambda: any(folder.glob("*.pt.tmp")), process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.code == 75, ended.err
    assert "Traceback" not in ended.err
    steps = [int(path.stem.removeprefix("step-")) for path in sorted(folder.glob("*.json"))]
    assert checkpoints(trainbox.folder) == [
        f"step-{step:08d}{suffix}" for step in steps for suffix in (".json", ".pt")
    ]
    assert f"at step {steps[-1]} of 20, checkpoint saved" in ended.err
    resumed = trainbox.train(*words)
    assert f"resume     from step {steps[-1]}, " in resumed.out
    assert "damaged" not in resumed.out
    assert resumed.digest == clean_digest(tmp_path_factory.mktemp("clean"), words)


@needs_linux
def test_row_07_a_second_signal(trainbox: Trainbox, clean: str) -> None:
    """The first finds a step that does not end, so that nothing can be saved; the second ends it at
    once.
    """
    words = (*GATED, "--checkpoint-steps", "30")
    gate = Gate(trainbox.folder, 100)
    process = trainbox.start("train", *words)
    gate.wait_for(process)
    job = Job(process, 0)
    for _ in range(40):  # far fewer seconds than the launcher would wait by itself
        process.send_signal(signal.SIGINT)
        try:
            process.wait(0.5)  # what comes sooner is taken for an echo of the one before
        except subprocess.TimeoutExpired:
            continue
        break
    assert process.poll() is not None
    ended = finish(process)
    assert ended.code == 130
    assert [line.split(": ")[1] for line in messages(ended)] == ["SIGINT received", "second signal"]
    assert "killed; the newest checkpoint before it is whole" in messages(ended)[1]
    job.wait_until_gone()
    gate.release()
    resumed = trainbox.train(*words)
    assert re.search("^resume +from step [89]0, ", resumed.out, re.MULTILINE)
    assert resumed.digest == clean


@needs_linux
def test_row_08_a_signal_and_a_loader_worker_that_hangs(trainbox: Trainbox) -> None:
    """Both ranks wait for an example that never comes: killed when the budget is used up, the
    workers too.
    """
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
        "not stopped 2 s after the signal: killed; the newest checkpoint before it is whole"
        in messages(ended)[-1]
    )
    job.wait_until_gone()
    for number in writer:
        os.close(number)
