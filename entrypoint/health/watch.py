"""Check the health of GPUs before a training, and watch them during the training."""

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from entrypoint.driver.gpus import Gpu
from entrypoint.driver.process import Driver
from entrypoint.health.check import Question, examine
from entrypoint.health.limits import Limits
from entrypoint.health.rules.gpus import Selection, judge_gpus, names_to_read, rules_for
from entrypoint.health.rules.machine import judge_driver
from entrypoint.health.rules.rule import window
from entrypoint.health.verdict import Finding, Mode, Result, closing_line
from entrypoint.launch.plan import LaunchPlan
from trainbox.disclosure.suggested_commands import command
from trainbox.errors import DeviceMissing
from trainbox.files.regular_files import append_line
from trainbox.files.temporary import temporary_folder
from trainbox.processes.programs import GPU_EVENTS, command_of
from trainbox.processes.streams import message, say

if TYPE_CHECKING:
    from entrypoint.driver.gpus import Sample

INTERVAL_S = 2.0
_FINDINGS_SHOWN = 3
_RULES = rules_for(Mode.WATCH)
_ENDING = {rule.check for rule in _RULES if rule.ends_a_run} | {"xid", "handle"}
_RECOVERING = {rule.check for rule in _RULES if rule.may_recover}
_LOGGED = (Result.WARN, Result.UNKNOWN, Result.CRITICAL)


class Telemetry(Protocol):
    """Where the watch records GPU values for a script. A training reads its GPUs itself.

    Attributes:
        metrics: the file to which events are appended.
        names: the values of each GPU to read with each sample.
    """

    metrics: Path
    names: tuple[str, ...]

    def take(self, sample: "Sample") -> None:
        """Take a sample."""

    def step(self) -> int:
        """Return the newest step, which events have."""


class Watch:
    """The watch over the `gpus` of one training.

    A finding whose result changed is printed to standard error, and appended to `events` as a line
    of JSON, or with `telemetry` to its file. `known` has the results at the start by (check, GPU
    label). Without `ends_a_run`, no finding ends the training.

    Two processes query the driver: `driver` reads values, and `listener` only waits for Xids. When
    a GPU fails, the next reading often hangs, which must not delay the Xid.

    A link that is down may be up again at the next reading, because the hardware trains it again.
    So the first CRITICAL reading is only a warning.

    Attributes:
        needs_reset: The first finding after which no program can use the GPU until a reset. The
            driver reports such an event once, and no later reading shows it.
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
        telemetry: Telemetry | None = None,
    ) -> None:
        self.events, self._ends_a_run, self._telemetry = events, ends_a_run, telemetry
        self._selection, self._limits = Selection(gpus), limits
        uuids = tuple(dict.fromkeys(gpu.whole_uuid for gpu in gpus))
        names = (*names_to_read(_RULES), *(telemetry.names if telemetry else ()))
        self._questions: dict[Driver, tuple[Any, ...]] = {
            listener: ("xids", uuids),
            driver: ("sample", uuids, tuple(dict.fromkeys(names))),
        }
        self._next_s = dict.fromkeys(self._questions, 0.0)
        self._samples: list[Sample] = []
        self._results = dict(known)
        self._fatal: str | None = None
        self.needs_reset: str | None = None
        self._suspected = set[tuple[str, str]]()  # CRITICAL at the newest reading
        self._is_over = False

    def fatal(self) -> str | None:
        """Return why the training must end, or None.

        This never waits for the driver. Call it often.
        """
        for driver, question in self._questions.items():
            if driver.waiting_since_s is not None:
                self._take(driver, 0)
            elif time.monotonic() >= self._next_s[driver]:
                self._next_s[driver] = time.monotonic() + INTERVAL_S
                driver.ask(*question)
        return self._fatal

    def final_check(self, within_s: float = 2.0) -> str | None:
        """Wait up to `within_s` for each answer, and return why the training had to end, or None.

        Call this after the training, because a broken GPU may be the reason for its failure.
        """
        self._is_over = True
        for driver, question in self._questions.items():
            if driver.waiting_since_s is not None:
                self._take(driver, within_s)
            if driver.waiting_since_s is None:
                driver.ask(*question)
                self._take(driver, within_s)
        return self._fatal

    def _take(self, driver: Driver, within_s: float) -> None:
        """Judge the answer to the open question if it comes within `within_s`."""
        waited_s = time.monotonic() - (driver.waiting_since_s or 0)
        try:
            sample: Sample = driver.answer(within_s)
        except DeviceMissing as error:
            if waited_s > driver.deadline_s or driver.died_at_s is not None:
                # UNKNOWN, which does not end the training.
                self._log(Finding("driver", Result.UNKNOWN, str(error), action="ask_host"))
                driver.revive()
            return
        if sample.fault is not None:
            (broken,) = judge_driver(sample)
            self._log(dataclasses.replace(broken, result=Result.UNKNOWN))
            return
        listens = self._questions[driver][0] == "xids"
        if not listens:
            self._log(Finding("driver", Result.PASS, "answers"))
            self._samples = window([*self._samples, sample])
            if self._telemetry:
                self._telemetry.take(sample)
        seen = [self._with_links(sample)] if listens else self._samples
        for judged in judge_gpus(seen, self._selection, () if listens else _RULES, self._limits):
            if listens and judged.check != "xid":
                continue  # judged with the values that `driver` reads
            finding = self._confirmed(judged) if judged.check in _RECOVERING else judged
            self._log(finding)
            if self._ends_a_run and finding.result is Result.CRITICAL and finding.check in _ENDING:
                self._fatal = self._fatal or finding.line
                if finding.check == "xid":
                    self.needs_reset = self.needs_reset or finding.line

    def _confirmed(self, finding: Finding) -> Finding:
        """Return `finding`, as a warning if it is CRITICAL for the first time.

        After the training, no reading follows that could confirm it, so it stays CRITICAL.
        """
        key, before = (finding.check, finding.gpu or ""), self._suspected.copy()
        self._suspected.discard(key)
        if finding.result is not Result.CRITICAL:
            return finding
        self._suspected.add(key)
        if key in before or self._is_over:
            return finding
        return dataclasses.replace(
            finding,
            result=Result.WARN,
            read=f"{finding.read}; the next reading decides",
            action="inspect",
        )

    def _with_links(self, heard: "Sample") -> "Sample":
        """Return the listener's sample with the state of the NVLinks.

        The state comes from the other process: the listener must not read it, because a reading
        after an Xid often hangs. A link is down if it was down at the last two readings.
        """
        gpus = {}
        for uuid, readings in heard.gpus.items():
            read = [sample.gpus.get(uuid, {}).get("nvlink_active") for sample in self._samples[-2:]]
            states = [state for state in read if isinstance(state, tuple)]
            links = {"nvlink_active": tuple(map(max, zip(*states, strict=False)))} if states else {}
            gpus[uuid] = {**links, **readings}
        return dataclasses.replace(heard, gpus=gpus)

    def _log(self, finding: Finding) -> None:
        """Print and write the finding if it is an Xid or its result changed."""
        key = (finding.check, finding.gpu or "")
        before = self._results.get(key, Result.PASS)
        if finding.check == "xid":
            if finding.result in (Result.PASS, Result.NA):
                return
        else:
            self._results[key] = finding.result
            if finding.result is before or not {finding.result, before} & set(_LOGGED):
                return
        entry: dict[str, Any] = {}
        if self._telemetry:
            entry |= {"kind": "health", "step": self._telemetry.step()}
        entry |= {
            "time_unix_s": round(time.time(), 3),
            "check": finding.check,
            "result": str(finding.result),
            "gpu": finding.gpu,
            "uuid": finding.uuid,
            "read": finding.read,
            "do": finding.action,
            "text": finding.line,
        }
        # The watch continues on a full disk and without a terminal.
        lost = ""
        try:
            append_line(self.events, json.dumps(entry))
        except OSError as error:
            lost = f" (not in the run's metrics.jsonl: {error})"
        message(f"{finding.line}{lost}")


@contextmanager
def watched(
    plan: LaunchPlan,
    driver: Driver,
    limits: Limits | None = None,
    telemetry: Telemetry | None = None,
) -> Iterator[Watch]:
    """Examine the plan's GPUs, print the verdict, and yield a watch over them.

    With `telemetry`, the watch writes its events itself, and the verdict goes to standard error,
    because standard output belongs to the script.

    A finding never ends a sweep, which repeats a trial that failed on a broken GPU on another GPU.

    Raises:
        DeviceMissing: A finding closes the gate.
    """
    # Examine the GPUs once.
    limits = limits or Limits()
    per_gpu = max(1, plan.nproc_per_node // len(plan.gpus))
    question = Question(
        Mode.GATE,
        selection=Selection(plan.gpus, per_gpu=per_gpu),
        limits=limits,
        processes=plan.nproc_per_node,
        runs_dir=None,  # the trainer checks the folder that it writes to
        one_node=plan.nnodes == 1,
    )
    begin_s = time.monotonic()
    verdict = examine(driver, question)
    if closing := verdict.closing:
        shown = [finding.line for finding in closing[:_FINDINGS_SHOWN]]
        if more := len(closing) - len(shown):
            shown.append(f"and {more} more")
        raise DeviceMissing(
            f"the health gate is closed. {'; '.join(shown)} (`{command('health')}` lists all "
            "findings; HEALTH=0 trains nevertheless)"
        )
    line = f"health     {closing_line(verdict)}, {time.monotonic() - begin_s:.2f} s"
    say(line, sys.stderr if telemetry else sys.stdout)
    # Watch the GPUs during the body.
    known = {(finding.check, finding.gpu or ""): finding.result for finding in verdict.findings}
    listener = Driver()
    with ExitStack() as stack:
        stack.callback(listener.close)  # a restarted script gets another one
        events = telemetry.metrics if telemetry else None
        if events is None:
            events = stack.enter_context(temporary_folder("health-")) / "events.jsonl"
        ends_a_run = plan.strategy != "sweep"
        yield Watch(driver, listener, plan.gpus, limits, events, known, ends_a_run, telemetry)
        if not telemetry and events.exists():
            # A killed or crashed trainer did not write these events to the run. Only code of the
            # trainer writes there, so it runs in a process of its own.
            subprocess.run(command_of(GPU_EVENTS, str(events)), check=False)
