"""Define the health rules for GPUs as data, and pure functions from samples to findings.

A new rule is an entry in `RULES`: the values that it reads, a pure function that judges them, and
the modes in which it runs. If a value could not be read, the finding is NA or UNKNOWN, and the
function is not called. No rule thus passes by accident. docs/guides/health.md shows a passing and a
failing case of each rule.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from entrypoint.driver.gpus import Gpu
from entrypoint.driver.readings import Readings, Sample, Unread
from entrypoint.health.limits import SOURCES, Limits
from entrypoint.health.verdict import Finding, Mode, Result
from entrypoint.health.xids import xid_result

# NVML's error numbers, by their consequence. ABSENT has the numbers for: not supported, function
# not found, another version of a struct, deprecated.
ABSENT = frozenset({3, 13, 25, 26})
NO_PERMISSION = 4
UNKNOWN_ERROR = 999  # also reported in a container that has lost its GPUs
LOST = frozenset({15, 16})  # the GPU is lost, or must be reset first
CORRUPTED_INFOROM = 14
SLOWDOWN_WINDOW = 10  # samples
SUSTAINED_S = 5.0  # a slowdown over a shorter time is not CRITICAL
# Bits for hardware slowdown, thermal slowdown and power brake. Idle and the power cap are normal.
_HARDWARE_SLOWDOWN = 0x08 | 0x40 | 0x80
_MINUTE_S = 60.0

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Judgement:
    """The result of a rule: texts for the reading and the limit, and an action of `ACTIONS`."""

    result: Result
    read: str
    limit: str = ""
    action: str = ""


# Most rules run in all modes except LIVE and WATCH, which read only a few values. A rule that needs
# several samples does not run in the gate, which takes only one. A rule that would find the
# processes of the training does not run in the monitor.
_USUAL = frozenset({Mode.GATE, Mode.CHECK, Mode.DEEP, Mode.MONITOR})


@dataclass(frozen=True)
class Rule:
    """A health rule for one GPU.

    `judge` gets the limits, the values named in `reads`, and the values named in `also`. A value of
    `also` may be `Unread`. `modes` are the modes in which the rule runs. With `ends_a_run`, a
    CRITICAL during a training (Mode.WATCH) makes the training save and stop.
    """

    check: str
    reads: tuple[str, ...]
    judge: Callable[[Values, Limits], Judgement]
    source: str = "NVIDIA Health Validation"
    also: tuple[str, ...] = ()
    modes: frozenset[Mode] = _USUAL
    ends_a_run: bool = False


@dataclass(frozen=True)
class Selection:
    """The GPUs to judge.

    `missing` is the number of requested GPUs that were not found. `per_gpu` is the number of
    processes to start on each GPU.
    """

    gpus: tuple[Gpu, ...] = ()
    missing: int = 0
    per_gpu: int = 1


def judge(count: int, threshold: int, read: str, limit: str, bad: Result, action: str) -> Judgement:
    """Return `bad` if the count is at the threshold or above, else PASS."""
    if count >= threshold:
        return Judgement(bad, read, limit, action)
    return Judgement(Result.PASS, read, limit)


def _recovery_action(values: Values, _limits: Limits) -> Judgement:
    number = values["recovery_action"]
    known = {
        0: (Result.PASS, "none", ""),
        1: (Result.CRITICAL, "GPU reset", "reset_gpu"),
        2: (Result.CRITICAL, "node reboot", "reboot"),
        3: (Result.WARN, "drain peer-to-peer traffic", "inspect"),
        4: (Result.CRITICAL, "drain and reset", "reset_gpu"),
        5: (Result.CRITICAL, "recover the IMEX domain", "reboot"),
        6: (Result.CRITICAL, "bus reset", "reset_gpu"),
        7: (Result.CRITICAL, "system reboot", "reboot"),
    }
    result, text, action = known.get(number, (Result.WARN, "unknown to Trainbox", "inspect"))
    return Judgement(result, f"the driver recommends {number} ({text})", "0 (none)", action)


def _ecc(values: Values, limits: Limits) -> Judgement:
    count, most = values["ecc_uncorrected"], limits.ecc_uncorrected
    return judge(
        count,
        most + 1,
        f"{count} uncorrected memory errors since the driver was loaded",
        f"at most {most}",
        Result.CRITICAL,
        "reset_gpu",
    )


def _sram(values: Values, _limits: Limits) -> Judgement:
    flag = values["sram_threshold_exceeded"]
    read = "threshold exceeded" if flag else "threshold not exceeded"
    return judge(flag, 1, read, "the device's threshold of SRAM errors", Result.CRITICAL, "replace")


def _row_remap(values: Values, limits: Limits) -> Judgement:
    corrected, uncorrected, pending, failed = values["remapped_rows"]
    rows = corrected + uncorrected
    read = (
        f"{rows} rows remapped, {'one' if pending else 'none'} pending, "
        f"{'one' if failed else 'none'} failed"
    )
    limit = f"none failed, none pending, less than {limits.remapped_rows}"
    if failed:
        return Judgement(Result.CRITICAL, read, limit, "replace")
    if pending:
        return Judgement(Result(limits.remap_pending), read, limit, "reset_gpu")
    return judge(rows, limits.remapped_rows, read, limit, Result.WARN, "replace")


def _retired_pages(values: Values, limits: Limits) -> Judgement:
    pages, pending = values["retired_pages"], values["retired_pages_pending"]
    read = f"{pages} pages retired{', one pending' if pending else ''}"
    limit = f"less than {limits.retired_pages}, none pending"
    if pages < limits.retired_pages and pending:
        return Judgement(Result.WARN, read, limit, "reset_gpu")
    return judge(pages, limits.retired_pages, read, limit, Result.CRITICAL, "replace")


def _slowdown(values: Values, limits: Limits) -> Judgement:
    reasons, slow, samples, span_s = values["slowdown"]
    names = {
        0x08: "hardware slowdown",
        0x40: "hardware thermal slowdown",
        0x80: "hardware power brake",
    }
    now = ", ".join(name for bit, name in names.items() if reasons & bit) or "none"
    read = f"{now} now, in {slow} of the last {samples} samples"
    limit = (
        f"none; CRITICAL from {limits.slowdown_samples} of {SLOWDOWN_WINDOW} samples in "
        f"{SUSTAINED_S:g} s or more"
    )
    if slow >= limits.slowdown_samples and span_s >= SUSTAINED_S:
        return Judgement(Result.CRITICAL, read, limit, "cool")
    if slow:
        return Judgement(Result.WARN, read, limit, "cool")
    return Judgement(Result.PASS, read, limit)


def _temperature(values: Values, limits: Limits) -> Judgement:
    temperature, slowdown, shutdown = (
        values["temperature_c"],
        values["slowdown_c"],
        values["shutdown_c"],
    )
    working = values["working_c"]
    # On most GPUs slowdown and shutdown are 3 °C apart, so the warning is at the working limit.
    warning = slowdown if isinstance(working, Unread) else min(working, slowdown)
    read, critical = f"{temperature} °C", shutdown - limits.shutdown_margin_c
    limit = (
        f"below {warning} °C, its working limit; slowdown {slowdown} °C, CRITICAL from "
        f"{critical} °C, shutdown {shutdown} °C"
    )
    if temperature >= critical:
        return Judgement(Result.CRITICAL, read, limit, "cool")
    return judge(temperature, warning, read, limit, Result.WARN, "cool")


def _margin(values: Values, limits: Limits) -> Judgement:
    """Judge the temperature of a GPU that reports the degrees left to its working limit."""
    margin, slowdown, shutdown = (
        values["margin_c"],
        values["slowdown_margin_c"],
        values["shutdown_margin_c"],
    )
    read, critical = f"{margin} °C left", shutdown + limits.shutdown_margin_c
    limit = f"slowdown at {slowdown}, CRITICAL from {critical}, shutdown at {shutdown}"
    if margin <= critical:
        return Judgement(Result.CRITICAL, read, limit, "cool")
    return judge(-margin, -slowdown, read, limit, Result.WARN, "cool")


def _pcie_width(values: Values, _limits: Limits) -> Judgement:
    width, most = values["pcie_width"], values["pcie_max_width"]
    return judge(
        most - width,
        1,
        f"{width} lanes",
        f"{most}, the device's and the slot's",
        Result.WARN,
        "inspect",
    )


def _pcie_replays(values: Values, limits: Limits) -> Judgement:
    rate, most = values["pcie_replays_per_minute"], limits.pcie_replays_per_minute
    read, limit = f"{rate:g} replays a minute", f"at most {most:g} a minute"
    return (
        Judgement(Result.WARN, read, limit, "inspect")
        if rate > most
        else Judgement(Result.PASS, read, limit)
    )


def _nvlink(values: Values, limits: Limits) -> Judgement:
    active, peers = values["nvlink_active"], values["nvlink_peers"]
    down = [str(link) for link, state in enumerate(active) if not state]
    read, limit = f"{len(active) - len(down)} of {len(active)} links active", "all"
    if not down:
        return Judgement(Result.PASS, read, limit)
    # A card without a bridge looks the same as a card whose links have all failed.
    if len(down) == len(active):
        return Judgement(Result.WARN, f"{read}: no bridge, or all are down", limit, "inspect")
    read += f": down {', '.join(down)}"
    # Some machines do not connect all links of their GPUs, and a single GPU needs no link.
    if len(set(peers)) == 1:
        return Judgement(
            Result.WARN, f"{read}, the same number as on each GPU in use", limit, "inspect"
        )
    return Judgement(Result(limits.nvlink_inactive), read, limit, "reset_gpu")


def _nvlink_errors(values: Values, limits: Limits) -> Judgement:
    """Judge new errors by DCGM's limit; the total since the driver was loaded may be weeks old."""
    errors, risen = values["nvlink_errors"], values["nvlink_errors_risen"]
    worst = max(errors)
    where = f", {worst} on link {errors.index(worst)}" if worst else ""
    read = f"{risen} new replays and recoveries, {sum(errors)} since the driver was loaded{where}"
    limit = f"less than {limits.nvlink_errors} new on a link, none before"
    if risen >= limits.nvlink_errors:
        return Judgement(Result.CRITICAL, read, limit, "reset_gpu")
    return judge(worst, 1, read, limit, Result.WARN, "inspect")


def _nvlink_crc(values: Values, limits: Limits) -> Judgement:
    rate, most = values["nvlink_crc_per_second"], limits.nvlink_crc_per_second
    limit = f"less than {most:g} a second"
    result, action = (Result.CRITICAL, "reset_gpu") if rate >= most else (Result.PASS, "")
    return Judgement(result, f"{rate:g} CRC errors a second on the worst link", limit, action)


def _fabric(values: Values, _limits: Limits) -> Judgement:
    state, status = values["fabric"]
    name = {1: "not started", 2: "in progress", 3: "completed"}.get(state, "unknown")
    if state == 0:  # also on healthy cards without NVSwitch
        return Judgement(Result.NA, "no NVSwitch fabric")
    read = f"registration {state} ({name}), status {status}"
    good = state == 3 and status == 0
    return Judgement(
        Result.PASS if good else Result.CRITICAL,
        read,
        "3 (completed), status 0",
        "" if good else "reboot",
    )


def _inforom(values: Values, _limits: Limits) -> Judgement:
    return Judgement(Result.PASS, f"version {values['inforom']}", "intact")


def _persistence(values: Values, _limits: Limits) -> Judgement:
    on = values["persistence"]
    return judge(
        1 - on,
        1,
        "on" if on else "off: each start waits for the driver",
        "on",
        Result.WARN,
        "change_mode",
    )


def _compute_mode(values: Values, _limits: Limits) -> Judgement:
    mode, per_gpu, pids = values["compute_mode"], values["per_gpu"], values["processes"]
    processes = 0 if isinstance(pids, Unread) else len(pids)
    name = {0: "DEFAULT", 1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}.get(
        mode, str(mode)
    )
    limit = "DEFAULT"
    if mode == 2:
        return Judgement(Result.CRITICAL, name, limit, "change_mode")
    if mode in (1, 3):
        wanted = f"{name}, {processes} program(s) on the GPU, {per_gpu} to start"
        crowded = processes + per_gpu > 1
        return Judgement(Result.CRITICAL if crowded else Result.WARN, wanted, limit, "change_mode")
    return Judgement(Result.PASS, name, limit)


def _mig(values: Values, _limits: Limits) -> Judgement:
    current, pending = values["mig"]
    names = ("off", "on")
    read = (
        names[current]
        if current == pending
        else f"{names[current]}, {names[pending]} after the next reset"
    )
    return judge(int(current != pending), 1, read, "nothing pending", Result.WARN, "reset_gpu")


def _processes(values: Values, _limits: Limits) -> Judgement:
    pids = values["processes"]
    read = (
        f"{len(pids)} program(s) use the GPU: pid {', '.join(map(str, pids))}"
        if pids
        else "no program uses the GPU"
    )
    return judge(len(pids), 1, read, "none", Result.WARN, "wait")


RULES = (
    Rule(
        "recovery-action",
        ("recovery_action",),
        _recovery_action,
        modes=_USUAL | {Mode.LIVE, Mode.WATCH},
        ends_a_run=True,
    ),
    Rule(
        "ecc-uncorrected",
        ("ecc_uncorrected",),
        _ecc,
        SOURCES["ecc_uncorrected"],
        modes=_USUAL | {Mode.WATCH},
        ends_a_run=True,
    ),
    Rule("sram-threshold", ("sram_threshold_exceeded",), _sram),
    Rule(
        "row-remap",
        ("remapped_rows",),
        _row_remap,
        SOURCES["remapped_rows"],
        modes=_USUAL | {Mode.WATCH},
        ends_a_run=True,
    ),
    Rule(
        "retired-pages",
        ("retired_pages", "retired_pages_pending"),
        _retired_pages,
        SOURCES["retired_pages"],
        modes=_USUAL | {Mode.WATCH},
        ends_a_run=True,
    ),
    Rule("slowdown", ("slowdown",), _slowdown, "DCGM", modes=_USUAL | {Mode.WATCH}),
    Rule(
        "temperature",
        ("temperature_c", "slowdown_c", "shutdown_c"),
        _temperature,
        SOURCES["shutdown_margin_c"],
        also=("working_c",),
        modes=_USUAL | {Mode.WATCH},
    ),
    Rule(
        "temperature-margin",
        ("margin_c", "slowdown_margin_c", "shutdown_margin_c"),
        _margin,
        SOURCES["shutdown_margin_c"],
        modes=_USUAL | {Mode.WATCH},
    ),
    Rule("pcie-width", ("pcie_width", "pcie_max_width"), _pcie_width),
    Rule(
        "pcie-replays",
        ("pcie_replays_per_minute",),
        _pcie_replays,
        SOURCES["pcie_replays_per_minute"],
        modes=_USUAL - {Mode.GATE},
    ),
    Rule("nvlink", ("nvlink_active", "nvlink_peers"), _nvlink),
    Rule(
        "nvlink-errors",
        ("nvlink_errors", "nvlink_errors_risen"),
        _nvlink_errors,
        SOURCES["nvlink_errors"],
    ),
    Rule(
        "nvlink-crc",
        ("nvlink_crc_per_second",),
        _nvlink_crc,
        SOURCES["nvlink_crc_per_second"],
        modes=_USUAL - {Mode.GATE},
    ),
    Rule("fabric", ("fabric",), _fabric),
    Rule("inforom", ("inforom",), _inforom),
    Rule("persistence", ("persistence",), _persistence, "NVIDIA"),
    Rule(
        "compute-mode",
        ("compute_mode", "per_gpu"),
        _compute_mode,
        "CUDA",
        also=("processes",),
        modes=_USUAL - {Mode.MONITOR},
    ),
    Rule("mig", ("mig",), _mig, "NVIDIA"),
    Rule("processes", ("processes",), _processes, "Trainbox", modes=_USUAL - {Mode.MONITOR}),
)
# Values derived from several samples, and the reading that each is derived from.
_DERIVED_FROM = {
    "nvlink_errors_risen": "nvlink_errors",
    "slowdown": "clocks_event_reasons",
    "pcie_replays_per_minute": "pcie_replays",
    "nvlink_crc_per_second": "nvlink_crc",
}
_NEVER_READ = ("per_gpu", "nvlink_peers")


def rules_for(mode: Mode) -> tuple[Rule, ...]:
    """Return the rules that run in the mode."""
    return tuple(rule for rule in RULES if mode in rule.modes)


def names_to_read(rules: Sequence[Rule]) -> tuple[str, ...]:
    """Return the names of the driver's values that the rules need."""
    names = [
        _DERIVED_FROM.get(name, name)
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
    links = [readings.get("nvlink_active") for readings in samples[-1].gpus.values()]
    own = {
        "per_gpu": selection.per_gpu,
        "nvlink_peers": tuple(sum(each) for each in links if isinstance(each, tuple)),
    }
    return [
        replace(finding, gpu=gpu.label, uuid=gpu.uuid)
        for gpu in selection.gpus
        for finding in _judge_gpu(samples, gpu, own, rules, limits)
    ]


def _judge_gpu(
    samples: Sequence[Sample], gpu: Gpu, own: Values, rules: Sequence[Rule], limits: Limits
) -> list[Finding]:
    """Return the findings on one GPU. If the GPU does not answer, there is only one."""
    # A GPU that cannot be used, or that the driver has lost, has no values to judge.
    uuid = gpu.mig_parent or gpu.uuid
    if gpu.fault and gpu.fault_code is None:
        return [
            Finding(
                "handle",
                Result.CRITICAL,
                gpu.fault,
                limit="usable",
                source="CUDA",
                action="use_others",
            )
        ]
    readings: Readings = (
        {"handle": Unread(gpu.fault_code, gpu.fault)}
        if gpu.fault and gpu.fault_code
        else samples[-1].gpus[uuid]
    )
    broken = [
        value for value in readings.values() if isinstance(value, Unread) and value.code in LOST
    ]
    handle = broken[0] if broken else readings["handle"]
    if isinstance(handle, Unread):
        return [_error_finding("handle", handle, "the GPU answers")]
    # Apply each rule to the newest values and the derived ones.
    values = dict(readings) | _derived(samples, uuid) | dict(own)
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
        return Finding(
            check, Result.CRITICAL, read, limit=limit, source="NVIDIA", action="reset_gpu"
        )
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
    return Finding(
        rule.check,
        found.result,
        found.read,
        limit=found.limit,
        source=rule.source,
        action=found.action,
    )


def _unread(rule: Rule, errors: Sequence[Unread]) -> Finding:
    """Return the finding for the most severe error among the values of a rule."""
    error = max(errors, key=lambda error: (error.code not in ABSENT, error.code != NO_PERMISSION))
    if error.code == CORRUPTED_INFOROM:
        return Finding(
            rule.check, Result.WARN, str(error), limit="intact", source="NVIDIA", action="inspect"
        )
    return replace(
        _error_finding(rule.check, error), source="" if error.code in ABSENT else rule.source
    )


def _xid_findings(samples: Sequence[Sample], uuid: str, values: Values) -> list[Finding]:
    """Return one finding for each Xid, or a PASS. Return nothing if Xids were not collected."""
    events = values.get("events")
    if events is None:
        return []
    if isinstance(events, Unread):
        result = Result.NA if events.code in ABSENT else Result.UNKNOWN
        return [Finding("xid", result, str(events), optional=events.code == NO_PERMISSION)]
    seen = dict.fromkeys(xid for sample in samples for owner, xid in sample.xids if owner == uuid)
    return [_xid_finding(xid) for xid in seen] or [
        Finding("xid", Result.PASS, "none since the first sample")
    ]


def _xid_finding(xid: int) -> Finding:
    result, meaning, action = xid_result(xid)
    return Finding(
        "xid", result, f"Xid {xid}: {meaning}", source="NVIDIA's Xid catalogue", action=action
    )


def _derived(samples: Sequence[Sample], uuid: str) -> dict[str, Any]:
    """Return the values that need several samples.

    A value is unread if the newest sample does not have its reading.
    """
    derived: dict[str, Any] = {}
    for name, origin in _DERIVED_FROM.items():
        series = [
            (sample.time_s, value)
            for sample in samples
            if (value := sample.gpus.get(uuid, {}).get(origin)) is not None
        ]
        if not series:
            continue
        newest = series[-1][1]
        read = [(time_s, value) for time_s, value in series if not isinstance(value, Unread)]
        derived[name] = newest if isinstance(newest, Unread) else _DERIVE[name](read)
    return derived


def _slow_samples(series: Sequence[tuple[float, Any]]) -> tuple[int, int, int, float]:
    """Return the newest reasons, the slow samples, all samples, and their time span in seconds."""
    recent = series[-SLOWDOWN_WINDOW:]
    slow = sum(bool(reasons & _HARDWARE_SLOWDOWN) for _, reasons in recent)
    return recent[-1][1], slow, len(recent), recent[-1][0] - recent[0][0]


def _per_minute(series: Sequence[tuple[float, Any]]) -> float:
    return round(_rise(series, lambda value: value) * _MINUTE_S, 1)


def _worst_per_second(series: Sequence[tuple[float, Any]]) -> float:
    links = range(len(series[-1][1]))
    return round(max(_rise(series, lambda value, link=link: value[link]) for link in links), 1)  # type: ignore[misc]


def _worst_rise(series: Sequence[tuple[float, Any]]) -> int:
    """Return the largest rise of any link over the window."""
    return int(
        max(0, *(last - first for first, last in zip(series[0][1], series[-1][1], strict=False)))
    )


def _rise(series: Sequence[tuple[float, Any]], of: Callable[[Any], int]) -> float:
    """Return the rise per second over the window.

    After a reset of the GPU and of its counters, the rise is 0.
    """
    (begin_s, first), (end_s, last) = series[0], series[-1]
    return max(0, of(last) - of(first)) / (end_s - begin_s) if end_s > begin_s else 0.0


_DERIVE: dict[str, Callable[[Sequence[tuple[float, Any]]], Any]] = {
    "slowdown": _slow_samples,
    "pcie_replays_per_minute": _per_minute,
    "nvlink_crc_per_second": _worst_per_second,
    "nvlink_errors_risen": _worst_rise,
}


def judge_driver(sample: Sample) -> list[Finding]:
    """Return one finding on whether the driver answered."""
    if sample.fault is None:
        return [Finding("driver", Result.PASS, f"version {sample.driver.get('driver_version')}")]
    action = driver_action(sample.fault.code)
    return [
        Finding(
            "driver",
            Result.CRITICAL,
            str(sample.fault),
            limit="answers",
            source="NVIDIA",
            action=action,
        )
    ]


def driver_action(code: int) -> str:
    """Return the action for a driver that fails with this NVML error number."""
    return {UNKNOWN_ERROR: "recreate_container", NO_PERMISSION: "grant"}.get(code, "reboot")


def judge_count(selection: Selection, wanted: str) -> list[Finding]:
    """Return one finding on whether the requested GPUs were found.

    `wanted` is the option that requested the GPUs, or empty.
    """
    found = len(selection.gpus)
    read = f"{found} of {found + selection.missing} GPUs requested" if wanted else f"{found} GPUs"
    if selection.missing:
        return [
            Finding("count", Result.CRITICAL, read, limit=wanted, source="you", action="use_others")
        ]
    return [Finding("count", Result.PASS, read, limit=wanted, source="you" if wanted else "")]


def judge_mixture(sample: Sample, selection: Selection) -> list[Finding]:
    """Return findings on differences between GPUs that train together."""
    readings = {
        gpu.mig_parent or gpu.uuid: sample.gpus.get(gpu.mig_parent or gpu.uuid, {})
        for gpu in selection.gpus
    }
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
            findings.append(
                Finding(
                    f"same-{name}",
                    result,
                    read,
                    limit="the same on all",
                    source="Trainbox",
                    action=action,
                )
            )
    return findings
