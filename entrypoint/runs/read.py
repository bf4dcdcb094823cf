"""Read what a folder of runs has, without torch: a run, a sweep or the run of a script each."""

import contextlib
import csv
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from entrypoint.runs.resumable import ListedCheckpoints
from trainbox.disclosure.recorded_values import edited_settings, listed_changes
from trainbox.disclosure.secret_rule import arguments_without_secrets
from trainbox.errors import ExitCode, WrongUse, signal_of
from trainbox.files.entries import newest_entry
from trainbox.files.regular_files import object_if_valid, read_text
from trainbox.files.sidecar import FIRST_CHECKPOINT, checkpoint_path
from trainbox.folders.lease import is_leased
from trainbox.folders.record_folder import (
    CONFIG,
    LOGS,
    MANIFEST,
    METRICS,
    is_sweep,
)
from trainbox.options.config import FREE_AT_RESUME, split_metric
from trainbox.processes.process_tree import STOP_SIGNALS

_OPTION = re.compile(r"--?[A-Za-z]")
OF_SWEEP = "sweep of "  # before its tasks
RESULTS = "results.csv"  # of a sweep
NO_METRICS = ("step", "time_unix_s", "epoch")  # numbers of an entry that say where it is
# The states of trials by the states of their runs, before a sweep has its results.
_IN_RESULTS = {
    "complete": "done",
    "failed": "failed",
    "running": "running",
    **dict.fromkeys(("stopped", "killed", "damaged", "not trained"), ""),
}
# Settings that each run has, and that say nothing about its result.
_NOT_SHOWN = FREE_AT_RESUME | {"task", "fields", "best_by", "threads", "memory_format"}


@dataclass(frozen=True)
class StoredRun:
    """What the files of one run say.

    Attributes:
        name: The path of its folder below the folder of all runs.
        task: Of a training, its task; of a script, its file; "sweep" for a sweep.
        settings: The settings and the task's fields.
        metric: The name of the metric that selects the best checkpoint, and its best value. Of a
            script, the first metric of its newest validation; of the sweep of a task, the metric of
            its best trial.
        rank: A number that is lower for a better value.
        step: The newest step in its records.
        steps: The number of steps of the whole training, or None if it is unknown.
        state: One of running, complete, stopped, failed, killed, damaged, not trained, unreadable.
        why: The message of a failure, or what is damaged.
        is_script: Whether a script of the user has written it.
        changed_unix_s: When it was written last.
        bytes: The size of all files.
    """

    name: str
    task: str
    state: str
    changed_unix_s: float
    bytes: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    metric: tuple[str, float] | None = None
    rank: float = math.inf
    step: int = 0
    steps: int | None = None
    why: str = ""
    is_script: bool = False


def number_of(value: object) -> float | None:
    """Return a number of a record, or None for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
    return None


def task_in(config: Mapping[str, Any]) -> str:
    """Return the task in the content of config.json, or the file of a script."""
    return str(config.get("task") or config.get("script") or "?")


def is_named(task: str, name: str) -> bool:
    """Return whether `name` is the task, its class, its file or the file without its ending.

    Of a sweep, one of its tasks must be so. For example, my_tasks/rings.py:Rings is also Rings,
    my_tasks/rings.py, rings.py and rings.
    """
    for each in task.removeprefix(OF_SWEEP).split(", "):
        source, _, class_name = each.rpartition(":")
        file = PurePath(source or each)
        if name in (each, class_name, str(file), file.name, file.stem):
            return True
    return False


def stored_runs(runs_dir: Path, trials: bool) -> Iterator[StoredRun]:
    """Yield the runs in `runs_dir`, in the order of their names; other folders are left out.

    A sweep is one run, or with `trials` a run for each of its trials.
    """
    for folder in sorted(_folders(runs_dir)):
        try:
            of_sweep = is_sweep(folder)
            if of_sweep and not trials:
                found = [_sweep(folder, runs_dir)]
            else:
                inside = sorted(_folders(folder)) if of_sweep else [folder]
                found = [run for each in inside if (run := stored_run(each, runs_dir)) is not None]
        except OSError as error:
            name = str(folder.relative_to(runs_dir))
            found = [StoredRun(name, "?", "unreadable", 0.0, 0, why=error.strerror or "")]
        yield from found


def _folders(folder: Path) -> list[Path]:
    try:
        return listed(folder)
    except OSError:
        return []


def with_fault(folder: Path) -> str:
    """Return the path of the folder of all runs, with the reason if it cannot be listed."""
    try:
        listed(folder)
    except FileNotFoundError:
        return f"{folder}, which does not exist"
    except OSError as error:
        return f"{folder}, which cannot be read ({error.strerror})"
    return f"{folder}"


def listed(folder: Path) -> list[Path]:
    """Return the folders in `folder`."""
    with os.scandir(folder) as found:
        return [Path(entry.path) for entry in found if entry.is_dir()]


def stored_run(folder: Path, runs_dir: Path | None = None) -> StoredRun | None:
    """Return the run in `folder`, below the folder of all runs, or None if it is no run.

    A start that was killed early has left only its folders.
    """
    config = object_if_valid(folder / CONFIG)
    manifest = object_if_valid(folder / MANIFEST)
    if config is None and not (folder / LOGS).is_dir():
        return None
    checkpoints = ListedCheckpoints(folder, (manifest or {}).get("run_id"))
    newest = newest_entry(folder / METRICS)
    recorded = newest.get("step", 0)
    step = max(recorded, checkpoints.newest)
    size, changed_unix_s = _size(folder)
    state, why = _state(folder, manifest or {}, step)
    is_script = "script" in (config or {}) or "starts" in (manifest or {})
    is_complete = state == "complete"
    if state != "running" and (
        damage := _damage(folder, config, manifest, checkpoints, is_complete)
    ):
        state, why = "damaged", damage
    elif state == "complete" and not is_script and (recorded < step or not newest):
        state, why = "damaged", f"{METRICS} ends at step {recorded}"
    config, manifest = config or {}, manifest or {}
    best = _newest(folder, newest) if is_script else _best(config, checkpoints)
    planned = manifest.get("steps")
    return StoredRun(
        name=str(folder.relative_to(runs_dir or folder.parent)),
        task=task_in(config),
        state=state,
        changed_unix_s=changed_unix_s,
        bytes=size,
        settings=_settings(config),
        metric=best and best[0],
        rank=best[1] if best else math.inf,
        step=step,
        steps=planned if isinstance(planned, int) else None,
        why=why,
        is_script=is_script,
    )


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    if "script" in config:
        return named_arguments(config.get("arguments"))
    found = {name: value for name, value in config.items() if name not in _NOT_SHOWN}
    fields = config.get("fields")
    return found | (fields if isinstance(fields, dict) else {})


def named_arguments(arguments: Any) -> dict[str, str]:
    """Return the arguments of a script by the names of its options, without secrets.

    For example, `train.py data --lr 0.1 --opt a=1 --opt b=2 --fast` has the first argument, lr, opt
    with both values, and fast.
    """
    given = arguments if isinstance(arguments, list) else []
    words = arguments_without_secrets(map(str, given))
    found: dict[str, list[str]] = {}
    option = ""
    for word in words:
        if _OPTION.match(word):
            name, equals, value = word.lstrip("-").partition("=")
            option = "" if equals else name
            found.setdefault(name, []).extend([value] if equals else [])
        elif option:
            found[option].append(word)
            option = ""
        else:
            place = 1 + sum(name.startswith("argument ") for name in found)
            found[f"argument {place}"] = [word]
    return {name: " ".join(values) or "yes" for name, values in found.items()}


def _state(folder: Path, manifest: Mapping[str, Any], step: int) -> tuple[str, str]:
    """Return the state of a run, and why it has failed.

    A process that was killed has recorded no end.
    """
    if is_leased(folder):
        return "running", ""
    end, starts, has_begun = manifest.get("end"), manifest.get("starts"), bool(step)
    if isinstance(starts, list):  # of a script
        has_begun = has_begun or bool(starts)
        newest = starts[-1] if starts else None
        end = None
        if isinstance(newest, dict) and "exit_code" in newest:
            end = {"code": newest["exit_code"]}
    if not isinstance(end, dict):
        return "killed" if has_begun else "not trained", ""
    code = end.get("code")
    if code == ExitCode.SUCCESS:
        return "complete", ""
    if isinstance(code, int) and (code == ExitCode.PREEMPTED or signal_of(code) in STOP_SIGNALS):
        return "stopped", ""
    return "failed", f"{end['message']} ({code})" if end.get("message") else f"exit code {code}"


def _damage(
    folder: Path,
    config: Mapping[str, Any] | None,
    manifest: Mapping[str, Any] | None,
    checkpoints: ListedCheckpoints,
    is_complete: bool,
) -> str | None:
    """Return which file of a run that has ended is damaged, missing or of another run, or None.

    The content of checkpoints is not read: `trainbox verify` compares all files.
    """
    is_missing = {CONFIG: manifest is not None, MANIFEST: bool(checkpoints.newest)}
    for name, content in ((CONFIG, config), (MANIFEST, manifest)):
        if content is None and os.path.lexists(folder / name):
            return f"{name} cannot be read"
        if content is None and is_missing[name]:
            return f"{name} is missing"
    if config is None or manifest is None or "script" in config:
        return None
    if checkpoints.newest and (problem := _contradiction(folder, config, manifest, checkpoints)):
        return problem
    return checkpoints.lost(is_complete)


def _contradiction(
    folder: Path,
    config: Mapping[str, Any],
    manifest: Mapping[str, Any],
    checkpoints: ListedCheckpoints,
) -> str | None:
    """Return which of a run's files contradicts the others, or None. See `_damage`."""
    run_id, sidecar = manifest.get("run_id"), checkpoints.sidecar(checkpoints.newest)
    edited = edited_settings(manifest, config)
    is_other = sidecar is not None and sidecar.get("run_id") != run_id
    if edited or is_other:
        first = object_if_valid(folder / FIRST_CHECKPOINT) or (edited and sidecar) or {}
        if first.get("run_id") not in (None, run_id):
            return f"{MANIFEST} is of another run"
    if edited:
        return f"{CONFIG} was edited ({listed_changes(edited)})"
    if sidecar is None or is_other:
        name = checkpoint_path(folder, checkpoints.newest).name
        return f"{name} is {'of another run' if sidecar else 'damaged'}"
    return None


def _best(
    config: Mapping[str, Any], checkpoints: ListedCheckpoints
) -> tuple[tuple[str, float], float] | None:
    """Return the best metric, whose step the newest sidecar has, and its rank."""
    try:
        direction, name = split_metric(str(config["best_by"]), "--best-by")
    except (KeyError, WrongUse):
        return None
    newest = checkpoints.sidecar(checkpoints.newest)
    if newest is None or not isinstance(step := newest.get("best_step"), int):
        return None
    metrics = (checkpoints.sidecar(step) or {}).get("metrics")
    value = metrics.get(name) if isinstance(metrics, dict) else None
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return (name, float(value)), value if direction == "min" else -value


def _newest(folder: Path, newest: Mapping[str, Any]) -> tuple[tuple[str, float], float] | None:
    """Return the first metric of a script's newest validation, or else of its `newest` entry."""
    entry = newest_entry(folder / METRICS, "validation") or newest
    for name, reported in entry.items():
        value = None if name in NO_METRICS else number_of(reported)
        if value is not None and math.isfinite(value):
            lower_is_better = split_metric(name, "")[0] == "min"
            return (name, value), value if lower_is_better else -value
    return None


def _sweep(folder: Path, runs_dir: Path) -> StoredRun:
    """Return a sweep, whose steps are its trials.

    results.csv has all trials of a sweep that has ended. Before, their number is unknown, and the
    sweep is not complete even if all its trials so far are.
    """
    trials = [run for trial in _folders(folder) if (run := stored_run(trial, runs_dir)) is not None]
    states, number = [_IN_RESULTS[run.state] for run in trials], None
    if "running" not in states and (rows := _rows(folder / RESULTS)):
        states = [row.get("state") or "" for row in rows]
        number = len(states)
    ended = number is not None and {*states} <= {"done", "pruned", "failed"}
    state = "running" if "running" in states else "complete" if ended else "stopped"
    failed = states.count("failed")
    size, changed_unix_s = _size(folder)
    tasks = sorted({trial.task for trial in trials} - {"?"})
    # A task says which metric is better when it is lower. The sweep of a script knows it only from
    # its study.
    best = min((trial for trial in trials if not trial.is_script), key=_rank, default=None)
    return StoredRun(
        name=str(folder.relative_to(runs_dir)),
        task=f"{OF_SWEEP}{', '.join(tasks)}" if tasks else "sweep",
        state="failed" if failed and state == "complete" else state,
        changed_unix_s=changed_unix_s,
        bytes=size,
        metric=best.metric if best else None,
        rank=best.rank if best else math.inf,
        step=states.count("done") + states.count("pruned"),
        steps=number,
        why=f"{failed} trials have failed" if failed else "",
    )


def _rank(run: StoredRun) -> float:
    return run.rank


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        return list(csv.DictReader(read_text(path).splitlines()))
    except (OSError, ValueError, csv.Error):
        return []


def _size(folder: Path) -> tuple[int, float]:
    """Return the bytes of all files, and the time of the newest one."""
    size, newest = 0, 0.0
    waiting = [os.fspath(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                        continue
                    found = entry.stat(follow_symlinks=False)
                    size += found.st_size
                    newest = max(newest, found.st_mtime)
        except OSError:
            continue
    return size, newest
