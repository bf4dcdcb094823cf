"""Judge the driver, the number of GPUs, and differences between them. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from entrypoint.driver.gpus import Gpu, Sample, Unread
from entrypoint.health.rules.gpus import NO_PERMISSION, UNKNOWN_ERROR, Selection
from entrypoint.health.verdict import Finding, Result
from trainbox.processes.architectures import without_code


def judge_driver(sample: Sample) -> list[Finding]:
    """Return one finding on whether the driver answered."""
    if sample.fault is None:
        return [Finding("driver", Result.PASS, f"version {sample.driver.get('driver_version')}")]
    return [broken(str(sample.fault), sample.fault.code)]


def broken(read: str, code: int) -> Finding:
    """Return the finding on a driver that fails with this NVML error number."""
    actions = {UNKNOWN_ERROR: "recreate_container", NO_PERMISSION: "grant"}
    action = actions.get(code, "reboot")
    return Finding("driver", Result.CRITICAL, read, "answers", "NVIDIA", action)


def judge_count(selection: Selection, wanted: str) -> list[Finding]:
    """Return one finding on whether the requested GPUs were found.

    `wanted` is the option that requested the GPUs, or empty.
    """
    found = len(selection.gpus)
    read = f"{found} of {found + selection.missing} GPUs requested" if wanted else f"{found} GPUs"
    if selection.missing:
        return [Finding("count", Result.CRITICAL, read, wanted, "you", "use_others")]
    return [Finding("count", Result.PASS, read, wanted, "you" if wanted else "")]


def judge_mixture(sample: Sample, selection: Selection) -> list[Finding]:
    """Return findings on differences between GPUs that train together."""
    readings = {gpu.whole_uuid: sample.gpus.get(gpu.whole_uuid, {}) for gpu in selection.gpus}
    if len(readings) < 2:
        return []
    findings = []
    for name in ("name", "vbios"):
        values = {
            str(value)
            for each in readings.values()
            if not isinstance(value := each.get(name), Unread | None)
        }
        result, action = (Result.WARN, "inspect") if len(values) > 1 else (Result.PASS, "")
        if values:
            read = ", ".join(sorted(values))
            same = f"same-{name}", result, read
            findings.append(Finding(*same, "the same on all", "Trainbox", action))
    return findings


def judge_uuids(selection: Selection) -> list[Finding]:
    """Return one finding on whether each GPU has a UUID of its own, by which CUDA finds it."""
    by_uuid: dict[str, list[str]] = {}
    for gpu in selection.gpus:
        by_uuid.setdefault(gpu.uuid, []).append(gpu.label)
    equal = [f"GPU {' '.join(labels)}" for labels in by_uuid.values() if len(labels) > 1]
    if len(selection.gpus) < 2:
        return []
    if not equal:
        return [Finding("unique-uuid", Result.PASS, f"{len(by_uuid)} UUIDs")]
    read = f"the same UUID: {', '.join(equal)}; CUDA would use one of them only"
    limit = "one UUID for each GPU"
    return [Finding("unique-uuid", Result.CRITICAL, read, limit, "CUDA", "use_others")]


def judge_architectures(architectures: Sequence[str], selection: Selection) -> list[Finding]:
    """Return a finding for each GPU on whether torch has code for it.

    `architectures` has the GPU architectures that the installed torch is built for. It is empty if
    they are not known.
    """
    return [
        replace(_judge_architecture(architectures, gpu), gpu=gpu.label, uuid=gpu.uuid)
        for gpu in selection.gpus
    ]


def _judge_architecture(architectures: Sequence[str], gpu: Gpu) -> Finding:
    if not architectures:
        read = "the architectures that torch is built for are not known, as without CUDA"
        return Finding("architecture", Result.NA, read)
    if gpu.capability is None:
        read = "the driver does not report the compute capability"
        return Finding("architecture", Result.NA, read)
    if reason := without_code(gpu.capability, architectures):
        read = f"torch has no code for this GPU: {reason}"
        limit = "an architecture that torch is built for"
        return Finding("architecture", Result.CRITICAL, read, limit, "CUDA", "change_torch")
    major, minor = gpu.capability
    read = f"compute capability {major}.{minor}, torch is built for {' '.join(architectures)}"
    return Finding("architecture", Result.PASS, read)
