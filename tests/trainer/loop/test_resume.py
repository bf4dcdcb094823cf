"""Stopped or killed in the middle, the same command ends with the same bits as a run that was never
stopped.
"""

import signal
from pathlib import Path

import pytest

from tests.support.commands import Trainbox, finish

# 22 steps an epoch: stops fall in the middle of the second and third.
WORDS = ("--device", "cpu", "--epochs", "4", "--log-steps", "1", "--run", "r")


def _processes(count: int) -> tuple[str, ...]:
    return ("--processes", str(count), *WORDS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[str, list[float]]]:
    """Digest and validation losses of the run that is never stopped, by number of processes."""
    results = {}
    for count in (1, 2):
        runner = Trainbox(tmp_path_factory.mktemp(f"undisturbed-{count}"))
        digest = runner.train(*_processes(count)).digest
        results[count] = digest, [entry["loss"] for entry in runner.entries("r", "validation")]
    return results


@pytest.mark.parametrize(
    ("count", "number"),
    [(1, signal.SIGTERM), (1, signal.SIGINT), (2, signal.SIGHUP), (2, signal.SIGUSR1)],
)
def test_a_signal_saves_and_the_same_command_goes_on(
    trainbox: Trainbox,
    undisturbed: dict[int, tuple[str, list[float]]],
    count: int,
    number: signal.Signals,
) -> None:
    process = trainbox.start("train", *_processes(count))
    trainbox.wait_for_step(process, "r", 30)
    process.send_signal(number)
    stopped = finish(process)
    assert stopped.code == 75, stopped.err
    assert f"trainbox: stopped by {number.name} at step " in stopped.err
    assert "checkpoint saved: the same command goes on" in stopped.err
    assert "Traceback" not in stopped.err
    last_step = trainbox.entries("r", "train")[-1]["step"]
    assert (trainbox.folder / f"runs/r/checkpoints/step-{last_step:08d}.json").exists()

    resumed = trainbox.train(*_processes(count))
    assert f"from step {last_step}" in resumed.out
    digest, losses = undisturbed[count]
    assert resumed.digest == digest
    assert [entry["loss"] for entry in trainbox.entries("r", "validation")] == losses
    assert [entry["step"] for entry in trainbox.entries("r", "train")] == list(range(1, 89))


@pytest.mark.parametrize("count", [1, 2])
def test_a_kill_loses_only_the_steps_since_the_last_checkpoint(
    trainbox: Trainbox, undisturbed: dict[int, tuple[str, list[float]]], count: int
) -> None:
    words = (*_processes(count), "--checkpoint-steps", "10")
    process = trainbox.start("train", *words)
    trainbox.wait_for_step(process, "r", 37)
    process.send_signal(signal.SIGKILL)
    assert finish(process).code == -signal.SIGKILL
    resumed = trainbox.train(*words)
    assert "resume" in resumed.out
    assert resumed.digest == undisturbed[count][0]


def test_a_damaged_newest_checkpoint_is_set_aside_for_the_one_before(
    trainbox: Trainbox, undisturbed: dict[int, tuple[str, list[float]]]
) -> None:
    words = (*_processes(1), "--checkpoint-steps", "10")
    process = trainbox.start("train", *words)
    trainbox.wait_for_step(process, "r", 40)
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 75
    newest = sorted((trainbox.folder / "runs/r/checkpoints").glob("*.pt"))[-1]
    _flip_a_bit(newest)
    (newest.parent / "step-00000099.pt.tmp").write_bytes(b"left by a crash")

    resumed = trainbox.train(*words)
    assert f"{newest.name} is damaged (sha256" in resumed.out
    assert newest.with_name(newest.name + ".damaged").exists()
    assert not list(newest.parent.glob("*.tmp"))
    assert resumed.digest == undisturbed[1][0]


def test_with_all_checkpoints_damaged_it_does_not_start_over(trainbox: Trainbox) -> None:
    trainbox.train(*_processes(1))
    for path in (trainbox.folder / "runs/r/checkpoints").glob("*.pt"):
        _flip_a_bit(path)
    ended = trainbox("train", *_processes(1))
    assert ended.code == 4
    assert "no valid checkpoint" in ended.err


def test_the_newest_and_the_best_are_kept(trainbox: Trainbox) -> None:
    trainbox.train(
        *_processes(1), "--checkpoint-steps", "5", "--keep", "2", "--best-by", "max:loss"
    )
    steps = sorted(path.stem for path in (trainbox.folder / "runs/r/checkpoints").glob("*.pt"))
    # the loss is highest after the first epoch
    assert steps == ["step-00000022", "step-00000085", "step-00000088"]


def test_a_complete_run_is_left_as_it_is(trainbox: Trainbox) -> None:
    first = trainbox.train(*_processes(1))
    before = (trainbox.folder / "runs/r/metrics.jsonl").read_text()
    again = trainbox.train(*_processes(1))
    assert "this run is complete" in again.out
    assert again.digest == first.digest
    assert (trainbox.folder / "runs/r/metrics.jsonl").read_text() == before


def test_a_second_command_in_the_same_run_is_refused(trainbox: Trainbox) -> None:
    words = ("--device", "cpu", "--max-steps", "1000000", "--log-steps", "1", "--run", "r")
    process = trainbox.start("train", *words)
    trainbox.wait_for_step(process, "r", 1)
    second = trainbox("train", *words)
    assert second.code == 2
    assert "another process trains in runs/r:" in second.err
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 75


def test_other_settings_in_the_same_run_are_refused_with_the_difference(trainbox: Trainbox) -> None:
    trainbox.train(*_processes(1))
    other = trainbox("train", *_processes(1), "--lr", "0.5")
    assert other.code == 2
    assert "learning_rate: 0.003 -> 0.5" in other.err
    assert trainbox("train", *_processes(1), "--resume", "never").code == 2


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
