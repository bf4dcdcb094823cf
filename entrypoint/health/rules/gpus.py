"""List all health rules for GPUs, and apply them to samples. Pure.

A new rule is an entry of `RULES` in the module of its topic: the values that it reads, a pure
function that judges them, and the modes in which it runs. If a value could not be read, the finding
is NA or UNKNOWN, and the function is not called. No rule thus passes by accident.
tests/support/health_cases.py has a passing and a failing case of each rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from entrypoint.driver.gpus import NOT_NVML, Gpu, Readings, Sample, Unread
from entrypoint.health.limits import Limits
from entrypoint.health.rules import heat, links, memory, settings
from entrypoint.health.rules.rule import DERIVED_FROM, Rule, Values, derived
from entrypoint.health.verdict import Finding, Mode, Result
from entrypoint.health.xids import xid_result

# NVML's error numbers, by their consequence. ABSENT has the numbers for: not supported, function
# not found, another version of a struct, deprecated.
ABSENT = frozenset({3, 13, 25, 26})
NO_PERMISSION = 4
UNKNOWN_ERROR = 999  # also reported in a container that has lost its GPUs
LOST = {15: "reboot", 16: "reset_gpu"}  # the GPU is lost, or must be reset first
CORRUPTED_INFOROM = 14

RULES = (*memory.RULES, *heat.RULES, *links.RULES, *settings.RULES)
# Values from `_of_all`, which are not read from the driver.
_NEVER_READ = ("per_gpu", "gpus_in_use", "nvlink_peers", "nvswitch")


@dataclass(frozen=True)
class Selection:
    """The GPUs to judge.

    `missing` is the number of requested GPUs that were not found. `per_gpu` is the number of
    processes to start on each GPU.
    """

    gpus: tuple[Gpu, ...] = ()
    missing: int = 0
    per_gpu: int = 1


def rules_for(mode: Mode) -> tuple[Rule, ...]:
    """Return the rules that run in the mode."""
    return tuple(rule for rule in RULES if mode in rule.modes)


def names_to_read(rules: Sequence[Rule]) -> tuple[str, ...]:
    """Return the names of the driver's values that the rules need."""
    names = [
        DERIVED_FROM.get(name, name)
        for rule in rules
        for name in (*rule.reads, *rule.also)
        if name not in _NEVER_READ
    ]
    return tuple(dict.fromkeys(names))


def judge_gpus(
    samples: Sequence[Sample], selection: Selection, rules: Sequence[Rule], limits: Limits
) -> list[Finding]:
    """Return the findings on each GPU.

    `samples` has at least one sample, in the order of time. Rates and sustained states use all
    samples, and other rules use the newest.
    """
    own = _of_all(samples[-1], selection)
    return [
        replace(finding, gpu=gpu.label, uuid=gpu.uuid)
        for gpu in selection.gpus
        for finding in _judge_gpu(samples, gpu, own, rules, limits)
    ]


def _of_all(sample: Sample, selection: Selection) -> Values:
    """Return the values that do not belong to one GPU, such as the state of all GPUs' NVLinks."""
    links = [readings.get("nvlink_active") for readings in sample.gpus.values()]
    return {
        "per_gpu": selection.per_gpu,
        "gpus_in_use": len({gpu.whole_uuid for gpu in selection.gpus}),
        "nvlink_peers": tuple(each for each in links if isinstance(each, tuple)),
        "nvswitch": any(_has_nvswitch(readings) for readings in sample.gpus.values()),
    }


def _has_nvswitch(readings: Readings) -> bool:
    fabric = readings.get("fabric")
    return readings.get("nvlink_switch") == 1 or (isinstance(fabric, tuple) and fabric[0] > 0)


def _judge_gpu(
    samples: Sequence[Sample], gpu: Gpu, own: Values, rules: Sequence[Rule], limits: Limits
) -> list[Finding]:
    """Return the findings on one GPU. If the GPU does not answer, there is only one."""
    # A GPU that cannot be used, or that the driver has lost, has no values to judge.
    uuid = gpu.whole_uuid
    if gpu.fault and gpu.fault.code == NOT_NVML:
        read = str(gpu.fault)
        return [Finding("handle", Result.CRITICAL, read, "usable", "CUDA", "use_others")]
    readings: Readings = {"handle": gpu.fault} if gpu.fault else samples[-1].of(gpu)
    broken = [
        value for value in readings.values() if isinstance(value, Unread) and value.code in LOST
    ]
    handle = broken[0] if broken else readings["handle"]
    if isinstance(handle, Unread):
        return [_error_finding("handle", handle, "the GPU answers")]
    # Apply each rule to the newest values and the derived ones.
    values = dict(readings) | derived(samples, uuid) | dict(own)
    findings = [_apply(rule, values, limits) for rule in rules]
    return [
        Finding("handle", Result.PASS, "answers"),
        *findings,
        *_xid_findings(samples, uuid, values),
    ]


def _error_finding(check: str, error: Unread, limit: str = "") -> Finding:
    """Return the finding for a value that could not be read.

    The result is NA for a value that the hardware does not have, CRITICAL for a lost GPU, else
    UNKNOWN.
    """
    read = str(error)
    if error.code in ABSENT:
        return Finding(check, Result.NA, read)
    if error.code in LOST:
        return Finding(check, Result.CRITICAL, read, limit, "NVIDIA", LOST[error.code])
    if error.code == NO_PERMISSION:
        return Finding(check, Result.UNKNOWN, read, limit=limit, action="grant", optional=True)
    action = (
        "recreate_container" if error.code == UNKNOWN_ERROR and check == "handle" else "ask_host"
    )
    return Finding(check, Result.UNKNOWN, read, limit=limit, action=action)


def _apply(rule: Rule, values: Values, limits: Limits) -> Finding:
    """Return the finding of a rule, which is not judged if one of its values could not be read."""
    missing = [value for name in rule.reads if isinstance(value := values[name], Unread)]
    if missing:
        return _unread(rule, missing)
    found = rule.judge(values, limits)
    judged = rule.check, found.result, found.read
    return Finding(*judged, found.limit, rule.source, found.action)


def _unread(rule: Rule, errors: Sequence[Unread]) -> Finding:
    """Return the finding for the most severe error among the values of a rule."""
    error = max(errors, key=lambda error: (error.code not in ABSENT, error.code != NO_PERMISSION))
    if error.code == CORRUPTED_INFOROM:
        return Finding(rule.check, Result.WARN, str(error), "intact", "NVIDIA", "inspect")
    found = _error_finding(rule.check, error)
    return replace(
        found,
        source="" if error.code in ABSENT else rule.source,
        optional=found.optional or not rule.unknown_closes,
    )


def _xid_findings(samples: Sequence[Sample], uuid: str, values: Values) -> list[Finding]:
    """Return one finding for each Xid, or a PASS. Return nothing if Xids were not collected."""
    events = values.get("events")
    if events is None:
        return []
    if isinstance(events, Unread):
        result = Result.NA if events.code in ABSENT else Result.UNKNOWN
        return [Finding("xid", result, str(events), optional=True, action="ask_host")]
    seen = dict.fromkeys(xid for sample in samples for owner, xid in sample.xids if owner == uuid)
    links = values.get("nvlink_active")
    down = isinstance(links, tuple) and 0 in links
    source = "NVIDIA's Xid catalogue"
    return [
        Finding("xid", result, f"Xid {xid}: {meaning}", source=source, action=action)
        for xid in seen
        for result, meaning, action in [xid_result(xid, down)]
    ] or [Finding("xid", Result.PASS, "none since the first sample")]
