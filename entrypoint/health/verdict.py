"""What a check found, and what all checks together decide: pure values."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

SCHEMA_VERSION = 1  # of Verdict.to_json; docs/health.schema.json


class Result(StrEnum):
    """What a check came to; docs/health.md tells them apart."""

    PASS = "PASS"  # noqa: S105 - no password
    INFO = "INFO"
    NA = "NA"
    WARN = "WARN"
    UNKNOWN = "UNKNOWN"
    CRITICAL = "CRITICAL"


# The worst of all findings is the verdict's; what is not there on this hardware makes nothing
# worse.
_WEIGHT = {
    Result.NA: 0,
    Result.PASS: 1,
    Result.INFO: 2,
    Result.WARN: 3,
    Result.UNKNOWN: 4,
    Result.CRITICAL: 5,
}


class Mode(StrEnum):
    """The purpose of an examination, which selects the rules that run."""

    CHECK = "check"
    GATE = "gate"
    MONITOR = "monitor"
    LIVE = "live"
    DEEP = "deep"
    WATCH = "watch"  # beside one training: findings, and no verdict

    @property
    def unknown_closes(self) -> bool:
        """Whether an UNKNOWN keeps a run from starting; it never ends a run."""
        return self not in (Mode.MONITOR, Mode.LIVE)


@dataclass(frozen=True)
class Finding:
    """One check on one GPU, between several (`gpu` is `0+1`, without a uuid), or on the node (`gpu`
    and `uuid` None).

    `read` is what was read, in words; `limit` what it was held against and `source` whose limit
    that is; `action` is a name of `ACTIONS`, empty where there is nothing to do. `optional` marks
    an UNKNOWN that warns and closes nothing: a missing right.
    """

    check: str
    result: Result
    read: str
    gpu: str | None = None
    uuid: str | None = None
    limit: str = ""
    source: str = ""
    action: str = ""
    optional: bool = False

    @property
    def place(self) -> str:
        return "node" if self.gpu is None else f"GPU {self.gpu}"

    @property
    def line(self) -> str:
        """All of it, for a log."""
        whose = f" ({self.source})" if self.source else ""
        limit = f"; limit: {self.limit}{whose}" if self.limit else ""
        where = f"{self.place} ({self.uuid})" if self.uuid else self.place
        return (
            f"{where}: {self.check} {self.result}: "
            f"{self.read}{limit}{f' -> {self.advice}' if self.action else ''}"
        )

    @property
    def advice(self) -> str:
        # As nvidia-smi takes several; a slice's GPU has to be reset as a whole.
        gpus = ",".join(label.partition(":")[0] for label in (self.gpu or "").split("+"))
        return f"{self.action}: {ACTIONS[self.action].format(gpu=gpus)}" if self.action else ""


ACTIONS = {
    "reset_gpu": "stop what runs on the GPU, then `nvidia-smi --gpu-reset -i {gpu}` as root",
    "reboot": "drain the node and reboot it",
    "replace": "take the GPU out of service and have it replaced",
    "drain": "take the node out of service and test its memory and CPUs",
    "restart_app": "start the program again: the same command goes on from its newest checkpoint",
    "recreate_container": "remove the container and start a new one; a daemon reload takes "
    "the GPUs from "
    "a running one",
    "update_driver": "install a newer driver, or use an image made for this one's CUDA",
    "cool": "look at the fans, the air flow and the power supply",
    "inspect": "look at it when there is time; the run may start",
    "ask_host": "see `nvidia-smi -q` on the host: if it cannot tell either, reboot",
    "give_gpus": "on the host install the driver, in a container the NVIDIA container toolkit, and "
    "start it with --gpus all",
    "use_others": "name other GPUs with --gpu-ids, or ask for fewer",
    "wait": "let the other program end, or use other GPUs",
    "change_mode": "`nvidia-smi` sets it, as root: -pm 1 persistence, -c 0 compute mode",
    "grant": "give the container or the user the right to read it",
    "make_room": "give the container more of it: --shm-size, --memory, --cpus, or a larger disk",
    "fix_mount": "mount a folder that this user may write to, or set --user",
}


@dataclass(frozen=True)
class Verdict:
    """All findings of one look, and whether a run may start or go on.

    `required` names checks whose NA or UNKNOWN also closes; `overridden` the limits that are not
    the usual ones.
    """

    mode: Mode
    findings: tuple[Finding, ...]
    gpus: tuple[dict[str, Any], ...] = ()
    driver_version: str | None = None
    required: tuple[str, ...] = ()
    overridden: dict[str, Any] | None = None

    @property
    def result(self) -> Result:
        return worst(finding.result for finding in self.findings)

    @property
    def closing(self) -> tuple[Finding, ...]:
        """The findings for which a run must not start, or must end."""
        return tuple(finding for finding in self.findings if self._closes(finding))

    def _closes(self, finding: Finding) -> bool:
        if finding.result is Result.CRITICAL:
            return True
        if finding.check in self.required:
            return finding.result in (Result.NA, Result.UNKNOWN)
        return (
            finding.result is Result.UNKNOWN and not finding.optional and self.mode.unknown_closes
        )

    @property
    def open(self) -> bool:
        return not self.closing

    @property
    def exit_code(self) -> int:
        """0 open, 1 closed; 2 is for a check that could not be made at all."""
        return 0 if self.open else 1

    @property
    def stub(self) -> bool:
        """Whether the driver is the tests' stand-in."""
        return (self.driver_version or "").endswith("(stub)")

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints; docs/health.schema.json describes it."""
        closing = self.closing
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
            "findings": [
                {
                    "check": finding.check,
                    "result": str(finding.result),
                    "closes": finding in closing,
                    "gpu": finding.gpu,
                    "uuid": finding.uuid,
                    "read": finding.read,
                    "limit": finding.limit,
                    "source": finding.source,
                    "action": finding.action,
                    "advice": finding.advice,
                }
                for finding in self.findings
            ],
        }


def worst(results: Iterable[Result]) -> Result:
    """The heaviest of `results`; PASS of none."""
    return max((Result.PASS, *(r for r in results if r is not Result.NA)), key=_WEIGHT.__getitem__)


def by_weight(findings: Sequence[Finding]) -> list[Finding]:
    """The worst first, in their order otherwise."""
    return sorted(findings, key=lambda finding: -_WEIGHT[finding.result])
