"""The report of `trainbox doctor` as text. Pure.

The headings and indented rows keep their form when they are pasted into an issue.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from entrypoint.doctor.redaction import Hidden, redacted, shown_environment
from entrypoint.doctor.surroundings import Surroundings
from entrypoint.driver.gpus import Detection, Gpu
from entrypoint.health.verdict import Finding, Result, Verdict, by_weight, closing_line

_REPORTED = (Result.CRITICAL, Result.UNKNOWN, Result.WARN)
_LONGEST_PROBLEM = 800  # characters; the remedy at the end must not be cut off
_NEEDED = re.compile(r"nvidia(?:ctl|-uvm|\d+)")  # devices for computing; others are for screens


@dataclass(frozen=True)
class TorchAnswer:
    """The answers of torch, as trainer/programs/machine/torch_info.py prints them.

    Attributes:
        fault: why torch did not answer, or empty.
        error: why torch or CUDA does not start, or empty.
    """

    fault: str = ""
    error: str = ""
    warnings: Sequence[str] = ()
    version: str = ""
    cuda: str | None = None
    libcuda: str = ""
    count: int = 0


@dataclass(frozen=True)
class Examination:
    """The values of a report.

    Attributes:
        visible: the GPUs that CUDA_VISIBLE_DEVICES selects.
        collected: the lines of `python -m torch.utils.collect_env`, or why it has no output.
    """

    taken_at: str
    verdict: Verdict
    driver: Detection
    visible: tuple[Gpu, ...]
    torch: TorchAnswer
    around: Surroundings
    collected: Sequence[str]
    env: Mapping[str, str]
    hidden: Hidden


def report(seen: Examination) -> str:
    """Return the whole report. Private text is removed from each value of another program."""
    lines = [
        f"trainbox {seen.around.trainbox}, {seen.taken_at}. Names, home folders and values that "
        "look like secrets are removed. Read the report before you paste it.",
        "",
        "## verdict",
        closing_line(seen.verdict),
        *(f"- {line}" for line in finding_lines(seen.verdict.findings, seen.hidden)),
        *(f"- {redacted(line, seen.hidden, _LONGEST_PROBLEM)}" for line in problems(seen)),
    ]
    environment = shown_environment(seen.env, seen.hidden)
    width = max((len(name) for name, _ in environment), default=0)
    lines += ["", "## environment", *(f"    {name:<{width}}  {row}" for name, row in environment)]
    collected = (redacted(line, seen.hidden) for line in seen.collected)
    return "\n".join([*lines, "", "## torch.utils.collect_env", *(f"    {c}" for c in collected)])


def finding_lines(findings: Iterable[Finding], hidden: Hidden) -> list[str]:
    """Return a line for each finding that did not pass. GPUs with the same finding share a line."""
    alike: dict[Finding, list[str]] = {}
    for finding in by_weight([finding for finding in findings if finding.result in _REPORTED]):
        alike.setdefault(dataclasses.replace(finding, gpu=None, uuid=None), []).append(
            finding.gpu or ""
        )
    return [
        dataclasses.replace(
            finding,
            gpu=",".join(gpus) or None,
            read=redacted(finding.read, hidden),
            limit=redacted(finding.limit, hidden),
        ).line
        for finding, gpus in alike.items()
    ]


def problems(seen: Examination) -> list[str]:
    """Return the problems that no check of the verdict covers, each with its remedy."""
    around = seen.around
    found = [difference(seen), *seen.torch.warnings]
    if seen.driver.absent and around.kernel_module:
        found.append(_gpus_not_given(around))
    return [line for line in found if line]


def difference(seen: Examination) -> str:
    """Return the likely reason why torch does not see the visible GPUs, or "" if it does."""
    answer, driver, visible = seen.torch, seen.driver, len(seen.visible)
    if answer.fault:
        return f"torch {answer.fault}"
    if not answer.version:
        return f"torch cannot be used: {answer.error}"
    if answer.count == visible:
        return ""
    left = "" if visible == len(driver.gpus) else f", CUDA_VISIBLE_DEVICES leaves {visible}"
    counts = f"{len(driver.gpus)} GPU{'s' if len(driver.gpus) != 1 else ''}{left}"
    return f"driver sees {counts}, torch sees {answer.count}: {_reason(seen)}"


def _reason(seen: Examination) -> str:
    answer, visible, devices = seen.torch, seen.visible, seen.around.devices
    too_old = any(
        finding.check == "cuda" and finding.result is Result.CRITICAL
        for finding in seen.verdict.findings
    )
    needed = [name for name in devices if _NEEDED.fullmatch(name)]
    closed = [f"/dev/{name}" for name in needed if devices[name] != "rw"]
    reasons = {
        "Trainbox plans with the driver's list; start the container with "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility": (answer.count > len(visible)),
        f"torch {answer.version} is built without CUDA; install the version in requirements.lock": (
            answer.cuda is None
        ),
        "CUDA shows a process only one MIG slice, so this is correct": (
            answer.count == 1 and any(gpu.mig_index is not None for gpu in visible)
        ),
        f"this driver is too old for torch's CUDA {answer.cuda}; see above": too_old,
        f"the driver's CUDA library is missing ({answer.libcuda}); start the container with --gpus "
        "all and NVIDIA_DRIVER_CAPABILITIES=compute,utility, or install libcuda1 on the "
        "host": answer.libcuda,
        f"this user may not read and write {' '.join(closed)}; grant the access, or pass the "
        "devices to the container": closed,
        "/dev/nvidia-uvm is missing; pass this device to the container, or load the kernel module "
        "nvidia_uvm on the host": (
            devices and "nvidia-uvm" not in devices and "dxg" not in devices
        ),
        "CUDA may interpret CUDA_VISIBLE_DEVICES differently; unset it and try again": (
            "CUDA_VISIBLE_DEVICES" in seen.env
        ),
        f"{answer.error or 'no reason given'}; recreate the container, and run `nvidia-smi` in it "
        "and on the host": True,
    }
    return next(text for text, applies in reasons.items() if applies)


def _gpus_not_given(around: Surroundings) -> str:
    reason = (
        "this container has no access to it: start it with --gpus all (it needs "
        "nvidia-container-toolkit on the host)"
        if around.signs
        else "its libraries are missing: install the driver's user-space packages, such as "
        "libnvidia-compute"
    )
    return f"the host runs NVIDIA driver {around.kernel_module}, but {reason}"
