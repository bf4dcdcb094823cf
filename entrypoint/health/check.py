"""Examine the hardware once, from the question to the verdict."""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entrypoint.driver.gpus import NO_ANSWER, Detection, Sample, Unread, select
from entrypoint.driver.process import Driver, visible_to_cuda
from entrypoint.health.figures import READ_FOR_FIGURES, description
from entrypoint.health.limits import Limits
from entrypoint.health.node import NodeReadings, judge_infiniband, judge_node, read_node
from entrypoint.health.rules.gpus import Selection, judge_gpus, names_to_read, rules_for
from entrypoint.health.rules.machine import (
    broken,
    judge_architectures,
    judge_count,
    judge_driver,
    judge_mixture,
    judge_uuids,
)
from entrypoint.health.verdict import Finding, Mode, Result, Verdict
from entrypoint.launch.request import allocation_of, wants_all_allocated
from entrypoint.system.container import in_container
from entrypoint.system.nvidia import unusable_gpus
from trainbox.errors import DeviceMissing, WrongUse
from trainbox.options.table import DEVICE

_SAMPLES = 10  # several samples, to distinguish a lasting state from a short one
_SAMPLE_INTERVAL_S = 0.1
# A reading that hangs is tried twice, until the deadline each time, and then left out. If more than
# two readings hang, the whole driver hangs.
_MOST_DEADLINES = 4


@dataclass(frozen=True)
class Question:
    """What to examine, and in which mode.

    Attributes:
        mode: the purpose of the examination.
        gpus: the option --gpus.
        gpu_ids: the option --gpu-ids.
        processes: the option --processes.
        selection: the GPUs that `ask` has found for these options.
        wanted: the option that requested GPUs, or "".
        limits: the limits of the rules.
        required: the checks that must have a result.
        runs_dir: the folder in which runs are written; None to leave out this check.
        one_node: whether to leave out the network between nodes.
    """

    mode: Mode
    gpus: int | str | None = None
    gpu_ids: str | None = None
    processes: int | None = None
    selection: Selection = field(default_factory=Selection)
    wanted: str = ""
    limits: Limits = field(default_factory=Limits)
    required: tuple[str, ...] = ()
    runs_dir: Path | None = Path("runs")
    one_node: bool = False

    @property
    def started(self) -> int:
        """Return the number of processes to be started here: by default one for each GPU."""
        return self.processes or max(1, len(self.selection.gpus))


def check_names(mode: Mode = Mode.CHECK) -> list[str]:
    """Return the names of all checks that may run in the mode, for --require."""
    rules = [rule.check for rule in rules_for(mode)]
    if mode is Mode.LIVE:
        return ["driver", "count", "handle", *rules]
    others = ["driver", "count", "handle", "unique-uuid", "architecture", "same-name", "same-vbios"]
    others += ["cpus", "shm", "memory", "disk", "output", "cuda", "infiniband"]
    others += ["xid"] if mode is not Mode.GATE else []
    if mode is Mode.DEEP:
        from entrypoint.health.deep_cases import CHECKS  # takes 10 ms

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


def ask(detect: Callable[[], Detection], question: Question) -> Question | Verdict:
    """Return the question with its selection: the GPUs found by `detect` that its options name.

    Without these options, they are the GPUs of the job's allocation. Without a working driver, or
    for --gpus 0, return the verdict instead.

    Raises:
        WrongUse: An option is malformed.
    """
    if question.gpus == 0:
        return without_driver(question, "not queried: --gpus 0")
    found = detect()
    if found.broken:
        return broken_driver(question, found.broken, found.code)
    gpus, gpu_ids = question.gpus, question.gpu_ids
    wanted = f"--gpu-ids {gpu_ids}" if gpu_ids else f"--gpus {gpus}" if gpus is not None else ""
    # A liveness probe does not know the options of the training. It must not end a training on CPUs
    # because GPUs are missing.
    on_cpu = "cpu" in map(os.environ.get, DEVICE.variables)
    may_need_gpus = question.mode is not Mode.LIVE and not on_cpu
    try:
        visible = visible_to_cuda(found) if may_need_gpus or not found.absent else ()
        chosen = select(visible, gpu_ids, "--gpu-ids") if gpu_ids else visible
        requested = len(chosen) if gpu_ids or gpus is None else gpus
        if requested == "all":  # at least one
            requested = max(1, len(chosen))
        wants_all = may_need_gpus and wants_all_allocated(gpus, gpu_ids)
        if wants_all and (allocated := allocation_of(os.environ)):
            requested = max(int(requested), allocated.least)
            wanted = allocated.named if allocated.least else wanted
        count = int(requested)
        selection = Selection(chosen[:count], missing=max(0, count - len(chosen)))
    except DeviceMissing as error:
        selection, wanted = Selection(missing=len((gpu_ids or "").split(","))), str(error)
    question = dataclasses.replace(question, selection=selection, wanted=wanted)
    if not found.absent:
        return question
    seen = unusable_gpus(in_container()) if may_need_gpus else ""
    return without_driver(question, found.absent, seen)


def examine(
    driver: Driver,
    question: Question,
    on_sample: Callable[[int, int], None] = lambda _done, _all: None,
) -> Verdict:
    """Sample the GPUs of the question, and return the verdict.

    The modes `check` and `deep` take ten samples, other modes one. `on_sample` is called after each
    sample with the number of samples so far and the number of all samples.

    If a reading hangs, the other readings are still made, until the examination has waited for four
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
    uuids = tuple(dict.fromkeys(gpu.whole_uuid for gpu in question.selection.gpus if not gpu.fault))
    names = names_to_read(rules_for(question.mode))
    if question.mode is not Mode.LIVE:
        names = tuple(dict.fromkeys((*names, *READ_FOR_FIGURES)))
    while True:
        try:
            return driver.sample(uuids, names, events)
        except DeviceMissing as error:
            # After a crash in a reading, the others can be read at once.
            if driver.died_at_s is None or not driver.leave_out():
                return Sample(time.monotonic(), fault=Unread(NO_ANSWER, str(error)))


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
        findings += judge_node(node, newest.driver, question.started, uses_gpus, question.limits)
        if uses_gpus and not question.one_node:
            findings += judge_infiniband(node.infiniband)
    version = newest.driver.get("driver_version")
    gpus = tuple(description(gpu, newest.of(gpu)) for gpu in selection.gpus)
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
    changed = question.limits.overridden()
    return Verdict(question.mode, found, gpus, driver_version, required, changed)


def without_driver(question: Question, reason: str, seen: str = "") -> Verdict:
    """Return the verdict without an NVIDIA driver.

    It is CRITICAL if a GPU or the driver was requested, or if the machine has a GPU: `seen` then
    describes it.
    """
    findings = [Finding("driver", Result.NA, reason)]
    if question.wanted or "driver" in question.required:
        findings = [Finding("driver", Result.CRITICAL, reason, "present", "you", "give_gpus")]
        findings += judge_count(question.selection, question.wanted) if question.wanted else []
    elif seen:
        read = f"{reason}, but {seen}"
        findings = [Finding("driver", Result.CRITICAL, read, "answers", "NVIDIA", "ask_host")]
    if question.mode is not Mode.LIVE:
        findings += judge_node(
            read_node(question.runs_dir), {}, question.started, False, question.limits
        )
    return _of(question, findings)


def broken_driver(question: Question, reason: str, code: int = NO_ANSWER) -> Verdict:
    """Return the verdict on a driver that does not work. `code` is NVML's error number."""
    return _of(question, [broken(reason, code)])
