"""Two processes that are stopped or killed leave no process and resume to the same bits."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import Trainbox, finish
from tests.support.faults import Gate, SignalGate, messages
from tests.support.paths import SUPPORT
from tests.support.processes import Job
from tests.support.ranks import Forks, Ranks, StartedRanks, ranks_in
from trainer.programs.ranks.torchrun import _report

_JOBS = SUPPORT / "jobs.py"
# 40 steps an epoch, with augmentation in loader workers, dropout and batch norm.
_SHAKY = (
    f"{_JOBS}:Shaky",
    "--workers",
    "2",
    "--max-steps",
    "100",
    "--checkpoint-steps",
    "30",
    "--device",
    "cpu",
    "--log-steps",
    "1",
    "--run",
    "r",
)
_ON_TWO = ("train", *_SHAKY, "--processes", "2")


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    """Return the digest and the validation losses of the undisturbed run."""
    with ranks_in(forks, tmp_path_factory.mktemp("undisturbed")) as ranks:
        digest = ranks.train(2, *_SHAKY).digest
        return digest, [entry["loss"] for entry in ranks.entries("r", "validation")]


def _check_resumed(ranks: Ranks, steps: list[int], undisturbed: tuple[str, list[float]]) -> None:
    """Resume the run from one of `steps` and compare it with the undisturbed one."""
    resumed = ranks.train(2, *_SHAKY)
    assert any(f"resume     from step {step}, " in resumed.out for step in steps), resumed.out
    assert resumed.digest == undisturbed[0]
    losses = [entry["loss"] for entry in ranks.entries("r", "validation")]
    assert losses == undisturbed[1]
    assert [entry["step"] for entry in ranks.entries("r", "train")] == list(range(1, 101))


@pytest.mark.parametrize(
    ("number", "real"),
    [
        (signal.SIGTERM, False),
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, True, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_command_reaches_all_ranks_and_the_run_resumes_to_the_same_bits(
    trainbox: Trainbox,
    ranks: Ranks,
    undisturbed: tuple[str, list[float]],
    number: signal.Signals,
    real: bool,
) -> None:
    signal_gates = [SignalGate(trainbox.folder, 50, rank) for rank in (0, 1)]
    gates = [Gate(trainbox.folder, 51, rank) for rank in (0, 1)]
    process = trainbox.start(*_ON_TWO) if real else ranks.launch(*_ON_TWO)
    for gate in signal_gates:
        gate.wait_for(process)
    job = Job(process, 2)
    assert len(job.workers) >= 4
    # The command and torchrun pass this signal on. A rank without the signal stays in step 50.
    process.send_signal(number)
    for gate in gates:
        gate.wait_for(process)
    # SLURM signals each process, so the ranks get the signal again, and so do their workers.
    for pid in (*job.ranks.values(), *job.workers):
        os.kill(pid, number)
    for gate in gates:
        gate.release()
    stopped = process.wait() if isinstance(process, StartedRanks) else finish(process)
    assert stopped.code == 75, stopped
    assert "-> torchrun DDP over gloo, 2 processes\n" in stopped.out
    assert "Traceback" not in str(stopped)
    step = trainbox.entries("r", "train")[-1]["step"]
    # The ranks agree on a stop at their second vote after it. The longest intervals before that end
    # at steps 62 and 94, however fast the steps are.
    assert 51 <= step <= 94
    assert [line for line in messages(stopped) if "stopped by " in line] == [
        f"trainbox: stopped by {number.name} at step {step} of 100, checkpoint saved: "
        "resume with the same command"
    ]
    assert job.living() == []
    _check_resumed(ranks, [step], undisturbed)


def test_a_killed_rank_ends_the_job_by_name_and_a_killed_command_leaves_no_process(
    ranks: Ranks, undisturbed: tuple[str, list[float]]
) -> None:
    # Rank 0 waits for rank 1 in an exchange.
    gate = Gate(ranks.folder, 50, 1)
    process = ranks.launch(*_ON_TWO)
    gate.wait_for(process)
    job = Job(process, 2)
    os.kill(job.ranks["1"], signal.SIGKILL)
    ended = process.wait()
    assert ended.code == 137
    assert (
        "rank 1 was killed by SIGKILL: the same command resumes from the newest checkpoint, if "
        "there is one" in ended.errs[0]
    )
    assert "rank 0" not in ended.errs[0]
    job.wait_until_gone()
    gate.release()

    gate = Gate(ranks.folder, 70, 1)
    process = ranks.launch(*_ON_TWO)  # it resumes, and then the command itself is killed
    gate.wait_for(process)
    job = Job(process, 2)
    assert len(job.workers) >= 4
    process.send_signal(signal.SIGKILL)
    process.wait()
    job.wait_until_gone()
    gate.release()
    assert ranks.entries("r", "train")[-1]["step"] < 70
    # The checkpoint of step 60 may not have been complete.
    _check_resumed(ranks, [30, 40, 60], undisturbed)


def test_a_wrong_setting_has_the_same_message_on_each_process(ranks: Ranks) -> None:
    ended = ranks(3, "train", *_SHAKY, "--batch-size", "2000")
    message = (
        "trainbox: --batch-size 2000 is larger than the training set (650 examples): "
        "use at most 650\n"
    )
    assert (ended.codes, ended.errs) == ([2] * 3, [message] * 3)


def test_the_launcher_prints_a_message_of_several_processes_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(3):
        (tmp_path / f"{rank}").write_text("the same mistake")
    assert _report({tmp_path / f"{rank}": 2 for rank in range(3)}, stopped=False, again="") == 2
    assert capsys.readouterr().err == "trainbox: the same mistake\n"


def test_a_mistake_on_one_process_sets_the_message_and_the_exit_code(ranks: Ranks) -> None:
    words = (f"{_JOBS}:Alone", "--device", "cpu", "--processes", "2", "--run", "r")
    ended = ranks.launch("train", *words).wait()
    assert ended.code == 2
    (message,) = messages(ended)
    assert (
        "task Alone: loss 'error' has shape () instead of (32,), one value per example" in message
    )
    assert "Traceback" not in ended.errs[0]


@pytest.mark.parametrize(
    "text", ["Timed out waiting 600000ms for recv", "Application timeout caused pair closure"]
)
def test_a_rank_that_hung_is_named_for_each_text_of_a_timeout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "0").write_text(f"lost contact with another process: {text}")
    assert (
        _report({tmp_path / "0": 7, tmp_path / "1": -signal.SIGKILL}, stopped=False, again="AGAIN")
        == 7
    )
    assert capsys.readouterr().err.splitlines() == [
        "trainbox: rank 1 hung and was killed: AGAIN",
        f"trainbox: lost contact with another process: {text}",
    ]


def test_a_signal_at_the_end_of_the_launcher_does_not_change_its_exit_code(ranks: Ranks) -> None:
    program = """
import os, signal, sys, torch.distributed.run as real
from trainer.programs.ranks import torchrun
real.run = lambda arguments: None
sys.argv = ["torchrun", "--standalone", "nothing.py"]
code = torchrun.main()
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(code)
"""
    ended = ranks(1, program, module="tests.support.program")
    assert (ended.codes, ended.errs) == ([0], [""])


LOGGERS = """
import logging
from trainer.programs.ranks.torchrun import _silence_torchrun
_silence_torchrun()
from torch.distributed.elastic.agent.server import api
assert api.logger.name == "torch.distributed.elastic.agent.server.api"
loggers = map(logging.getLogger, [*logging.root.manager.loggerDict])
audible = [each.name for each in loggers if each.isEnabledFor(logging.ERROR)]
print([name for name in audible if name.startswith("torch.distributed")])
"""


@pytest.mark.slow
def test_torchrun_logs_no_errors_of_its_own() -> None:
    """For example, node 0 may end before the other nodes have left torchrun's last barrier."""
    # Not in a fork: a process that has had threads may crash at the imports of a child.
    command = [sys.executable, "-P", "-c", LOGGERS]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
