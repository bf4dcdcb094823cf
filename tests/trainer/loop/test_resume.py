"""A stopped or killed training resumes to the bits of a run that was never stopped."""

import signal
from pathlib import Path

import pytest

from tests.support.commands import Trainbox
from tests.support.faults import GATED, Gate, SignalGate
from tests.support.ranks import Forks, Ranks, StartedRanks, ranks_in

# An epoch has 40 steps, so the third epoch is incomplete.
ARGUMENTS = (*GATED, "--max-steps", "100")


@pytest.fixture(scope="module")
def undisturbed(
    forks: Forks, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[str, list[float]]]:
    """Return the digest and the validation losses of a run without a stop, by process count."""
    results = {}
    for count in (1, 2):
        with ranks_in(forks, tmp_path_factory.mktemp(f"undisturbed-{count}")) as ranks:
            digest = ranks.train(count, *ARGUMENTS).digest
            results[count] = digest, _validation_losses(ranks.folder)
    return results


def _validation_losses(folder: Path) -> list[float]:
    return [entry["loss"] for entry in Trainbox(folder).entries("r", "validation")]


def _steps(folder: Path) -> list[int]:
    return [entry["step"] for entry in Trainbox(folder).entries("r", "train")]


def _held(ranks: Ranks, gates: list[Gate], *arguments: str) -> StartedRanks:
    """Start a training and wait until each rank is at its gate."""
    training = ranks.start(len(gates), "train", *ARGUMENTS, *arguments)
    for gate in gates:
        gate.wait_for(training)
    return training


@pytest.mark.parametrize(("count", "number"), [(1, signal.SIGUSR1), (2, signal.SIGXCPU)])
def test_a_signal_saves_and_the_same_command_resumes_to_the_same_bits(
    ranks: Ranks,
    undisturbed: dict[int, tuple[str, list[float]]],
    count: int,
    number: signal.Signals,
) -> None:
    gates: list[Gate] = [SignalGate(ranks.folder, 50, rank) for rank in range(count)]
    training = _held(ranks, gates)
    training.send_signal(number)
    stopped = training.wait()
    assert stopped.codes == [75] * count, stopped
    last_step = _steps(ranks.folder)[-1]
    # Two ranks agree on a stop at their second vote after it.
    assert last_step == 50 if count == 1 else 51 <= last_step <= 94
    for err in stopped.errs:
        assert f"trainbox: stopped by {number.name} " in err
        assert ("CPU time limit" in err) == (number == signal.SIGXCPU)
        assert f"at step {last_step} of 100, checkpoint saved: resume with the same command" in err
        assert "Traceback" not in err
    assert _steps(ranks.folder) == list(range(1, last_step + 1))
    assert (ranks.folder / f"runs/r/checkpoints/step-{last_step:08d}.json").exists()

    resumed = ranks.train(count, *ARGUMENTS)
    assert f"from step {last_step}" in resumed.out
    assert (resumed.digest, _validation_losses(ranks.folder)) == undisturbed[count]
    assert _steps(ranks.folder) == list(range(1, 101))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR2])
def test_a_signal_to_the_command_saves_and_the_same_command_resumes(
    ranks: Ranks, undisturbed: dict[int, tuple[str, list[float]]], number: signal.Signals
) -> None:
    """The command forwards the signal to its processes."""
    gate = SignalGate(ranks.folder, 50)
    process = ranks.launch("train", *ARGUMENTS)
    gate.wait_for(process)
    process.send_signal(number)
    stopped = process.wait()
    assert stopped.code == 75, stopped
    text = f"trainbox: stopped by {number.name} at step 50 of 100, checkpoint saved"
    assert text in stopped.errs[0]
    assert "Traceback" not in stopped.errs[0]
    assert ranks.train(1, *ARGUMENTS).digest == undisturbed[1][0]


def test_a_kill_loses_only_the_steps_since_the_last_checkpoint(
    ranks: Ranks, undisturbed: dict[int, tuple[str, list[float]]]
) -> None:
    gates = [Gate(ranks.folder, 57, rank) for rank in range(2)]
    training = _held(ranks, gates, "--checkpoint-steps", "10")
    training.send_signal(signal.SIGKILL)
    assert training.wait().codes == [-signal.SIGKILL] * 2
    for gate in gates:
        gate.release()
    resumed = ranks.train(2, *ARGUMENTS, "--checkpoint-steps", "10")
    # The checkpoint of step 50 may not have been complete.
    assert any(f"resume     from step {step}, " in resumed.out for step in (40, 50)), resumed.out
    assert resumed.digest == undisturbed[2][0]


def test_a_second_command_in_the_same_run_is_refused(ranks: Ranks) -> None:
    gate = Gate(ranks.folder, 1)
    training = _held(ranks, [gate])
    second = ranks(1, "train", *ARGUMENTS)
    assert second.codes == [2]
    assert "another process uses runs/r (pid " in second.errs[0]
    gate.release()
    assert training.wait().codes == [0]
