"""`trainbox health` and `trainbox doctor`."""

import contextlib
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from entrypoint.cli.verb import refuse_unused, verb
from entrypoint.driver.process import Driver, detect, lock_of_probes, visible_to_cuda
from entrypoint.health.check import Question, ask, broken_driver, examine, required_checks
from entrypoint.health.limits import read_limits
from entrypoint.health.verdict import Finding, Mode, Result, Verdict, screen
from trainbox.errors import DeviceMissing, WrongUse
from trainbox.folders.write_failures import show
from trainbox.processes.streams import say, show_progress

_FRESH_S, _HANGS_S = 300.0, 3600.0  # of the last step of a training
_CPU_PROCESSES = 2  # for --deep without a GPU: the fewest that can communicate


@verb("health")
def health(**values: Any) -> None:
    """Judge GPUs, driver and node; exit with code 0 if a run may start, 1 if not, 2 if the check
    was not possible.

    \b
    Examples:
      trainbox health                          one screen, after a second of sampling
      trainbox health --gate --gpus 4 --json   in a script, an init container or a SLURM prolog
      trainbox health --live                   as a liveness probe
      trainbox health --list --json            the visible GPUs
      trainbox health --monitor                /metrics and /healthz on 127.0.0.1:9400
      trainbox health --deep --processes 2     without a GPU: on two CPU processes
      trainbox health --health-limits limits.toml --require ecc-uncorrected
    """
    chosen = [name for name in _MODES if values.get(name)]
    flags = [f"--{name}" for name in chosen]
    if len(flags) > 1:
        raise WrongUse(f"{' and '.join(flags)} are different modes of health: choose one")
    name = chosen[0] if chosen else "check"
    run, used = _MODES[name]
    refuse_unused(" ".join(["health", *flags]), {name, *used})
    run(values)


def _check(values: Mapping[str, Any]) -> NoReturn:
    question = _question(Mode.CHECK, values)
    _exit(_examined(_driver(question, values), question, values), values)


def _gate(values: Mapping[str, Any]) -> None:
    if not values["wanted"]:
        _show_unchecked(Mode.GATE, values)
        return
    question = _question(Mode.GATE, values)
    _exit(_examined(_driver(question, values), question, values), values)


def _live(values: Mapping[str, Any]) -> None:
    if not values["wanted"]:
        _show_unchecked(Mode.LIVE, values)
        return
    question = _question(Mode.LIVE, {**values, "health_limits": None})
    age_s = _heartbeat_age_s()
    if age_s is not None and (age_s < _FRESH_S or age_s > _HANGS_S):
        is_fresh = age_s < _FRESH_S
        finding = Finding(
            "training",
            Result.PASS if is_fresh else Result.CRITICAL,
            f"the last step was {age_s / 60:.0f} minutes ago",
            f"{_HANGS_S / 60:.0f} minutes",
            "Trainbox",
            "" if is_fresh else "restart_app",
        )
        _exit(Verdict(Mode.LIVE, (finding,)), values)
    # Probes of a driver that hangs must not pile up.
    driver = _driver(question, values, lock_of_probes())
    _exit(_examined(driver, question, values), values)


def _heartbeat_age_s() -> float | None:
    """Return the age of the last step of a training in this container, or None without one.

    The file has the time on the clock of the machine that nobody sets. A later time is of another
    boot.
    """
    with contextlib.suppress(OSError, ValueError):
        path = Path(os.environ.get("TRAINBOX_HEARTBEAT", ""))
        if path.is_file():
            age_s = time.monotonic() - float(path.read_text(encoding="utf-8"))
            return age_s if age_s >= 0 else None
    return None


def _monitor(values: Mapping[str, Any]) -> NoReturn:
    from entrypoint.health.monitor import monitor

    question = _question(Mode.MONITOR, values)
    driver = _driver(question, values)
    sys.exit(monitor(driver, question, values["listen"], values["interval_s"]))


def _deep(values: Mapping[str, Any]) -> NoReturn:
    from entrypoint.health.deep import deepened

    question = _question(Mode.DEEP, values)
    examined = functools.partial(_examined, _driver(question, values), question, values)
    processes = values["processes"] or _CPU_PROCESSES
    deadline_s = values["deadline_s"]
    _exit(deepened(examined(), question.limits, processes, deadline_s, say, examined), values)


def _list(values: Mapping[str, Any]) -> None:
    found = detect(Driver())
    visible = visible_to_cuda(found)
    if values["as_json"]:
        show(json.dumps([dataclasses.asdict(gpu) for gpu in visible], indent=2))
        return
    if found.driver_version:
        show(f"NVIDIA driver {found.driver_version}")
    for gpu in visible:
        fault = f"  {gpu.fault}" if gpu.fault else ""
        show(f"GPU {gpu.label}  {gpu.name}  {gpu.memory_mib} MiB  {gpu.uuid}{fault}")
    if not visible:
        reason = found.absent or "the driver lists none, or CUDA_VISIBLE_DEVICES hides them"
        show(f"no GPU visible: {reason}")


# Each mode, and the parameters that it uses. The others are refused on the command line.
_SELECTION = {"gpus", "gpu_ids", "require"}
_EXAMINATION = {*_SELECTION, "health_limits", "processes", "runs_dir"}
_MODES: dict[str, tuple[Callable[[Mapping[str, Any]], None], set[str]]] = {
    "list": (_list, {"as_json"}),
    "check": (_check, {*_EXAMINATION, "as_json"}),
    "gate": (_gate, {*_EXAMINATION, "as_json", "wanted"}),
    "live": (_live, {*_SELECTION, "as_json", "wanted"}),
    "monitor": (_monitor, {*_EXAMINATION, "listen", "interval_s"}),
    "deep": (_deep, {*_EXAMINATION, "as_json", "deadline_s"}),
}


def _question(mode: Mode, values: Mapping[str, Any]) -> Question:
    """Return the question of `mode` to the driver and the node.

    Raises:
        WrongUse: `--require` names an unknown check, or the file of limits is wrong.
    """
    required = required_checks(values["require"], mode)
    return Question(
        mode,
        values["gpus"],
        values["gpu_ids"],
        values["processes"],
        limits=read_limits(values["health_limits"]),
        required=required,
        runs_dir=values["runs_dir"],
    )


def _driver(question: Question, values: Mapping[str, Any], lock: Path | None = None) -> Driver:
    """Return the driver, whose process holds `lock`. If it cannot be asked, show that, and exit."""
    try:
        return Driver(lock)
    except DeviceMissing as error:
        _exit(broken_driver(question, str(error)), values)


def _examined(driver: Driver, question: Question, values: Mapping[str, Any]) -> Verdict:
    decided = ask(driver.detect, question)
    if isinstance(decided, Verdict):
        return decided
    gpus_shown = 0 if values.get("as_json") else len(decided.selection.gpus)
    return examine(driver, decided, functools.partial(_show_progress, gpus_shown))


def _show_unchecked(mode: Mode, values: Mapping[str, Any]) -> None:
    unchecked = Finding("driver", Result.INFO, "not checked: HEALTH=0")
    _show(Verdict(mode, (unchecked,)), values["as_json"])


def _exit(verdict: Verdict, values: Mapping[str, Any]) -> NoReturn:
    _show(verdict, values["as_json"])
    sys.exit(verdict.exit_code)


def _show_progress(gpus: int, done: int, samples: int) -> None:
    if gpus and samples > 1:
        show_progress(f"sampling {gpus} GPU(s): {done} of {samples}" if done < samples else "")


@verb("doctor")
def doctor(
    gpus: int | str | None, gpu_ids: str | None, health_limits: Path | None, runs_dir: Path
) -> None:
    """Print a report to paste into an issue: the environment, its problems and their remedies,
    without secrets.

    \b
    Examples:
      trainbox doctor
      docker compose run --rm train doctor
    """
    from entrypoint.doctor.examine import examination_report

    limits = read_limits(health_limits)
    question = Question(Mode.GATE, gpus, gpu_ids, limits=limits, runs_dir=runs_dir)
    show(examination_report(question))


def _show(verdict: "Verdict", as_json: bool) -> None:
    if as_json:
        show(json.dumps(verdict.to_json(), indent=2, ensure_ascii=False))
        return
    show(screen(verdict))
