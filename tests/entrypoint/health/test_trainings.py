"""The metrics of trainings that run, from a folder of runs."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from entrypoint.health.trainings import Trainings
from trainbox.files.sidecar import sidecar_text
from trainbox.folders.lease import LEASE, Lease


def _running(folder: Path, *entries: dict[str, Any], task: Any = "digits") -> Path:
    """Write a run that this process trains."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"task": task}))
    lines = "".join(f"{json.dumps(entry)}\n" for entry in entries)
    (folder / "metrics.jsonl").write_text(lines)
    Lease(folder)
    return folder


def _metrics(runs: Path) -> dict[tuple[str, str], dict[str, float]]:
    """Return the metrics as Prometheus reads them, by run and task."""
    trainings, registry = Trainings(runs), CollectorRegistry()
    trainings.read()
    registry.register(trainings)
    found = dict[tuple[str, str], dict[str, float]]()
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            key = (sample.labels["run"], sample.labels["task"])
            name = sample.name.removeprefix("trainbox_training_")
            found.setdefault(key, {})[name] = sample.value
    return found


def test_only_running_trainings_have_metrics_also_trials(tmp_path: Path) -> None:
    now_s = time.time()
    begun = {"kind": "train", "step": 50, "loss": 2.5, "samples_per_second": 640.0}
    validated = {"kind": "validation", "step": 60, "loss": 9.0}
    # The clock of another machine may be ahead; a later time is no progress.
    entries = [begun | {"time_unix_s": now_s + 20}, validated | {"time_unix_s": now_s + 40}]
    entries += [{"kind": "gpus", "time_unix_s": now_s + 58}]
    entries += [validated | {"time_unix_s": now_s + 1e6}]
    run = _running(tmp_path / "a", *entries)
    (run / "checkpoints/step-00000050.json").write_text(
        sidecar_text({"saved_at_unix_s": now_s - 500})
    )
    (_running(tmp_path / "ended", *entries) / LEASE).unlink()
    _running(tmp_path / "sweep/trial-00001", task=["?"])
    (tmp_path / "sweep/study.journal").touch()
    found = _metrics(tmp_path)
    assert found.keys() == {("a", "digits"), ("sweep/trial-00001", "['?']")}
    of_a = found["a", "digits"]
    assert (of_a["step"], of_a["loss"], of_a["samples_per_second"]) == (60, 2.5, 640)
    assert of_a["progress_age_seconds"] == pytest.approx(-40, abs=15)
    assert of_a["checkpoint_age_seconds"] == pytest.approx(500, abs=60)
    # Before the first entry, the age counts from the start.
    assert found["sweep/trial-00001", "['?']"].keys() == {"progress_age_seconds"}
    assert found["sweep/trial-00001", "['?']"]["progress_age_seconds"] == pytest.approx(0, abs=60)


def test_hostile_runs_do_not_stop_the_monitor(tmp_path: Path) -> None:
    _running(
        tmp_path / os.fsdecode(b'x"} 1\n\\\xff'), {"step": 10**400, "loss": "high"}, task='"}\n'
    )
    _running(tmp_path / "list", {"step": True, "loss": None, "time_unix_s": 10**400})
    (tmp_path / "list/config.json").write_text("[")
    os.mkfifo(_running(tmp_path / "fifo") / "metrics.jsonl.new")
    (tmp_path / "fifo/metrics.jsonl.new").replace(tmp_path / "fifo/metrics.jsonl")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    found = _metrics(tmp_path)
    assert {run for run, _ in found} == {'x"} 1\\n\\\\udcff', "list", "fifo"}
    assert [figures.keys() for figures in found.values()] == [{"progress_age_seconds"}] * 3


def test_a_folder_that_cannot_be_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _running(tmp_path / "a")
    (tmp_path / "b").mkdir()
    real = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        if path.parent.name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert [run for run, _ in _metrics(tmp_path)] == ["a"]
    assert _metrics(tmp_path / "missing") == {}
