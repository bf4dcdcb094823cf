"""Examine the hardware once, from the question to the verdict."""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from entrypoint.driver.gpus import Detection, Gpu, select, visible_gpus
from entrypoint.driver.process import Driver
from entrypoint.driver.readings import NOT_NVML, Sample, Unread
from entrypoint.health.limits import Limits
from entrypoint.health.node import NodeReadings, judge_infiniband, judge_node, read_node
from entrypoint.health.rules.gpus import Selection, judge_gpus
from entrypoint.health.rules.machine import (
    driver_action,
    judge_architectures,
    judge_count,
    judge_driver,
    judge_mixture,
    judge_uuids,
)
from entrypoint.health.rules.table import names_to_read, rules_for
from entrypoint.health.verdict import Finding, Mode, Result, Verdict
from trainbox.contract.errors import DeviceMissing, WrongUse

_NOT_READ = Unread(NOT_NVML, "not read")
NO_ANSWER = 10  # NVML's TIMEOUT, for a driver that does not answer
# The figures of a GPU for the screen, for --json and for Prometheus: the reading that each is made
# from, and the function that makes it.
_FIGURES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **{
        name: (name, lambda value: value)
        for name in (
            *("vbios", "temperature_c", "utilization_percent", "memory_used_mib", "power_w"),
            *("sm_clock_mhz", "memory_clock_mhz", "pcie_generation", "pcie_width", "energy_mj"),
            *("ecc_corrected", "ecc_uncorrected", "pcie_replays"),
        )
    },
    "nvlink_errors": ("nvlink_errors", sum),
    "nvlink_crc_errors": ("nvlink_crc", sum),
    "remapped_rows_corrected": ("remapped_rows", itemgetter(0)),
    "remapped_rows_uncorrected": ("remapped_rows", itemgetter(1)),
}
_DESCRIBING = ("name", *(reading for reading, _ in _FIGURES.values()))
_SAMPLES = 10  # several samples, to distinguish a lasting state from a short one
_SAMPLE_INTERVAL_S = 0.1
# A reading that hangs costs two deadlines before it is left out. If more than two readings hang, it
# is the whole driver.
_MOST_DEADLINES = 4


@dataclass(frozen=True)
class Question:
    """The subject and the mode of an examination.

    `wanted` is the option that requested GPUs, or empty. `overridden` has the limits that differ
    from the defaults. `required` are the checks that must have a result. `processes` are to be
    started on this machine. `runs_dir` is the folder to check for output, or None. With `one_node`,
    the network between nodes is not judged.
    """

    mode: Mode
    selection: Selection = field(default_factory=Selection)
    wanted: str = ""
    limits: Limits = field(default_factory=Limits)
    overridden: dict[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    processes: int = 1
    runs_dir: Path | None = Path("runs")
    one_node: bool = False


def check_names(mode: Mode = Mode.CHECK) -> list[str]:
    """Return the names of all checks that may run in the mode, for --require."""
    rules = [rule.check for rule in rules_for(mode)]
    if mode is Mode.LIVE:
        return ["driver", "count", "handle", *rules]
    others = ["driver", "count", "handle", "unique-uuid", "architecture", "same-name", "same-vbios"]
    others += ["cpus", "shm", "memory", "disk", "output", "cuda", "infiniband"]
    others += ["xid"] if mode is not Mode.GATE else []
    if mode is Mode.DEEP:
        from entrypoint.health.deep.cases import CHECKS  # takes 10 ms

        others += CHECKS
    return [*others, *rules]


def required_checks(require: str, mode: Mode) -> tuple[str, ...]:
    """Return the checks that --require names.

    Raises:
        WrongUse: The mode does not have one of the checks.
    """
    required = tuple(filter(None, require.split(",")))
    known = check_names(mode)
    if unknown := [name for name in required if name not in known]:
        raise WrongUse(
            f"--require {require}: no such check {unknown[0]!r}: use some of {', '.join(known)}"
        )
    return required


def choose(
    found: Sequence[Gpu],
    cuda_visible_devices: str | None,
    gpus: int | str | None,
    gpu_ids: str | None,
) -> tuple[Selection, str]:
    """Return the GPUs that a launch with these options would use, and the option that names them.

    Raises:
        WrongUse: An option is malformed.
    """
    wanted = f"--gpu-ids {gpu_ids}" if gpu_ids else f"--gpus {gpus}" if gpus is not None else ""
    try:
        visible = visible_gpus(found, cuda_visible_devices)
        if gpu_ids:
            return Selection(select(visible, gpu_ids, "--gpu-ids")), wanted
    except DeviceMissing as error:
        return Selection((), missing=len(gpu_ids.split(",")) if gpu_ids else 1), str(error)
    if gpus == "all" and not visible:
        return Selection((), missing=1), wanted
    count = len(visible) if gpus in (None, "all") else int(gpus or 0)
    return Selection(visible[:count], missing=max(0, count - len(visible))), wanted


def ask(
    driver: Driver,
    question: Question,
    gpus: int | str | None,
    gpu_ids: str | None,
    processes: int | None,
) -> Question | Verdict:
    """Return the question about the GPUs that these options name, as the driver lists them.

    Without a working driver, or for --gpus 0, return the verdict instead.

    Raises:
        WrongUse: An option is malformed.
    """
    if gpus == 0:
        question = dataclasses.replace(question, processes=processes or 1)
        return without_driver(question, "not queried: --gpus 0")
    try:
        found = driver.detect()
    except DeviceMissing as error:
        return broken_driver(question, str(error))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return about(found, question, visible, gpus, gpu_ids, processes)


def about(
    found: Detection,
    question: Question,
    cuda_visible_devices: str | None,
    gpus: int | str | None,
    gpu_ids: str | None,
    processes: int | None,
) -> Question | Verdict:
    """Return the question about the GPUs that these options name.

    Without a working driver, return the verdict instead.

    Raises:
        WrongUse: An option is malformed.
    """
    question = dataclasses.replace(question, processes=processes or 1)
    if found.broken:
        return broken_driver(question, found.broken, found.code)
    # Without a driver, no GPU is hidden.
    visible = None if found.absent else cuda_visible_devices
    selection, wanted = choose(found.gpus, visible, gpus, gpu_ids)
    processes = processes or max(1, len(selection.gpus))
    question = dataclasses.replace(
        question, selection=selection, wanted=wanted, processes=processes
    )
    return without_driver(question, found.absent) if found.absent else question


def examine(
    driver: Driver,
    question: Question,
    on_sample: Callable[[int, int], None] = lambda _done, _all: None,
) -> Verdict:
    """Sample the GPUs of the question, and return the verdict.

    The modes `check` and `deep` take ten samples, other modes one. `on_sample` is called after each
    sample with the number of samples so far and the number of all samples.

    If readings hang, the others are still made, until the examination has waited for some
    deadlines.
    """
    give_up_s = time.monotonic() + _MOST_DEADLINES * driver.deadline_s
    samples: list[Sample] = []
    thorough = question.mode in (Mode.CHECK, Mode.DEEP)
    count = _SAMPLES if thorough and question.selection.gpus else 1
    for number in range(count):
        if number:
            time.sleep(_SAMPLE_INTERVAL_S)
        sample = take_sample(driver, question, events=thorough)
        while sample.fault and time.monotonic() < give_up_s and driver.leave_out():
            sample = take_sample(driver, question, events=thorough)
        samples.append(sample)
        on_sample(number + 1, count)
        if samples[-1].fault:
            break
    node = None if question.mode is Mode.LIVE else read_node(question.runs_dir)
    return verdict(samples, question, node)


def take_sample(driver: Driver, question: Question, events: bool) -> Sample:
    """Return one sample, with a fault if the driver does not answer in time."""
    uuids = tuple(
        dict.fromkeys(
            gpu.mig_parent or gpu.uuid for gpu in question.selection.gpus if not gpu.fault
        )
    )
    while True:
        try:
            return driver.sample(uuids, names_of(question), events)
        except DeviceMissing as error:
            # After a crash in a reading, the others can be read at once.
            if driver.died_at_s is None or not driver.leave_out():
                return Sample(time.monotonic(), fault=Unread(NO_ANSWER, str(error)))


def names_of(question: Question) -> tuple[str, ...]:
    """Return the names of the values to read of each GPU."""
    names = names_to_read(rules_for(question.mode))
    return names if question.mode is Mode.LIVE else tuple(dict.fromkeys((*names, *_DESCRIBING)))


def verdict(samples: Sequence[Sample], question: Question, node: NodeReadings | None) -> Verdict:
    """Return the verdict on the samples (at least one, oldest first) and the node. Pure."""
    newest, selection = samples[-1], question.selection
    findings = judge_driver(newest) + judge_count(selection, question.wanted)
    if newest.fault is None:
        findings += judge_gpus(samples, selection, rules_for(question.mode), question.limits)
        if question.mode is not Mode.LIVE:
            findings += judge_uuids(selection) + judge_mixture(newest, selection)
    if node is not None:
        findings += judge_architectures(node.architectures, selection)
        uses_gpus = bool(selection.gpus) and newest.fault is None
        findings += judge_node(node, newest.driver, question.processes, uses_gpus, question.limits)
        if uses_gpus and not question.one_node:
            findings += judge_infiniband(node.infiniband)
    version = newest.driver.get("driver_version")
    gpus = tuple(_description(gpu, newest) for gpu in selection.gpus)
    return _of(question, findings, gpus, version if isinstance(version, str) else None)


def _of(
    question: Question,
    findings: Sequence[Finding],
    gpus: tuple[dict[str, Any], ...] = (),
    driver_version: str | None = None,
) -> Verdict:
    """Return the verdict. A required check without a finding is UNKNOWN.

    Required checks of `--deep` are exempt, because their findings are added later.
    """
    judged = {finding.check for finding in findings}
    unknown = [
        Finding(name, Result.UNKNOWN, "required, but not judged here")
        for name in question.required
        if name not in judged and not name.startswith("deep")
    ]
    found, required = (*findings, *unknown), question.required
    return Verdict(question.mode, found, gpus, driver_version, required, question.overridden)


def without_driver(question: Question, reason: str) -> Verdict:
    """Return the verdict without an NVIDIA driver: CRITICAL if a GPU was requested."""
    findings = [Finding("driver", Result.NA, reason)]
    if question.wanted:
        findings = [Finding("driver", Result.CRITICAL, reason, "present", "you", "give_gpus")]
        findings += judge_count(question.selection, question.wanted)
    if question.mode is not Mode.LIVE:
        findings += judge_node(
            read_node(question.runs_dir), {}, question.processes, False, question.limits
        )
    return _of(question, findings)


def broken_driver(question: Question, reason: str, code: int = NO_ANSWER) -> Verdict:
    """Return the verdict on a driver that does not work. `code` is NVML's error number."""
    action = driver_action(code)
    found = Finding("driver", Result.CRITICAL, reason, "answers", "NVIDIA", action)
    return _of(question, [found])


def _description(gpu: Gpu, newest: Sample) -> dict[str, Any]:
    """Return the properties of a GPU that the screen and Prometheus show."""
    readings = newest.gpus.get(gpu.mig_parent or gpu.uuid, {})
    figures = {
        name: make(value)
        for name, (reading, make) in _FIGURES.items()
        if not isinstance(value := readings.get(reading, _NOT_READ), Unread)
        # The energy of a GPU has no shares of its slices.
        and not (name == "energy_mj" and gpu.mig_parent)
    }
    return {
        "gpu": gpu.label,
        "uuid": gpu.uuid,
        **({"mig_parent": gpu.mig_parent} if gpu.mig_parent else {}),
        "name": gpu.name,
        "memory_mib": gpu.memory_mib,
        **figures,
    }
