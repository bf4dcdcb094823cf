"""Beside a training: look at its GPUs every few seconds, tell what changes, and say when the training must save and stop."""

import contextlib
import dataclasses
import json
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from entrypoint.driver import DEADLINE_S, Driver, NoAnswer
from entrypoint.gpus import Gpu
from entrypoint.health.limits import Limits
from entrypoint.health.rules import RULES, SLOWDOWN_WINDOW, Asked, judge_driver, judge_gpus, names_to_read
from entrypoint.health.verdict import Finding, Result

if TYPE_CHECKING:
    from entrypoint.health.readings import Sample

INTERVAL_S = 2.0
WATCHED = ("recovery-action", "ecc-uncorrected", "row-remap", "slowdown", "temperature", "temperature-margin")
_RULES = tuple(rule for rule in RULES if rule.check in WATCHED)
_ENDING = {rule.check for rule in RULES if rule.ends_a_run} | {"xid", "handle"}
_TOLD = (Result.WARN, Result.UNKNOWN, Result.CRITICAL)


class Watch:
    """Looks at `gpus` through `driver`; each finding that is news goes to standard error and, as a line of JSON, to `events`.

    `known` are the results at the start, by (check, GPU's label): they are no news. Without `ends_a_run` nothing is fatal.
    """

    def __init__(
        self,
        driver: Driver,
        gpus: tuple[Gpu, ...],
        limits: Limits,
        events: Path,
        known: Mapping[tuple[str, str], Result],
        ends_a_run: bool = True,
    ) -> None:
        self.events, self._ends_a_run = events, ends_a_run
        self._driver, self._asked, self._limits = driver, Asked(gpus), limits
        self._uuids = tuple(dict.fromkeys(gpu.mig_parent or gpu.uuid for gpu in gpus))
        self._samples: deque[Sample] = deque(maxlen=SLOWDOWN_WINDOW)
        self._told = dict(known)
        self._next_s = 0.0
        self._fatal: str | None = None

    def fatal(self) -> str | None:
        """Why the training must end, or None. To be called often: it never waits for the driver."""
        if self._driver.waiting_since_s is not None:
            self._take(0)
        elif time.monotonic() >= self._next_s and self._fatal is None:
            self._next_s = time.monotonic() + INTERVAL_S
            self._driver.ask("sample", self._uuids, names_to_read(_RULES), True)
        return self._fatal

    def last_look(self, within_s: float = 2.0) -> str | None:
        """The same after the training's end, which may be what a broken GPU looked like: waits for a whole look."""
        if self._driver.waiting_since_s is not None:
            self._take(within_s)
        if self._driver.waiting_since_s is None and self._fatal is None:
            self._driver.ask("sample", self._uuids, names_to_read(_RULES), True)
            self._take(within_s)
        return self._fatal

    def _take(self, within_s: float) -> None:
        """Judge the answer to the question under way, if it is there."""
        try:
            sample: Sample = self._driver.answer(within_s)
        except NoAnswer as error:
            late = time.monotonic() - (self._driver.waiting_since_s or 0) > DEADLINE_S
            if late or "died" in str(error):
                # A doubt and no finding: it ends no training.
                self._tell(Finding("driver", Result.UNKNOWN, str(error), action="inspect"))
            return
        if sample.fault is not None:
            (broken,) = judge_driver(sample)
            self._tell(dataclasses.replace(broken, result=Result.UNKNOWN))
            return
        self._tell(Finding("driver", Result.PASS, "it answers"))
        self._samples.append(sample)
        for finding in judge_gpus(self._samples, self._asked, _RULES, self._limits):
            self._tell(finding)
            if self._ends_a_run and finding.result is Result.CRITICAL and finding.check in _ENDING:
                self._fatal = self._fatal or finding.line
        self._samples[-1] = dataclasses.replace(sample, xids=())  # told once each

    def _tell(self, finding: Finding) -> None:
        """Print and write a finding that is news: an Xid, or a result that is not as it was."""
        key = (finding.check, finding.gpu or "")
        before = self._told.get(key, Result.PASS)
        if finding.check == "xid":
            if finding.result in (Result.PASS, Result.NA):
                return
        else:
            self._told[key] = finding.result
            if finding.result is before or not {finding.result, before} & set(_TOLD):
                return
        entry = {
            "time_unix_s": round(time.time(), 3),
            "check": finding.check,
            "result": str(finding.result),
            "gpu": finding.gpu,
            "uuid": finding.uuid,
            "read": finding.read,
            "do": finding.action,
            "text": finding.line,
        }
        # A full disk, or a terminal that is gone, is no reason to leave the training alone.
        with contextlib.suppress(OSError):
            print(f"trainbox: {finding.line}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError), self.events.open("a") as file:
            file.write(json.dumps(entry) + "\n")
