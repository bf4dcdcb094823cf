"""What the workers of a sweep do for each trial: train a task, or run a user's script. Pure."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainbox.disclosure.suggested_commands import command, run_command_line
from trainbox.disclosure.variables import without_launch
from trainbox.files.regular_files import object_if_valid
from trainbox.folders.record_folder import CONFIG, DIFF, MANIFEST
from trainbox.processes.environment import Internal
from trainbox.processes.programs import (
    ENTRYPOINT,
    SCRIPT_WORKER,
    SWEEP_WORKER,
    Program,
    command_of,
)
from trainer.sweep.grid import NO_METRIC, Record, Sweep, Trial, trial_folder
from trainer.sweep.script_template import Script

# Variables of this sweep, which would be wrong in a launch of its own.
_OF_THE_SWEEP = (Internal.FINISHED, Internal.HEALTH_EVENTS, Internal.LAUNCH, Internal.MESSAGES)


@dataclass(frozen=True)
class Work:
    """How trials are trained.

    Attributes:
        worker: the program of the worker processes.
        order: returns the order for a worker from a trial and its folder.
        save_s: the time after SIGTERM in which a trial that takes too long can save.
    """

    worker: Program
    order: Callable[[Trial, Path], dict[str, Any]]
    save_s: float = 0.0


def task_work(sweep: Sweep, data_dir: Path, rehearses: bool) -> Work:
    """Return the work of a sweep over a task.

    The first trial `rehearses` for all. Trials that may capture steps rehearse each, because each
    needs the proof.
    """

    def order(trial: Trial, run: Path) -> dict[str, Any]:
        config = sweep.trial_config(trial.point, trial.seed)
        return {
            "run": str(run),
            "log": str(run / "logs" / "output.log"),
            "config": vars(config),
            "data_dir": str(data_dir),
            "pruned": sweep.pruner != "none",
            "swept": [*trial.point, "seed"],
            "rehearses": rehearses and (trial.number == 0 or config.capture != "off"),
        }

    return Work(SWEEP_WORKER, order)


def script_work(sweep: Sweep, device: str) -> Work:
    """Return the work of a sweep over a script. Its trials run on `device`."""
    assert isinstance(sweep.config, Script)
    script = sweep.config

    def order(trial: Trial, run: Path) -> dict[str, Any]:
        return {
            "run": str(run),
            "log": str(run / "logs" / "rank-0.log"),
            "command": run_command(script, trial, run, device),
            "metric": sweep.goal,
            "has_no_metric": sweep.metric == NO_METRIC,
            "metric_regex": script.metric_regex,
            "pruned": sweep.pruner != "none",
        }

    return Work(SCRIPT_WORKER, order, save_s=60.0)


def run_command(script: Script, trial: Trial, run: Path, device: str) -> list[str]:
    """Return the command of `trainbox run` for a trial: one process."""
    values = {**trial.point, "seed": trial.seed}
    return [
        *command_of(ENTRYPOINT, "run", "--trial"),
        # The sweep has checked the GPUs, and watches them.
        *("--no-health", "--nnodes", "1"),
        *(["--gpus", "1"] if device == "cuda" else ["--device", device]),
        *script.options(values),
        *("--runs-dir", str(run.parent), "--run", run.name),
        *(["-m"] if script.is_module else []),
        *(script.script, "--", *script.arguments(values)),
    ]


def again(sweep: Sweep, record: Record, folder: Path, gpus: int | None = None) -> str:
    """Return the command line that repeats a trial of the sweep in `folder` as a new run.

    A trial of a script had `gpus` GPUs, or None if this is not known.
    """
    name = f"{folder.name}-best"
    if isinstance(sweep.config, Script):
        device = [] if gpus is None else ["--gpus", "1"] if gpus else ["--device", "cpu"]
        values = {**record.point, "seed": record.seed}
        arguments = sweep.config.arguments(values)
        options = [*device, *sweep.config.options(values), "--run", name]
        return run_command_line(options, sweep.config.script, sweep.config.is_module, arguments)
    config = trial_folder(folder, record.number) / CONFIG
    return command("train", shlex.join(["--config", str(config), "--run", name]))


def run_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of `trainbox run`, of which a trial is a launch of its own."""
    kept = without_launch(env).items()
    return {name: value for name, value in kept if name not in _OF_THE_SWEEP}


def starts_of(run: Path) -> list[dict[str, Any]]:
    """Return the ended starts of a script in its run folder, or none if they are not known."""
    starts = (object_if_valid(run / MANIFEST) or {}).get("starts")
    entries = starts if isinstance(starts, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and "exit_code" in entry]


def sources_of(run: Path) -> dict[str, str]:
    """Return the digests of the user's files that a trial was trained with, by their names.

    A script may be in a repository, whose revision and changes since then are two more. What has
    changed between the starts of a script has no digest. Nothing is returned if the manifest of the
    trial is lost.
    """
    manifest = object_if_valid(run / MANIFEST) or {}
    sources, revision = manifest.get("sources"), manifest.get("revision")
    found = dict(sources) if isinstance(sources, dict) else {}
    if isinstance(revision, str):
        found = {DIFF: "", **found, "revision": revision}
    starts = manifest.get("starts")
    for start in starts if isinstance(starts, list) else []:
        changed = start.get("changed") if isinstance(start, dict) else None
        found |= dict.fromkeys(changed or (), "")
    return found
