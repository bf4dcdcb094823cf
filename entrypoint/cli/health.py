"""`trainbox health` and `trainbox doctor`."""

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from entrypoint.cli.verb import refuse_unused, verb
from trainbox.contract.errors import WrongUse

if TYPE_CHECKING:
    from entrypoint.driver.process import Driver
    from entrypoint.health.check import Question
    from entrypoint.health.verdict import Mode, Verdict

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
    from entrypoint.driver.process import Driver
    from entrypoint.health.check import Question, broken_driver
    from entrypoint.health.limits import read_limits
    from entrypoint.health.verdict import Finding, Mode, Result, Verdict
    from trainbox.contract.errors import DeviceMissing

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
    required = _required(require, kind)
    limits, overridden = read_limits(health_limits if "health_limits" in _USED[name] else None)
    question = Question(
        kind, limits=limits, overridden=overridden, required=required, runs_dir=runs_dir
    )
    try:
        driver = Driver(_lock_of_probes() if kind is Mode.LIVE else None)
    except DeviceMissing as error:
        _show(verdict := broken_driver(question, str(error)), as_json)
        sys.exit(verdict.exit_code)
    if kind is Mode.MONITOR:
        from entrypoint.health.monitor import monitor

        sys.exit(monitor(driver, question, gpus, gpu_ids, processes, listen, interval_s))
    verdict = _verdict(driver, question, gpus, gpu_ids, processes, as_json)
    if kind is Mode.DEEP:
        from entrypoint.health.deep.run import deepened

        verdict = deepened(
            verdict,
            limits,
            processes or _CPU_PROCESSES,
            deadline_s,
            lambda line: click.echo(line, err=True),
            lambda: _verdict(driver, question, gpus, gpu_ids, processes, as_json),
        )
    _show(verdict, as_json)
    sys.exit(verdict.exit_code)


def _required(require: str, mode: "Mode") -> tuple[str, ...]:
    """Return the checks that --require names.

    Raises:
        WrongUse: The mode does not have one of the checks.
    """
    from entrypoint.health.check import check_names

    required = tuple(filter(None, require.split(",")))
    known = check_names(mode)
    if unknown := [name for name in required if name not in known]:
        raise WrongUse(
            f"--require {require}: no such check {unknown[0]!r}: use some of {', '.join(known)}"
        )
    return required


def _lock_of_probes() -> Path | None:
    """Return the lock of this user's liveness probes, or None without a temporary folder.

    Without the lock, probes of a driver that hangs may pile up.
    """
    import tempfile

    with contextlib.suppress(OSError):
        return Path(tempfile.gettempdir()) / f"trainbox-live-{os.getuid()}.lock"
    return None


def _list_gpus(as_json: bool) -> None:
    from entrypoint.driver.process import Driver, detect, visible_to_cuda

    found = detect(Driver())
    visible = visible_to_cuda(found)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(gpu) for gpu in visible], indent=2))
        return
    if found.driver_version:
        click.echo(f"NVIDIA driver {found.driver_version}")
    for gpu in visible:
        fault = f"  {gpu.fault}" if gpu.fault else ""
        click.echo(f"GPU {gpu.label}  {gpu.name}  {gpu.memory_mib} MiB  {gpu.uuid}{fault}")
    if not visible:
        reason = found.absent or "the driver lists none, or CUDA_VISIBLE_DEVICES hides them"
        click.echo(f"no GPU visible: {reason}")


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
    from entrypoint.health.check import Question
    from entrypoint.health.limits import read_limits
    from entrypoint.health.verdict import Mode

    def report_wait() -> None:
        if sys.stderr.isatty():
            click.echo("waiting for torch ...", err=True)

    limits, overridden = read_limits(health_limits)
    question = Question(Mode.GATE, limits=limits, overridden=overridden, runs_dir=runs_dir)
    click.echo(examination_report(question, gpus, gpu_ids, on_wait=report_wait))


def _verdict(
    driver: "Driver",
    question: "Question",
    gpus: int | str | None,
    gpu_ids: str | None,
    processes: int | None,
    as_json: bool,
) -> "Verdict":
    from entrypoint.health.check import about, broken_driver, examine, without_driver
    from entrypoint.health.verdict import Verdict
    from trainbox.contract.errors import DeviceMissing

    if gpus == 0:
        return without_driver(
            dataclasses.replace(question, processes=processes or 1), "not queried: --gpus 0"
        )
    try:
        found = driver.detect()
    except DeviceMissing as error:
        return broken_driver(question, str(error))
    decided = about(
        found, question, os.environ.get("CUDA_VISIBLE_DEVICES"), gpus, gpu_ids, processes
    )
    if isinstance(decided, Verdict):
        return decided

    def progress(done: int, samples: int) -> None:
        if samples > 1 and not as_json and sys.stderr.isatty():
            click.echo(
                f"\rsampling {len(decided.selection.gpus)} GPU(s): {done} of {samples}",
                err=True,
                nl=done == samples,
            )

    return examine(driver, decided, progress)


def _show(verdict: "Verdict", as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(verdict.to_json(), indent=2, ensure_ascii=False))
        return
    from entrypoint.health.screen import screen

    click.echo(screen(verdict))
