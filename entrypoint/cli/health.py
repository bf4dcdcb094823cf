"""`trainbox health` and `trainbox doctor`."""

import dataclasses
import functools
import json
import sys
from pathlib import Path

from entrypoint.cli.verb import refuse_unused, verb
from entrypoint.driver.process import Driver, detect, lock_of_probes, visible_to_cuda
from entrypoint.health.check import Question, ask, broken_driver, examine, required_checks
from entrypoint.health.limits import read_limits
from entrypoint.health.verdict import Finding, Mode, Result, Verdict, screen
from trainbox.errors import DeviceMissing, WrongUse
from trainbox.folders.write_failures import show
from trainbox.processes.streams import say, show_progress

_CPU_PROCESSES = 2  # for --deep without a GPU: the fewest that can communicate
# The parameters that each mode uses. The others are refused on the command line.
_SELECTION = {"gpus", "gpu_ids", "require"}
_EXAMINATION = {*_SELECTION, "health_limits", "processes", "runs_dir"}
_USED = {
    "check": {*_EXAMINATION, "as_json"},
    "gate": {*_EXAMINATION, "as_json", "wanted"},
    "live": {*_SELECTION, "as_json", "wanted"},
    "monitor": {*_EXAMINATION, "listen", "interval_s"},
    "deep": {*_EXAMINATION, "as_json", "deadline_s"},
    "list": {"as_json"},
}


@verb("health")
def health(
    gpus: int | str | None,
    gpu_ids: str | None,
    as_json: bool,
    require: str,
    health_limits: Path | None,
    wanted: bool,
    processes: int | None,
    runs_dir: Path,
    deadline_s: float,
    listen: str,
    interval_s: float,
    **modes: bool,
) -> None:
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
    chosen = [mode for mode, wished in modes.items() if wished]
    flags = [f"--{mode}" for mode in chosen]
    if len(flags) > 1:
        raise WrongUse(f"{' and '.join(flags)} are different modes of health: choose one")
    name = chosen[0] if chosen else "check"
    refuse_unused(" ".join(["health", *flags]), {name, *_USED[name]})
    if name == "list":
        _list_gpus(as_json)
        return
    kind = Mode(name)
    if not wanted and "wanted" in _USED[name]:
        _show(Verdict(kind, (Finding("driver", Result.INFO, "not checked: HEALTH=0"),)), as_json)
        return
    required = required_checks(require, kind)
    limits = read_limits(health_limits if "health_limits" in _USED[name] else None)
    question = Question(
        kind,
        gpus,
        gpu_ids,
        processes,
        limits=limits,
        required=required,
        runs_dir=runs_dir,
    )
    try:
        driver = Driver(lock_of_probes() if kind is Mode.LIVE else None)
    except DeviceMissing as error:
        _show(verdict := broken_driver(question, str(error)), as_json)
        sys.exit(verdict.exit_code)
    if kind is Mode.MONITOR:
        from entrypoint.health.monitor import monitor

        sys.exit(monitor(driver, question, listen, interval_s))

    def examined() -> Verdict:
        decided = ask(driver.detect, question)
        if isinstance(decided, Verdict):
            return decided
        gpus_shown = 0 if as_json else len(decided.selection.gpus)
        return examine(driver, decided, functools.partial(_show_progress, gpus_shown))

    verdict = examined()
    if kind is Mode.DEEP:
        from entrypoint.health.deep import deepened

        verdict = deepened(
            verdict,
            limits,
            processes or _CPU_PROCESSES,
            deadline_s,
            say,
            examined,
        )
    _show(verdict, as_json)
    sys.exit(verdict.exit_code)


def _show_progress(gpus: int, done: int, samples: int) -> None:
    if gpus and samples > 1:
        show_progress(f"sampling {gpus} GPU(s): {done} of {samples}" if done < samples else "")


def _list_gpus(as_json: bool) -> None:
    found = detect(Driver())
    visible = visible_to_cuda(found)
    if as_json:
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
