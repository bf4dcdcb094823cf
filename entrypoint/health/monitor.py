"""`trainbox health --monitor`, which examines the GPUs periodically and logs changes.

It serves /healthz for probes and /metrics for Prometheus.
"""

import contextlib
import dataclasses
import signal
import sys
import threading
import time
from collections.abc import Iterable
from math import inf

from entrypoint.driver.gpus import NO_ANSWER, Sample, Unread
from entrypoint.driver.process import Driver
from entrypoint.health.check import Question, ask, take_sample, verdict
from entrypoint.health.metrics import Latest, served
from entrypoint.health.node import read_node
from entrypoint.health.rules.rule import window
from entrypoint.health.trainings import Trainings
from entrypoint.health.verdict import Finding, Result, Verdict, closing_line
from trainbox.errors import DeviceMissing, WrongUse
from trainbox.processes.streams import message

STEADY_S = 60.0
_TRAININGS_S = 10.0  # between two looks at the folder of runs
Warned = dict[tuple[str, str | None], tuple[float, Finding]]  # by check and GPU


def monitor(
    driver: Driver,
    question: Question,
    listen: str,
    interval_s: float,
) -> int:
    """Examine the GPUs every `interval_s` seconds until a signal; return the exit code.

    Raises:
        WrongUse: `listen` is not an address of this host, or its port is taken.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    latest = Latest(stale_s=2 * (interval_s + driver.deadline_s))
    trainings = None
    if question.runs_dir is not None:
        trainings = Trainings(question.runs_dir)
    with contextlib.ExitStack() as stack:
        try:
            host, port = stack.enter_context(served(*_address(listen), latest, trainings))
        except OSError as error:
            # Python appends the address to the reason.
            reason = (error.strerror or str(error)).partition(" (")[0]
            raise WrongUse(
                f"--listen {listen} cannot be used ({reason}): give an address of this host and a "
                "free port"
            ) from error
        if trainings is not None:
            trainings.follow(max(interval_s, _TRAININGS_S), stop)
        host = f"[{host}]" if ":" in host else host
        message(
            f"/healthz and /metrics on http://{host}:{port}, every {interval_s:g} s", sys.stdout
        )
        examinations = _Examinations(driver, question)
        while not stop.is_set():
            seen = examinations.next()
            latest.put(seen, examinations.xids)
            for line in examinations.news(seen):
                message(line, sys.stdout)
            stop.wait(interval_s)
            driver.revive()
    return 0


class _Examinations:
    """Makes the next verdict from the newest samples, and searches again for missing GPUs."""

    def __init__(self, driver: Driver, question: Question) -> None:
        self.xids: dict[tuple[str, int], int] = {}  # by (UUID, Xid), the newest last
        self._reported, self._last_line = set[tuple[str, ...]](), ""
        self._warned: Warned = {}
        self._driver, self._base = driver, question
        self._question: Question | None = None
        self._samples: list[Sample] = []

    def news(self, seen: Verdict) -> list[str]:
        """Return a line for each finding whose result has changed since the previous verdict."""
        lines = {
            (f.check, f.gpu or "", f.result, f.read if f.check == "xid" else ""): f.line
            for f in seen.findings
            if f.result in (Result.WARN, Result.UNKNOWN, Result.CRITICAL)
        }
        news = sorted(line for key, line in lines.items() if key not in self._reported)
        if (last := closing_line(seen)) != self._last_line:
            news.append(last)
        self._reported, self._last_line = set(lines), last
        return news

    def next(self) -> Verdict:
        if self._driver.waiting_since_s is not None and (still := self._awaited()) is not None:
            return still
        question = self._question or ask(self._driver.detect, self._base)
        if isinstance(question, Verdict):
            return question
        # GPUs that are missing are searched for again.
        self._question = None if question.selection.missing else question
        return self._judged(take_sample(self._driver, question, events=True), question)

    def _awaited(self) -> Verdict | None:
        """Return a verdict while the driver's answer is late, or None when it has come.

        The late answer itself is not used.
        """
        try:
            self._driver.answer(0)
        except DeviceMissing as error:
            return self._judged(
                Sample(time.monotonic(), fault=Unread(NO_ANSWER, str(error))),
                self._question or self._base,
            )
        return None

    def _judged(self, sample: Sample, question: Question) -> Verdict:
        for xid in sample.xids:
            self.xids[xid] = self.xids.pop(xid, 0) + 1
        # Xids are kept until the monitor restarts. Rates use only the samples that could be read.
        whole = dataclasses.replace(sample, xids=tuple(self.xids))
        if sample.fault is not None:
            return self._steady([whole], question)
        self._samples = window([*self._samples, dataclasses.replace(sample, xids=())])
        return self._steady([*self._samples[:-1], whole], question)

    def _steady(self, samples: list[Sample], question: Question) -> Verdict:
        seen = verdict(samples, question, read_node(question.runs_dir))
        findings = steady(seen.findings, self._warned, samples[-1].time_s)
        return dataclasses.replace(seen, findings=findings)


def steady(findings: Iterable[Finding], warned: Warned, now_s: float) -> tuple[Finding, ...]:
    """Return the findings, with a WARN kept until its check has passed for a minute.

    A value at its limit would otherwise change its result with each sample. `warned` has the newest
    warnings and their times, and is updated.
    """
    steadied = []
    for finding in findings:
        key = finding.check, finding.gpu
        if finding.result is Result.WARN:
            warned[key] = now_s, finding
        elif finding.result is not Result.PASS or now_s - warned.get(key, (-inf,))[0] >= STEADY_S:
            warned.pop(key, None)
        steadied.append(warned[key][1] if key in warned else finding)
    return tuple(steadied)


def _address(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise WrongUse(
            f"--listen {listen} is not HOST:PORT: write it as in 127.0.0.1:9400 or [::1]:9400"
        )
    return host.strip("[]"), int(port)
