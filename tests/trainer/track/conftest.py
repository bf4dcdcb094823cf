"""Run folders to send to a tracker, which each reader of a run accepts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.run.compare import shown_settings
from trainer.track.send import Tracker, send_runs

MakeRun = Callable[..., Path]
_TASK = {
    "task": "digits",
    "seed": 3,
    "optimizer": "adamw",
    "max_steps": None,
    "fields": {"width": 8},
}
_PLAN = {"strategy": "single", "world_size": 1}


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Return a function that writes a run folder with these entries."""

    def make(
        name: str, entries: list[dict[str, Any]], config: Any = _TASK, **manifest: Any
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        of_kind = (
            {"kind": "script"}
            if config.get("kind") == "script"
            else {"settings": shown_settings(config), "classes": None, "sources": {}, "plan": _PLAN}
        )
        whole = {"run_id": name.replace("/", "-"), **of_kind, **manifest}
        (folder / "manifest.json").write_text(json.dumps(whole))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
        return folder

    return make


def sent(tracker: Tracker, *folders: Path) -> list[str]:
    """Return what one send of the runs shows."""
    lines: list[str] = []
    send_runs(folders, tracker, lines.append)
    return lines


def train_entry(step: int, **values: Any) -> dict[str, Any]:
    """Return an entry of metrics.jsonl."""
    return {"kind": "train", "step": step, "time_unix_s": 1000.0 + step, **values}
