"""A verdict as text for one screen. Pure."""

from collections.abc import Iterable, Sequence

from entrypoint.health.verdict import Finding, Result, Verdict, by_weight, worst

_SHOWN_BELOW = (Result.CRITICAL, Result.UNKNOWN, Result.WARN, Result.INFO)


def screen(verdict: Verdict) -> str:
    """Return the whole screen.

    It has rows for each GPU, the node and the tests of --deep. The findings that did not pass
    follow, then the checks that are not supported here.
    """
    lines = [f"NVIDIA driver {verdict.driver_version}"] if verdict.driver_version else []
    if verdict.stub:
        lines.append(
            "This is a test stub of NVML, not a driver: the results describe no real hardware."
        )
    width = max((len(gpu["gpu"]) for gpu in verdict.gpus), default=0) + 2
    lines += [_gpu_row(gpu, verdict, width) for gpu in verdict.gpus]
    deep = [finding for finding in verdict.findings if finding.check.startswith("deep")]
    node = [finding for finding in verdict.findings if finding.gpu is None and finding not in deep]
    shown_above = ("driver", "count", "unique-uuid", "same-name", "same-vbios")
    passed = (f.read for f in node if f.result is Result.PASS and f.check not in shown_above)
    lines.append(f"{'node':<7}{worst(f.result for f in node):<9} {'; '.join(passed)}")
    lines += _deep_rows(deep)
    for finding in by_weight(verdict.findings):
        if finding.result in _SHOWN_BELOW:
            lines += ["", *_explained(finding)]
    if absent := grouped(f for f in verdict.findings if f.result is Result.NA):
        lines += ["", f"not supported by this hardware or driver: {absent}"]
    if verdict.overridden:
        changed = (
            f"{name} {limit['value']} (default {limit['usual']})"
            for name, limit in verdict.overridden.items()
        )
        lines += ["", f"limits overridden: {', '.join(changed)}"]
    return "\n".join([*lines, "", closing_line(verdict)])


def closing_line(verdict: Verdict) -> str:
    """Return the verdict in one line."""
    gpus = f"{len(verdict.gpus)} GPU{'s' if len(verdict.gpus) != 1 else ''}"
    if verdict.open:
        warned = grouped(f for f in verdict.findings if f.result in (Result.WARN, Result.UNKNOWN))
        return f"OPEN, {verdict.result}: {gpus}{f'; {warned}' if warned else ''}"
    return f"CLOSED, {verdict.result}: {gpus}; {grouped(verdict.closing)}"


def grouped(findings: Iterable[Finding]) -> str:
    """Return text such as `ecc-uncorrected (GPU 1), persistence (GPU 0 1 2), shm (node)`."""
    by_check: dict[str, list[str]] = {}
    for finding in findings:
        gpus = by_check.setdefault(finding.check, [])
        if finding.gpu not in gpus:
            gpus.append(finding.gpu or "")
    return ", ".join(
        f"{check} (GPU {' '.join(gpus)})" if any(gpus) else f"{check} (node)"
        for check, gpus in by_check.items()
    )


def _gpu_row(gpu: dict[str, object], verdict: Verdict, width: int) -> str:
    own = [finding.result for finding in verdict.findings if finding.gpu == gpu["gpu"]]
    figures = [f"{gpu['memory_mib']:,} MiB"] if gpu["memory_mib"] else []
    units = {"temperature_c": "°C", "utilization_percent": "%", "power_w": "W"}
    figures += [f"{gpu[name]} {unit}" for name, unit in units.items() if name in gpu]
    return (
        f"GPU {gpu['gpu']:<{width}}{worst(own):<9} {gpu['name']}, {', '.join(figures)}  "
        f"{gpu['uuid']}"
    )


def _deep_rows(findings: Sequence[Finding]) -> list[str]:
    """Return a row with the summary of --deep and one for each passed test; none without --deep."""
    if not findings:
        return []
    (summary,) = (finding.read for finding in findings if finding.check == "deep")
    tests = [
        finding for finding in findings if finding.check != "deep" and finding.result is Result.PASS
    ]
    rows = [
        f"{f.check.removeprefix('deep-'):<11}{f'{f.subject}: ' if f.gpu else ''}{f.read}"
        for f in tests
    ]
    return [
        f"{'deep':<7}{worst(f.result for f in findings):<9} {summary}",
        *(f"       {row}" for row in rows),
    ]


def _explained(finding: Finding) -> list[str]:
    source = f" ({finding.source})" if finding.source else ""
    where = f"{finding.subject}, {finding.uuid}" if finding.uuid else finding.subject
    lines = [f"{finding.result:<9} {finding.check} on {where}", f"          read   {finding.read}"]
    lines += [f"          limit  {finding.limit}{source}"] if finding.limit else []
    return [*lines, f"          do     {finding.advice}"] if finding.action else lines
