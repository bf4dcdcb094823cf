"""The TensorBoard files of a script's run: the same values as metrics.jsonl, also after kills."""

import os
from pathlib import Path

import pytest

from tests.support.here import board_of
from trainer.run.event_file import EventFile
from trainer.run.script_board import Follower


def shown(run: Path) -> list[tuple[int, float]]:
    events = board_of(run)
    return [(one.step, one.value) for one in events.Scalars("train/loss")]


def append(run: Path, text: str) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(text)


def test_a_killed_start_leaves_no_gap_and_no_repetition(tmp_path: Path) -> None:
    append(tmp_path, '{"step": 1, "loss": 1}\n{"step": 2, ')
    if (pid := os.fork()) == 0:
        Follower(tmp_path / "metrics.jsonl").look()
        os._exit(0)  # without closing the file, as after a kill
    assert os.waitpid(pid, 0)[1] == 0
    append(tmp_path, '"loss": 2}\n{"step": 3, "loss": 3}\n')
    Follower(tmp_path / "metrics.jsonl").close()
    assert sorted(shown(tmp_path)) == [(1, 1), (2, 2), (3, 3)]


def test_the_position_is_recorded_after_the_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    position, found = tmp_path / "tensorboard/.copied", list[bool]()
    monkeypatch.setattr(EventFile, "scalars", lambda *_: found.append(position.exists()))
    append(tmp_path, '{"step": 1, "loss": 1}\n')
    follower = Follower(tmp_path / "metrics.jsonl")
    follower.look()
    assert (found, position.read_text()) == ([False], "23")
    follower.close()


def test_an_event_of_the_hardware_is_a_text(tmp_path: Path) -> None:
    event = '"check": "xid", "gpu": 1, "uuid": null, "result": "WARN", "text": "GPU 1: Xid 13"'
    append(tmp_path, f'{{"kind": "health", "step": 2, "time_unix_s": 5, {event}}}\n')
    Follower(tmp_path / "metrics.jsonl").close()
    events = board_of(tmp_path)
    (shown,) = events.Tensors("health/xid")
    assert (shown.step, shown.wall_time) == (2, 5)
    assert shown.tensor_proto.string_val[0] == b"gpu 1, check xid, result WARN"


def test_events_of_one_check_at_one_step_are_one_text(tmp_path: Path) -> None:
    """TensorBoard would show only the last of several texts."""
    for gpu in (0, 1):
        event = f'"kind": "health", "step": 2, "check": "slowdown", "gpu": {gpu}'
        append(tmp_path, f"{{{event}}}\n")
    Follower(tmp_path / "metrics.jsonl").close()
    (shown,) = board_of(tmp_path).Tensors("health/slowdown")
    texts = shown.tensor_proto.string_val[0]
    assert texts == b"gpu 0, check slowdown\n\ngpu 1, check slowdown"


def test_entries_that_tensorboard_cannot_store_are_left_out(tmp_path: Path) -> None:
    odd = [
        f'{{"step": {2**70}, "loss": 1}}',
        f'{{"step": 1, "loss": {10**400}}}',
        '{"step": 1, "\\ud800": 1}',
        '{"step": 1, "kind": "health", "read": "\\ud800"}',
        '{"step": true, "loss": 1}',
        "[" * 20_000,
        "not JSON",
    ]
    append(tmp_path, "".join(f"{line}\n" for line in [*odd, '{"step": 9, "loss": 0.5}']))
    Follower(tmp_path / "metrics.jsonl").close()
    assert shown(tmp_path) == [(9, 0.5)]
