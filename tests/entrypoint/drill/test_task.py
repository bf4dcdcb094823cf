"""The arguments and the digest of a task's drill. tests/faults has its real trainings."""

import json
from pathlib import Path

import pytest

from entrypoint.drill.task import check_resumed, final_digest, kill_after, training_arguments
from entrypoint.drill.training import StartProgress
from trainbox.errors import ExitCode, Failure


def test_the_arguments_of_a_training() -> None:
    arguments = training_arguments("digits", 4, 60, Path("d"), ["--gpus", "{processes}"])
    expected = (
        "train digits --shards 4 --max-steps 60 --log-steps 1 --no-rehearsal --nnodes 1 "
        "--checkpoint-steps 5 --runs-dir d --run run --gpus {processes}"
    )
    assert arguments == expected.split()


def _trained(
    run: Path, weights: tuple[str, ...] = ("a", "b"), validations: tuple[int, ...] = (6, 12)
) -> Path:
    digests = [
        {"step": 12 * number, "model": text * 64, "optimizer": text * 64}
        for number, text in enumerate(weights)
    ]
    metrics = [
        {"kind": "validation", "step": step, "time_unix_s": 1.0, "loss": 2.0}
        for step in validations
    ]
    for name, entries in (("digests.jsonl", digests), ("metrics.jsonl", metrics)):
        (run / name).write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return run


def test_the_digest_of_a_training(tmp_path: Path) -> None:
    assert final_digest(_trained(tmp_path), 12) == f"{'b' * 16} {'b' * 8} 9ac66ffe"


@pytest.mark.parametrize(
    ("weights", "validations", "message"),
    [
        (("a",), (6, 12), "no digest of step 12 in "),
        (("a", "b"), (6,), "no validation of step 12 in "),
        (
            ("a", "a"),
            (6, 12),
            "the weights after 12 steps equal the initial ones: nothing was trained",
        ),
    ],
)
def test_a_training_without_progress_fails(
    tmp_path: Path, weights: tuple[str, ...], validations: tuple[int, ...], message: str
) -> None:
    with pytest.raises(Failure, match=message):
        final_digest(_trained(tmp_path, weights, validations), 12)
    with pytest.raises(Failure, match="no digest of step 12"):
        final_digest(tmp_path / "none", 12)


@pytest.mark.parametrize(
    ("kinds", "resumed"),
    [
        ("start checkpoint resume checkpoint", True),
        ("start checkpoint step", False),
        ("start checkpoint resume start checkpoint", False),
        ("", False),
    ],
)
def test_a_training_must_have_resumed(tmp_path: Path, kinds: str, resumed: bool) -> None:
    entries = "".join(f'{{"kind": "{kind}"}}\n' for kind in kinds.split())
    (tmp_path / "digests.jsonl").write_text(entries)
    if resumed:
        check_resumed(tmp_path)
        return
    with pytest.raises(Failure, match="resume not shown in ") as failed:
        check_resumed(tmp_path)
    assert failed.value.exit_code == ExitCode.DIFFERENT


def test_the_last_kill_comes_after_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    before, after = (StartProgress(1.0, 0.5, step) for step in (6, 7))
    due, last_due = kill_after(7), kill_after(7, tmp_path)
    assert (due(before), due(after), last_due(after)) == (False, True, False)
    (tmp_path / "checkpoints/step-00000005.json").touch()
    assert (last_due(before), last_due(after)) == (False, True)
