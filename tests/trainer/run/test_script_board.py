"""The TensorBoard files of a script's run: the same values as metrics.jsonl, also after kills."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.run.script_board import Follower
from trainer.run.tensorboard import EntryLog


def shown(run: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [(one.step, one.value) for one in events.Scalars("train/loss")]


def append(run: Path, text: str) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(text)


def test_a_killed_start_leaves_no_gap_and_no_repetition(tmp_path: Path) -> None:
    append(tmp_path, '{"step": 1, "loss": 1}\n{"step": 2, ')
    Follower(tmp_path / "metrics.jsonl").look()  # never closed, as after a kill
    append(tmp_path, '"loss": 2}\n{"step": 3, "loss": 3}\n')
    Follower(tmp_path / "metrics.jsonl").close()
    assert shown(tmp_path) == [(1, 1), (2, 2), (3, 3)]


def test_the_position_is_recorded_after_the_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    position, found = tmp_path / "tensorboard/.copied", list[bool]()
    monkeypatch.setattr(EntryLog, "flush", lambda _log: found.append(position.exists()))
    append(tmp_path, '{"step": 1, "loss": 1}\n')
    follower = Follower(tmp_path / "metrics.jsonl")
    follower.look()
    assert (found, position.read_text()) == ([False], "23")
    follower.close()


def test_a_replaced_file_is_copied_from_its_begin(tmp_path: Path) -> None:
    append(tmp_path, '{"step": 1, "loss": 1}\n{"step": 2, "loss": 2}\n')
    follower = Follower(tmp_path / "metrics.jsonl")
    follower.look()
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 3}\n')
    follower.close()
    assert shown(tmp_path) == [(1, 1), (2, 2), (3, 3)]


def test_entries_that_tensorboard_cannot_store_are_left_out(tmp_path: Path) -> None:
    odd = [
        f'{{"step": {2**70}, "loss": 1}}',
        f'{{"step": 1, "loss": {10**400}}}',
        '{"step": 1, "\\ud800": 1}',
        '{"step": 1, "kind": "health", "text": "\\ud800"}',
        "[" * 20_000,
        "not JSON",
    ]
    append(tmp_path, "".join(f"{line}\n" for line in [*odd, '{"step": 9, "loss": 0.5}']))
    Follower(tmp_path / "metrics.jsonl").close()
    assert shown(tmp_path) == [(9, 0.5)]
