"""Read the runs that a process trains now, or was killed in, without torch."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from entrypoint.runs.read import listed, number_of, task_in
from trainbox.files.entries import EntryReader, is_of_script
from trainbox.files.regular_files import object_if_valid
from trainbox.files.sidecar import checkpoint_path, sidecar_if_valid, steps_in
from trainbox.folders.lease import LEASE, holder_of
from trainbox.folders.record_folder import CHECKPOINTS, CONFIG, METRICS, is_sweep

_LAST_BYTES = 2**18  # of metrics.jsonl, in which the figures of a running run are
_CLOCKS_S = 60.0  # between two machines; a later time is no progress
_FIGURES = ("step", "loss", "samples_per_second")  # in the newest entries of a running run


@dataclass(frozen=True)
class RunningRun:
    """What the files of a run say that a process trains now.

    Attributes:
        name: The path of its folder below the folder of all runs.
        task: Of a training, its task; of a script, its file.
        figures: The newest step, loss and samples per second, if it has them.
        progress_unix_s: The time of the newest entry, or of the start if that is later.
        saved_unix_s: The time of the newest checkpoint, or None.
    """

    name: str
    task: str
    figures: Mapping[str, float]
    progress_unix_s: float
    saved_unix_s: float | None


@dataclass
class LeasedRuns:
    """The runs and trials that a process trains, or that have lost theirs.

    Attributes:
        running: The runs whose process may be alive.
        killed: By name and task, the time of the last renewal by the process, which has ended
            without releasing the lease.
        unreadable: The reasons by the names of the folders that cannot be read.
    """

    running: list[RunningRun] = field(default_factory=list)
    killed: dict[tuple[str, str], float] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)


def leased_runs(runs_dir: Path) -> LeasedRuns:
    """Return the runs and the trials in `runs_dir` that have a lease; no others are read."""
    found, waiting = LeasedRuns(), [runs_dir]
    while waiting:
        folder = waiting.pop()
        name = str(folder.relative_to(runs_dir))
        try:
            if folder == runs_dir or is_sweep(folder):
                waiting += listed(folder)
            if folder == runs_dir or (holder := holder_of(folder)) is None:
                continue
            if holder.alive:
                found.running.append(_running(folder, runs_dir))
            else:
                found.killed[name, _task_of(folder)] = holder.renewed_unix_s
        except FileNotFoundError:  # it is removed meanwhile
            continue
        except OSError as error:
            found.unreadable[name] = error.strerror or str(error)
    return found


def _running(folder: Path, runs_dir: Path) -> RunningRun:
    figures, times, now_s = dict[str, float](), [0.0], time.time()
    lease = object_if_valid(folder / LEASE) or {}
    entries = EntryReader(folder / METRICS, last_bytes=_LAST_BYTES).read()
    for entry in (lease, *filter(is_of_script, entries)):  # GPU events are no progress
        names = ("step",) if entry.get("kind") == "validation" else _FIGURES
        found = {name: number_of(entry.get(name)) for name in (*names, "time_unix_s")}
        time_s = found.pop("time_unix_s") or 0.0
        times.append(time_s if time_s <= now_s + _CLOCKS_S else 0.0)
        figures |= {name: value for name, value in found.items() if value is not None}
    saved = steps_in(folder / CHECKPOINTS)[-1:]
    sidecar = sidecar_if_valid(checkpoint_path(folder / CHECKPOINTS, saved[0])) if saved else None
    return RunningRun(
        str(folder.relative_to(runs_dir)),
        _task_of(folder),
        figures,
        max(times),
        number_of((sidecar or {}).get("saved_at_unix_s")),
    )


def _task_of(folder: Path) -> str:
    return task_in(object_if_valid(folder / CONFIG) or {})
