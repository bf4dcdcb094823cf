"""Hardware events of the entrypoint are recorded in the run that is trained at that time."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import TENSORS, EventAccumulator

from tests.support.here import Here
from tests.support.tiny import Tiny
from trainbox.processes.environment import Internal
from trainer.data.schedule import Schedule, micro_batches
from trainer.records import gpu_events as hardware
from trainer.records import run_log
from trainer.records.event_file import EventFile
from trainer.records.gpu_events import new_events, note_run, record_left_over, show_events
from trainer.records.jsonl import read_entries
from trainer.records.run_log import RunLog


def _event(time_unix_s: float, check: str = "xid", **other: Any) -> dict[str, Any]:
    event = {
        "time_unix_s": time_unix_s,
        "check": check,
        "result": "CRITICAL",
        "gpu": 1,
        "uuid": "GPU-1",
        "do": "reset_gpu",
    }
    return {**event, "read": "Xid 79: GPU has fallen off the bus", **other}


def _line(*arguments: Any, **other: Any) -> str:
    return (
        json.dumps({**_event(*arguments, **other), "text": "GPU 1 (GPU-1): for the terminal"})
        + "\n"
    )


@pytest.fixture
def events(here: Here, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of events, which the training reads after each step."""
    monkeypatch.setenv(Internal.HEALTH_EVENTS, str(here.folder / "events.jsonl"))
    monkeypatch.setattr(run_log, "_EVENTS_EVERY_S", 0.0)
    return here.folder / "events.jsonl"


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def _write_in_steps(here: Here, path: Path, texts: dict[int, str]) -> None:
    """Write each text in its step of the next training, counted from 1."""
    forwards, losses = 0, Tiny.losses

    def writing(task: Tiny, model: Any, batch: Any) -> Any:
        nonlocal forwards
        if model.training:
            forwards += 1
            _append(path, texts.get(forwards, ""))
        return losses(task, model, batch)

    here.plant(losses=writing)


def _recorded(here: Here, run_name: str = "r") -> list[tuple[int, int, float]]:
    """Return (step, epoch, time) of the events in metrics.jsonl."""
    return [
        (entry["step"], entry["epoch"], entry["time_unix_s"])
        for entry in here.entries("health", run_name)
    ]


def _board(here: Here) -> EventAccumulator:
    """Read the run as TensorBoard does."""
    board = EventAccumulator(str(here.path()), {TENSORS: 0})
    board.Reload()
    return board


def _shown(here: Here) -> list[tuple[int, float, str]]:
    """Return (step, time, text) of the events that TensorBoard shows."""
    board = _board(here)
    found = [
        e
        for tag in board.Tags()["tensors"]
        if tag.startswith("health/")
        for e in board.Tensors(tag)
    ]
    return sorted((e.step, e.wall_time, e.tensor_proto.string_val[0].decode()) for e in found)


def test_each_event_is_returned_once_and_a_half_written_one_when_complete(
    events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert new_events([]) == []  # without a file
    _append(events, _line(1.0) + _line(2.0)[:30])
    assert new_events([]) == [_event(1.0)]
    assert new_events([]) == []
    _append(events, _line(2.0)[30:] + _line(3.0, gpu=None))
    assert new_events([]) == [_event(2.0), _event(3.0, gpu=None)]
    events.unlink()
    assert new_events([]) == []
    monkeypatch.delenv(Internal.HEALTH_EVENTS)
    assert new_events([]) == []


def test_events_of_one_check_at_one_step_are_one_text(tmp_path: Path) -> None:
    """TensorBoard would show only the last of several texts."""
    with contextlib.closing(EventFile(tmp_path)) as file:
        show_events(file, [{"check": "slowdown", "gpu": gpu} for gpu in (0, 1)], 2)
    board = EventAccumulator(str(tmp_path), {TENSORS: 0})
    board.Reload()
    (shown,) = board.Tensors("health/slowdown")
    texts = shown.tensor_proto.string_val[0]
    assert texts == b"gpu 0, check slowdown\n\ngpu 1, check slowdown"


@pytest.mark.parametrize("damaged", ['{"check": "xid"}', _line(1.0, check=None), _line("soon")])
def test_a_damaged_line_is_skipped(events: Path, damaged: str) -> None:
    events.write_bytes(b"\xff\xfe\n" + damaged.rstrip("\n").encode() + b"\n" + _line(2.0).encode())
    assert new_events([]) == [_event(2.0)]


def test_events_of_a_training_are_in_its_metrics_and_in_tensorboard_and_not_printed(
    here: Here, events: Path
) -> None:
    half, rest = _line(9.5)[:30], _line(9.5)[30:]
    warning = {
        "check": "ecc",
        "result": "WARN",
        "gpu": None,
        "uuid": None,
        "read": "ECC is off",
        "do": None,
    }
    _write_in_steps(
        here,
        events,
        {2: _line(2.5, **warning), 8: half, 10: rest + "damaged\n" + _line(9.6, gpu=2)},
    )
    out = here.train(log_steps=1)
    assert here.entries("health") == [
        {"kind": "health", "step": 2, "epoch": 1, **_event(2.5, **warning)},
        {"kind": "health", "step": 10, "epoch": 2, **_event(9.5)},  # 6 steps an epoch
        {"kind": "health", "step": 10, "epoch": 2, **_event(9.6, gpu=2)},
    ]
    text = (
        "uuid GPU-1, check xid, result CRITICAL, read Xid 79: GPU has fallen off the bus, "
        "do reset_gpu"
    )
    assert _shown(here) == [
        (2, 2.5, "check ecc, result WARN, read ECC is off"),
        (10, 9.6, f"gpu 1, {text}\n\ngpu 2, {text}"),
    ]
    assert "Xid" not in out
    assert "Xid" not in (here.path() / "logs/rank-0.log").read_text()
    here.train("undisturbed")
    assert here.digest() == here.digest("undisturbed")


def test_events_are_read_every_few_seconds_and_at_the_end_or_a_stop(
    here: Here, events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "_EVENTS_EVERY_S", 1000.0)
    _write_in_steps(here, events, {3: _line(3.0)})
    here.stopped(10)
    assert _recorded(here) == [(10, 2, 3.0)]
    _append(events, _line(4.0))
    here.train()
    assert _recorded(here) == [(10, 2, 3.0), (11, 2, 4.0)]


def test_a_resume_keeps_each_event_exactly_once(here: Here, events: Path) -> None:
    """After a crash in step 8, the run resumes at step 5. The events in between are kept."""
    events.write_text(_line(1.0))
    _write_in_steps(here, events, {8: _line(8.0)})
    here.stopped(8, checkpoint_steps=1, keep=9, log_steps=1)
    for step in (6, 7, 8):
        for path in (here.path() / "checkpoints").glob(f"step-{step:08d}*"):
            path.unlink()
    hardware._reader.cache_clear()  # as in a new process, which reads the whole file
    _append(events, _line(9.0))
    out = here.train(log_steps=1)
    assert "resume     from step 5, epoch 1\n" in out
    assert _recorded(here) == [(1, 1, 1.0), (8, 2, 8.0), (6, 1, 9.0)]
    assert [entry["step"] for entry in here.entries("train")] == list(range(1, 19))
    assert [(step, time, text.count("Xid")) for step, time, text in _shown(here)] == [
        (1, 1.0, 1),
        (5, 8.0, 1),
        (6, 9.0, 1),
    ]
    assert [scalar.step for scalar in _board(here).Tensors("train/loss")] == list(range(1, 19))
    _append(events, _line(10.0))
    here.train(log_steps=1)  # the run is complete
    assert len(_recorded(here)) == 3


def test_only_the_first_process_writes_events(here: Here, events: Path) -> None:
    events.write_text(_line(1.0))
    second = RunLog(here.path(), 1)
    second.begin(0, 0, Schedule(0, 50, 8, 18, micro_batches(8, 1, 1, [0])))
    second.advance()
    second.close()
    assert not (here.path() / "metrics.jsonl").exists()


@pytest.mark.parametrize("torn", ["", '{"kind": "tra'])
def test_events_that_a_killed_training_did_not_record(
    tmp_path: Path, events: Path, torn: str
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    train = {"kind": "train", "step": 7, "epoch": 2}
    known = {"kind": "health", "step": 7, "epoch": 2, **_event(1.0)}
    metrics.write_text(f"{json.dumps(train)}\n{json.dumps(known)}\n{torn}")
    events.write_text(_line(1.0) + _line(2.0) + _line(3.0))
    note_run(metrics)
    record_left_over(events)
    left = [{"kind": "health", "step": 7, "epoch": 2, **_event(when)} for when in (2.0, 3.0)]
    assert read_entries(metrics) == [train, known, *left]
    metrics.unlink()
    record_left_over(events)
    assert not metrics.exists()
