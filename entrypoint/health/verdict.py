"""Define the findings of checks, the verdict that follows from them, and its text. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

SCHEMA_VERSION = 1  # the version of docs/reference/health.schema.json, for Verdict.to_json


class Result(StrEnum):
    """The result of a check (docs/guides/health.md)."""

    PASS = "PASS"  # noqa: S105 - no password
    INFO = "INFO"
    NA = "NA"
    WARN = "WARN"
    UNKNOWN = "UNKNOWN"
    CRITICAL = "CRITICAL"


# The result of a verdict is the worst of its findings. NA, a feature that the hardware does not
# have, never makes it worse. Prometheus alerts compare these numbers: from 3 on, a run must not
# start.
LEVELS = {
    Result.NA: -1,
    Result.PASS: 0,
    Result.INFO: 1,
    Result.WARN: 2,
    Result.UNKNOWN: 3,
    Result.CRITICAL: 4,
}


class Mode(StrEnum):
    """The purpose of an examination, which selects the rules that run."""

    CHECK = "check"
    GATE = "gate"
    MONITOR = "monitor"
    LIVE = "live"
    DEEP = "deep"
    WATCH = "watch"  # during a training: findings without a verdict

    @property
    def unknown_closes(self) -> bool:
        """Return whether an UNKNOWN prevents the start of a run. It never ends a run."""
        return self not in (Mode.MONITOR, Mode.LIVE)


@dataclass(frozen=True)
class Finding:
    """The result of one check on a GPU, between several GPUs, or on the node.

    `read` describes the reading. `limit` is the limit for it, and `source` is the origin of the
    limit. `action` is a name in `ACTIONS`, or "". Between GPUs, `gpu` is a label such as `0+1`, and
    `uuid` is None. On the node, `gpu` and `uuid` are None. `optional` marks an UNKNOWN that does
    not close the gate: because a permission is missing, or because of the rule.
    """

    check: str
    result: Result
    read: str
    limit: str = ""
    source: str = ""
    action: str = ""
    gpu: str | None = None
    uuid: str | None = None
    optional: bool = False

    @property
    def subject(self) -> str:
        """Return `node`, or `GPU` with its label."""
        return "node" if self.gpu is None else f"GPU {self.gpu}"

    @property
    def line(self) -> str:
        """Return the whole finding as a line for a log."""
        source = f" ({self.source})" if self.source else ""
        limit = f"; limit: {self.limit}{source}" if self.limit else ""
        where = f"{self.subject} ({self.uuid})" if self.uuid else self.subject
        return (
            f"{where}: {self.check} {self.result}: "
            f"{self.read}{limit}{f' -> {self.advice}' if self.action else ''}"
        )

    @property
    def advice(self) -> str:
        """Return the action with its description, or an empty text."""
        # nvidia-smi takes several GPUs with commas. A MIG device is reset with its whole GPU.
        gpus = ",".join(label.partition(":")[0] for label in (self.gpu or "").split("+"))
        return f"{self.action}: {ACTIONS[self.action].format(gpu=gpus)}" if self.action else ""


ACTIONS = {
    "reset_gpu": "stop what runs on the GPU, then `nvidia-smi --gpu-reset -i {gpu}` as root",
    "reboot": "drain the node and reboot it",
    "replace": "take the GPU out of service and replace it",
    "drain": "take the node out of service and test its memory and CPUs",
    "restart_app": "start the program again: the same command resumes from the newest checkpoint",
    "recreate_container": "remove the container and start a new one; a daemon reload takes the "
    "GPUs from a running one",
    "update_driver": "install a newer driver, or use an image built for its CUDA version",
    "change_torch": "use other GPUs, or an image whose torch is built for this architecture",
    "cool": "check the fans, the air flow and the power supply",
    "inspect": "inspect the GPU when convenient; the run may start",
    "ask_host": "run `nvidia-smi -q` on the host: if it fails too, reboot",
    "give_gpus": "install the driver on the host; in a container, also use the NVIDIA container "
    "toolkit and --gpus all",
    "use_others": "name other GPUs with --gpu-ids, or request fewer",
    "wait": "let the other program end, or use other GPUs",
    "change_mode": "set it as root with `nvidia-smi`: -pm 1 (persistence), -c 0 (compute mode)",
    "enable_ecc": "`nvidia-smi -i {gpu} -e 1` as root, then reset the GPU",
    "grant": "grant the container or the user permission to read it",
    "make_room": "give the container more of it: --shm-size, --memory, --cpus, or a larger disk",
    "install_infiniband": "install libibverbs1 and ibverbs-providers (Debian, Ubuntu), or use the "
    "image, which has them",
    "not_required": "use other hardware, or leave the check out of --require",
    "fix_mount": "mount a folder that this user may write to, or set --user",
}


@dataclass(frozen=True)
class Verdict:
    """All findings of an examination, and whether a run may start or continue.

    A check in `required` must have a result: NA becomes UNKNOWN, and UNKNOWN closes the gate in
    each mode. `overridden` has the limits that differ from the defaults.
    """

    mode: Mode
    findings: tuple[Finding, ...]
    gpus: tuple[dict[str, Any], ...] = ()
    driver_version: str | None = None
    required: tuple[str, ...] = ()
    overridden: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        findings = (
            replace(finding, result=Result.UNKNOWN, action=finding.action or "not_required")
            if finding.result is Result.NA and finding.check in self.required
            else finding
            for finding in self.findings
        )
        object.__setattr__(self, "findings", tuple(findings))

    @property
    def result(self) -> Result:
        """Return the worst result of the findings."""
        return worst(finding.result for finding in self.findings)

    @property
    def closing(self) -> tuple[Finding, ...]:
        """Return the findings because of which a run must not start, or must end."""
        return tuple(finding for finding in self.findings if self._closes(finding))

    def _closes(self, finding: Finding) -> bool:
        """Return whether a run must not start because of `finding`."""
        closes = not finding.optional and self.mode.unknown_closes
        return finding.result is Result.CRITICAL or (
            finding.result is Result.UNKNOWN and (closes or finding.check in self.required)
        )

    @property
    def open(self) -> bool:
        """Return whether a run may start."""
        return not self.closing

    @property
    def exit_code(self) -> int:
        """Return 0 for open and 1 for closed. Code 2 means that the examination itself failed."""
        return 0 if self.open else 1

    @property
    def stub(self) -> bool:
        """Return whether the driver is the stub of the tests."""
        return (self.driver_version or "").endswith("(stub)")

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints (docs/reference/health.schema.json)."""
        return {
            "schema_version": SCHEMA_VERSION,
            "mode": str(self.mode),
            "result": str(self.result),
            "open": self.open,
            "driver_version": self.driver_version,
            "stub": self.stub,
            "required": list(self.required),
            "limits_overridden": self.overridden or {},
            "gpus": list(self.gpus),
            "findings": [self._finding_to_json(finding) for finding in self.findings],
        }

    def _finding_to_json(self, finding: Finding) -> dict[str, Any]:
        fields = asdict(finding) | {"result": str(finding.result), "advice": finding.advice}
        del fields["optional"]
        return fields | {"closes": self._closes(finding)}


def worst(results: Iterable[Result]) -> Result:
    """Return the most severe of `results`, or PASS without results."""
    return max((Result.PASS, *(r for r in results if r is not Result.NA)), key=LEVELS.__getitem__)


def by_weight(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings with the most severe first, otherwise in their order."""
    return sorted(findings, key=lambda finding: -LEVELS[finding.result])


# A verdict as text for one screen.

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
