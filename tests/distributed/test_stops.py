"""Several processes stopped, killed in part or left behind: nothing lives on, and the same command
ends with the same bits.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import Trainbox, clean_environment, finish
from tests.support.paths import SUPPORT
from tests.support.processes import Job
from trainer.launch.torchrun import _told

_JOBS = SUPPORT / "jobs.py"
# 400 steps, 40 an epoch, whose model augments in loader workers, drops out and normalises by batch.
_SHAKY = (
    f"{_JOBS}:Shaky",
    "--workers",
    "2",
    "--processes",
    "2",
    "--device",
    "cpu",
    "--log-steps",
    "1",
    "--run",
    "r",
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    """Digest and validation losses of the run that nothing happens to."""
    runner = Trainbox(tmp_path_factory.mktemp("undisturbed"))
    digest = runner.train(*_SHAKY).digest
    return digest, [entry["loss"] for entry in runner.entries("r", "validation")]


def _check(trainbox: Trainbox, digest: str, undisturbed: tuple[str, list[float]]) -> None:
    assert digest == undisturbed[0]
    assert [entry["loss"] for entry in trainbox.entries("r", "validation")] == undisturbed[1]
    assert [entry["step"] for entry in trainbox.entries("r", "train")] == list(range(1, 401))


def test_stopped_in_the_middle_of_an_epoch_it_goes_on_to_the_same_bits(
    trainbox: Trainbox, undisturbed: tuple[str, list[float]]
) -> None:
    process = trainbox.start("train", *_SHAKY)
    trainbox.wait_for_step(process, "r", 50)
    job = Job(process, 2)
    assert len(job.workers) >= 4
    job.signal_all(signal.SIGTERM)  # as SLURM does
    process.send_signal(signal.SIGTERM)
    stopped = finish(process)
    assert stopped.code == 75, stopped.err
    assert "Traceback" not in stopped.err
    assert (
        len(re.findall("checkpoint saved: the same command goes on from there", stopped.err)) == 1
    )
    assert job.living() == []
    last_step = trainbox.entries("r", "train")[-1]["step"]
    assert last_step < 400
    resumed = trainbox.train(*_SHAKY)
    assert f"from step {last_step}, epoch {last_step // 40 + 1}" in resumed.out
    _check(trainbox, resumed.digest, undisturbed)


def test_a_killed_rank_ends_the_job_by_name_and_a_killed_entrypoint_leaves_nobody(
    trainbox: Trainbox, undisturbed: tuple[str, list[float]]
) -> None:
    words = (*_SHAKY, "--checkpoint-steps", "30")
    process = trainbox.start("train", *words)
    trainbox.wait_for_step(process, "r", 70)
    job = Job(process, 2)
    os.kill(job.ranks["1"], signal.SIGKILL)
    ended = finish(process)
    assert ended.code not in (0, 75)
    assert (
        "rank 1 was killed by SIGKILL: the same command goes on from the newest checkpoint"
        in ended.err
    )
    assert "rank 0" not in ended.err
    job.wait_until_gone()
    assert trainbox.entries("r", "train")[-1]["step"] < 400

    process = trainbox.start("train", *words)  # it goes on, and then its uppermost process vanishes
    trainbox.wait_for_step(process, "r", 170)
    job = Job(process, 2)
    assert len(job.workers) >= 4
    process.send_signal(signal.SIGKILL)
    process.wait()
    job.wait_until_gone()
    assert trainbox.entries("r", "train")[-1]["step"] < 400  # they did not just train to the end

    resumed = trainbox.train(*words)
    assert "resume     from step " in resumed.out
    _check(trainbox, resumed.digest, undisturbed)


def test_a_wrong_setting_is_one_message_whatever_the_number_of_processes(
    trainbox: Trainbox,
) -> None:
    ended = trainbox(
        "train",
        "digits",
        "--batch-size",
        "2000",
        "--device",
        "cpu",
        "--processes",
        "3",
        "--run",
        "r",
    )
    assert ended.code == 2
    assert ended.err == (
        "trainbox: --batch-size 2000 is more than the training set's 1437 examples: lower "
        "it to 1437\n"
    )


def test_what_one_rank_alone_finds_wrong_is_told_once_and_sets_the_code(trainbox: Trainbox) -> None:
    ended = trainbox("train", f"{_JOBS}:Alone", "--device", "cpu", "--processes", "2", "--run", "r")
    assert ended.code == 2
    messages = [line for line in ended.err.splitlines() if line.startswith("trainbox: ")]
    assert len(messages) == 1
    assert (
        "task Alone: loss 'error' has shape (), wanted (32,), one loss for each example"
        in messages[0]
    )
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    "text", ["Timed out waiting 600000ms for recv", "Application timeout caused pair closure"]
)
def test_a_rank_that_stood_still_is_named_in_whatever_words_the_other_waited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "0").write_text(f"lost contact with another process: {text}")
    assert _told({tmp_path / "0": 7, tmp_path / "1": -signal.SIGKILL}, stopped=False) == 7
    assert capsys.readouterr().err.splitlines() == [
        "trainbox: rank 1 stood still and was killed: the same command goes on from the "
        "newest checkpoint",
        f"trainbox: lost contact with another process: {text}",
    ]


def test_a_signal_that_comes_when_all_is_over_breaks_nothing() -> None:
    program = (
        "import atexit, os, signal, sys, torch.distributed.run as real; from trainer "
        "import torchrun\n"
        "real.run = lambda arguments: None\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGTERM)\n"
        "sys.argv = ['torchrun', '--standalone', 'nothing.py']; sys.exit(torchrun.main())"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, env=clean_environment()
    )
    assert (ended.returncode, ended.stderr) == (0, "")
