"""A loader worker that fails or dies ends the training with the cause."""

import errno
import os
import re
import signal
import sys

import pytest
import torch

from tests.support.faults import Gate
from tests.support.here import Here
from tests.support.paths import SUPPORT
from tests.support.processes import Processes, children_of
from tests.support.ranks import Ranks, StartedRanks
from tests.support.tiny import TINY, Tiny
from trainer.cli import commands as cli
from trainer.cli.commands import tasks as tasks_command

_JOBS = SUPPORT / "jobs.py"


def _held(ranks: Ranks, task: str) -> tuple[Gate, StartedRanks, Processes]:
    """Start a training with two loader workers and hold it in its fifth step."""
    gate = Gate(ranks.folder, 5)
    arguments = ("--workers", "2", "--device", "cpu", "--log-steps", "1", "--run", "r")
    training = ranks.start(1, "train", f"{_JOBS}:{task}", *arguments)
    gate.wait_for(training)
    workers = Processes(children_of(training.pids[0]))
    assert len(workers.started) >= 2
    return gate, training, workers


def test_an_unreadable_example_fails_the_training_with_the_users_error(
    ranks: Ranks,
) -> None:
    gate, training, workers = _held(ranks, "Holey")
    (ranks.folder / "broken").touch()
    gate.release()
    ended = training.wait()
    assert ended.codes == [2]
    assert re.search(
        r"^trainbox: task Holey: the dataset's __getitem__\(\) raised ValueError: "
        r"recording 600 is broken "
        r"\(.*jobs\.py:\d+\): fix the task; "
        r"traceback in runs/r/logs/rank-0\.log$",
        ended.errs[0],
        re.MULTILINE,
    )
    assert "Traceback" not in ended.errs[0]
    assert (
        "Caught ValueError in DataLoader worker process"
        in (ranks.folder / "runs/r/logs/rank-0.log").read_text()
    )
    workers.wait_until_gone()


def test_a_killed_loader_worker_fails_the_training_with_the_cause(ranks: Ranks) -> None:
    gate, training, workers = _held(ranks, "Shaky")
    killed = next(iter(workers.started))
    os.kill(killed, signal.SIGKILL)
    gate.release()
    ended = training.wait()
    assert re.search(
        r"^trainbox: a loader worker was killed by SIGKILL: the system may be", ended.errs[0], re.M
    )
    assert "Traceback" not in ended.errs[0]
    assert ended.codes == [1]
    workers.wait_until_gone()


@pytest.mark.parametrize(
    ("error", "code"), [(EOFError("a worker is gone"), 1), (KeyboardInterrupt(), 130)]
)
def test_the_end_of_a_workers_stream_is_not_mistaken_for_ctrl_c(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> None:
    def tasks(**_: object) -> None:
        raise error

    monkeypatch.setattr(tasks_command, "callback", tasks)
    monkeypatch.setattr(sys, "argv", ["trainer", "tasks"])
    assert cli._run(lambda: None) == code
    assert ("EOFError: a worker is gone" in capsys.readouterr().err) is (code == 1)


@pytest.mark.parametrize(
    ("number", "code", "text"),
    [
        (errno.EROFS, 4, "the loader workers cannot write /dev/shm (Read-only file system): mount"),
        (errno.ENOSPC, 4, "/dev/shm ("),
        (errno.EMFILE, 2, "this process needs more than "),
    ],
)
def test_workers_that_cannot_start_have_their_own_cure(
    here: Here, monkeypatch: pytest.MonkeyPatch, number: int, code: int, text: str
) -> None:
    """The locks of their queues are files in /dev/shm."""

    def start(_loader: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("torch.utils.data.DataLoader.__iter__", start)
    monkeypatch.setattr(Tiny, "train_dataset", lambda *_: [torch.ones(4)] * 8)
    err = here.refused("train", TINY, "--device", "cpu", "--workers", "1", code=code)
    assert err.startswith(f"trainbox: {text}")
