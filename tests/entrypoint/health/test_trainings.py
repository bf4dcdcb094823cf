"""The metrics of trainings that run, from a folder of runs."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from entrypoint.health.trainings import Trainings
from entrypoint.runs import leased
from tests.support.leases import kill
from trainbox.files.sidecar import sidecar_text
from trainbox.folders.lease import LEASE, Holder, Lease


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
            if sample.name == "trainbox_trainings_unreadable":
                continue
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


def test_a_killed_training_has_the_time_since_its_last_renewal(tmp_path: Path) -> None:
    kill(_running(tmp_path / "a", {"step": 7, "loss": 1.0}), seconds_ago=1000)
    kill(_running(tmp_path / "sweep/trial-00000"))
    (tmp_path / "sweep/study.journal").touch()
    (_running(tmp_path / "ended") / LEASE).unlink()
    found = _metrics(tmp_path)
    assert found.keys() == {("a", "digits"), ("sweep/trial-00000", "digits")}
    assert found["a", "digits"] == {"killed_age_seconds": pytest.approx(1000, abs=60)}


def test_values_that_are_not_finite_reach_prometheus(tmp_path: Path) -> None:
    """A script may append such a line itself; Python writes Infinity and NaN."""
    _running(tmp_path / "a", {"step": 7, "loss": math.inf, "samples_per_second": math.nan})
    figures = _metrics(tmp_path)["a", "digits"]
    assert (figures["step"], figures["loss"]) == (7, math.inf)
    assert math.isnan(figures["samples_per_second"])


def test_a_folder_that_cannot_be_read_is_counted_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _running(tmp_path / "a")
    (tmp_path / "b").mkdir()

    def holder_of(folder: Path) -> Holder | None:
        if folder.name == "b":
            raise PermissionError(13, "Permission denied", str(folder))
        return real(folder)

    real = leased.holder_of
    monkeypatch.setattr(leased, "holder_of", holder_of)
    trainings = Trainings(tmp_path)
    for _ in range(2):
        trainings.read()
    assert [run for run, _ in _metrics(tmp_path)] == ["a"]
    (unreadable,) = [m for m in trainings.collect() if m.name == "trainbox_trainings_unreadable"]
    assert unreadable.samples[0].value == 1
    (line, _) = capsys.readouterr().err.splitlines()  # of `trainings`, and of `_metrics`
    assert line == (
        f"trainbox: {tmp_path}/b cannot be read (Permission denied), so its training has no "
        "metrics: let the user of the monitor read the folder"
    )
    assert _metrics(tmp_path / "missing") == {}
