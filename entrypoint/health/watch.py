"""Beside a training: look at its GPUs every few seconds, tell what changes, and say when the
training must save and stop.
"""

import dataclasses
import json
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entrypoint.driver.gpus import Gpu
from entrypoint.driver.process import Driver, NoAnswer
from entrypoint.health.limits import Limits
from entrypoint.health.rules import (
    RULES,
    SLOWDOWN_WINDOW,
    Asked,
    judge_driver,
    judge_gpus,
    names_to_read,
)
from entrypoint.health.verdict import Finding, Result
from entrypoint.system.streams import say

if TYPE_CHECKING:
    from entrypoint.driver.readings import Sample

INTERVAL_S = 2.0
WATCHED = (
    "recovery-action",
    "ecc-uncorrected",
    "row-remap",
    "slowdown",
    "temperature",
    "temperature-margin",
)
_RULES = tuple(rule for rule in RULES if rule.check in WATCHED)
_ENDING = {rule.check for rule in RULES if rule.ends_a_run} | {"xid", "handle"}
_TOLD = (Result.WARN, Result.UNKNOWN, Result.CRITICAL)


class Watch:
    """Looks at `gpus`; each finding that is news goes to standard error and, as a line of JSON, to
    `events`.

    Two processes ask the driver: that of `driver` reads values, and that of `listener` waits for
    Xids alone, since a GPU that dies often makes the next reading hang. `known` are the results at
    the start, by (check, GPU's label): they are no news. Without `ends_a_run` nothing is fatal.
    """

    def __init__(
        self,
        driver: Driver,
        listener: Driver,
        gpus: tuple[Gpu, ...],
        limits: Limits,
        events: Path,
        known: Mapping[tuple[str, str], Result],
        ends_a_run: bool = True,
    ) -> None:
        self.events, self._ends_a_run = events, ends_a_run
        self._asked, self._limits = Asked(gpus), limits
        uuids = tuple(dict.fromkeys(gpu.mig_parent or gpu.uuid for gpu in gpus))
        self._questions: dict[Driver, tuple[Any, ...]] = {
            listener: ("xids", uuids),
            driver: ("sample", uuids, names_to_read(_RULES)),
        }
        self._next_s = dict.fromkeys(self._questions, 0.0)
        self._samples: deque[Sample] = deque(maxlen=SLOWDOWN_WINDOW)
        self._told = dict(known)
        self._fatal: str | None = None

    def fatal(self) -> str | None:
        """Why the training must end, or None. To be called often: it never waits for the driver."""
        for driver, question in self._questions.items():
            if driver.waiting_since_s is not None:
                self._take(driver, 0)
            elif time.monotonic() >= self._next_s[driver]:
                self._next_s[driver] = time.monotonic() + INTERVAL_S
                driver.ask(*question)
        return self._fatal

    def last_look(self, within_s: float = 2.0) -> str | None:
        """The same after the training's end, which may be what a broken GPU looked like: waits for
        a whole look.
        """
        for driver, question in self._questions.items():
            if driver.waiting_since_s is not None:
                self._take(driver, within_s)
            if driver.waiting_since_s is None:
                driver.ask(*question)
                self._take(driver, within_s)
        return self._fatal

    def _take(self, driver: Driver, within_s: float) -> None:
        """Judge the answer to the question under way, if it is there."""
        asked_s = time.monotonic() - (driver.waiting_since_s or 0)
        try:
            sample: Sample = driver.answer(within_s)
        except NoAnswer as error:
            if asked_s > driver.deadline_s or driver.died_at_s is not None:
                # A doubt and no finding: it ends no training.
                self._tell(Finding("driver", Result.UNKNOWN, str(error), action="ask_host"))
                driver.revive()
            return
        if sample.fault is not None:
            (broken,) = judge_driver(sample)
            self._tell(dataclasses.replace(broken, result=Result.UNKNOWN))
            return
        listens = self._questions[driver][0] == "xids"
        if not listens:
            self._tell(Finding("driver", Result.PASS, "it answers"))
            self._samples.append(sample)
        seen = [sample] if listens else self._samples
        for finding in judge_gpus(seen, self._asked, () if listens else _RULES, self._limits):
            if listens and finding.check != "xid":
                continue  # the other one's
            self._tell(finding)
            if self._ends_a_run and finding.result is Result.CRITICAL and finding.check in _ENDING:
                self._fatal = self._fatal or finding.line

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
        lost = ""
        try:
            with self.events.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            lost = f" (not in the run's metrics.jsonl: {error})"
        say(f"trainbox: {finding.line}{lost}")
