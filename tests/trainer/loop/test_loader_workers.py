"""Loader workers that fail or die end the training with the cause: they leave signals to their
parent, it must not wait.
"""

import os
import re
import signal
import sys

import pytest

from tests.support.commands import Trainbox, finish
from tests.support.paths import SUPPORT
from tests.support.processes import Job
from trainer.cli import commands as cli

_JOBS = SUPPORT / "jobs.py"
_WORDS = ("--workers", "2", "--device", "cpu", "--log-steps", "1", "--run", "r")


def test_an_example_that_cannot_be_read_ends_the_training_with_the_users_error(
    trainbox: Trainbox,
) -> None:
    process = trainbox.start("train", f"{_JOBS}:Holey", *_WORDS)
    trainbox.wait_for_step(process, "r", 1)
    (trainbox.folder / "broken").touch()
    job = Job(process, 0)
    ended = finish(process, timeout_s=120)  # it once waited for its workers for good
    assert ended.code == 2
    assert re.search(
        r"^trainbox: task Holey: the dataset's __getitem__\(\) raised ValueError: "
        r"recording 600 is broken "
        r"\(.*jobs\.py:\d+\): fix the task; "
        r"traceback in runs/r/logs/rank-0\.log$",
        ended.err,
        re.MULTILINE,
    )
    assert "Traceback" not in ended.err
    assert (
        "Caught ValueError in DataLoader worker process"
        in (trainbox.folder / "runs/r/logs/rank-0.log").read_text()
    )
    job.wait_until_gone()


def test_a_killed_loader_worker_ends_the_training_with_the_cause(trainbox: Trainbox) -> None:
    process = trainbox.start("train", f"{_JOBS}:Shaky", *_WORDS)
    trainbox.wait_for_step(process, "r", 50)
    job = Job(process, 0)
    assert len(job.workers) >= 2
    os.kill(job.workers[0], signal.SIGKILL)
    ended = finish(process, timeout_s=120)
    assert ended.code not in (0, 75)
    words = (
        f" (pid {job.workers[0]}) is killed by signal: Killed",
        f" (pid(s) {job.workers[0]}) exited",
        " exited unexpectedly",
    )
    assert any(f"DataLoader worker{text}" in ended.err for text in words)
    assert ended.code == 1
    assert trainbox.entries("r", "train")[-1]["step"] < 400
    job.wait_until_gone()


@pytest.mark.parametrize(
    ("error", "code"), [(EOFError("a worker is gone"), 1), (KeyboardInterrupt(), 130)]
)
def test_the_end_of_a_workers_stream_is_not_taken_for_ctrl_c(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> None:
    def tasks(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli.tasks, "callback", tasks)
    monkeypatch.setattr(sys, "argv", ["trainer", "tasks"])
    assert cli._run() == code
    assert ("EOFError: a worker is gone" in capsys.readouterr().err) is (code == 1)
