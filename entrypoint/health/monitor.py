"""`trainbox health --monitor`, which examines the GPUs periodically and logs changes.

It serves /healthz for probes and /metrics for Prometheus.
"""

import dataclasses
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from entrypoint.driver.process import Driver, NoAnswer
from entrypoint.driver.readings import Sample, Unread
from entrypoint.errors import InvalidRequest
from entrypoint.health.check import NO_ANSWER, Question, about, take_sample, verdict, without_driver
from entrypoint.health.node import read_node
from entrypoint.health.rules.derived import SLOWDOWN_WINDOW
from entrypoint.health.screen import closing_line
from entrypoint.health.verdict import Result, Verdict
from entrypoint.system.streams import message

# Prometheus alerts compare these numbers. From 3 on, a run must not start.
LEVELS = {
    Result.NA: -1,
    Result.PASS: 0,
    Result.INFO: 1,
    Result.WARN: 2,
    Result.UNKNOWN: 3,
    Result.CRITICAL: 4,
}
_GAUGES = {
    "temperature_c": ("trainbox_gpu_temperature_celsius", "The GPU's temperature"),
    "utilization_percent": (
        "trainbox_gpu_utilization_percent",
        "Share of the time in which a program computed on the GPU",
    ),
    "memory_used_mib": ("trainbox_gpu_memory_used_mebibytes", "Memory in use on the GPU"),
    "power_w": ("trainbox_gpu_power_watts", "Power that the GPU draws"),
}


class Latest(Collector):
    """The newest verdict, for Prometheus and for probes."""

    def __init__(self, stale_s: float) -> None:
        self._stale_s = stale_s
        self._verdict: Verdict | None = None
        self._at_s = 0.0

    def put(self, verdict: Verdict) -> None:
        self._verdict, self._at_s = verdict, time.monotonic()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._at_s

    def healthz(self) -> tuple[str, str]:
        """Return (HTTP status, text); 503 if the verdict is too old, since the monitor hangs."""
        if self._verdict is None:
            return "503 Service Unavailable", "no examination has finished yet"
        if self.age_s > self._stale_s:
            return (
                "503 Service Unavailable",
                f"the last examination is {self.age_s:.0f} s old: the monitor or the driver hangs",
            )
        return ("200 OK" if self._verdict.open else "503 Service Unavailable"), closing_line(
            self._verdict
        )

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return the verdict, each check of each GPU, and the GPUs' figures for Prometheus."""
        verdict = self._verdict
        if verdict is None:
            return
        yield GaugeMetricFamily(
            "trainbox_health_open", "1 if a run may start or continue", value=int(verdict.open)
        )
        yield GaugeMetricFamily(
            "trainbox_health_age_seconds", "Time since the last examination", value=self.age_s
        )
        checks = GaugeMetricFamily(
            "trainbox_health_check",
            "The worst result of a check: -1 NA, 0 PASS, 1 INFO, 2 WARN, 3 UNKNOWN, 4 CRITICAL",
            labels=["check", "gpu", "uuid"],
        )
        levels: dict[tuple[str, str, str], int] = {}
        for finding in verdict.findings:
            key = (finding.check, finding.gpu or "", finding.uuid or "")
            levels[key] = max(levels.get(key, LEVELS[Result.NA]), LEVELS[finding.result])
        for key, level in levels.items():
            checks.add_metric(list(key), level)
        yield checks
        for name, (metric, text) in _GAUGES.items():
            family = GaugeMetricFamily(metric, text, labels=["gpu", "uuid", "name"])
            for gpu in verdict.gpus:
                if name in gpu:
                    family.add_metric([gpu["gpu"], gpu["uuid"], gpu["name"]], gpu[name])
            yield family


def monitor(
    driver: Driver,
    question: Question,
    gpus: int | str | None,
    gpu_ids: str | None,
    processes: int | None,
    listen: str,
    interval_s: float,
) -> int:
    """Examine the GPUs every `interval_s` seconds until a signal; return the exit code.

    Raises:
        InvalidRequest: `listen` is not an address of this host, or its port is taken.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    latest = Latest(stale_s=2 * (interval_s + driver.deadline_s))
    server = _server(listen, latest)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host, port = server.server_address[:2]
    message(f"/healthz and /metrics on http://{host!s}:{port}, every {interval_s:g} s", sys.stdout)
    examinations = _Examinations(driver, question, (gpus, gpu_ids, processes))
    last_line = ""
    while not stop.is_set():
        latest.put(seen := examinations.next())
        reported = {
            finding.line
            for finding in seen.findings
            if finding.result in (Result.WARN, Result.UNKNOWN, Result.CRITICAL)
        }
        for line in sorted(reported - examinations.reported):
            message(line, sys.stdout)
        examinations.reported = reported
        if (line := closing_line(seen)) != last_line:
            message(last_line := line, sys.stdout)
        stop.wait(interval_s)
        driver.revive()
    server.shutdown()
    return 0


class _Examinations:
    """Successive verdicts on the samples so far; GPUs that are missing are searched for again."""

    def __init__(
        self,
        driver: Driver,
        question: Question,
        options: tuple[int | str | None, str | None, int | None],
    ) -> None:
        self.reported: set[str] = set()
        self._driver, self._options, self._base = driver, options, question
        self._question: Question | None = None
        self._samples: deque[Sample] = deque(maxlen=SLOWDOWN_WINDOW)
        self._xids: list[tuple[str, int]] = []

    def next(self) -> Verdict:
        if self._driver.waiting_since_s is not None and (still := self._awaited()) is not None:
            return still
        gpus = self._options[0]
        if gpus == 0:
            return without_driver(self._base, "not queried: --gpus 0")
        if self._question is None:
            try:
                found = about(
                    self._driver.detect(),
                    self._base,
                    os.environ.get("CUDA_VISIBLE_DEVICES"),
                    *self._options,
                )
            except NoAnswer as error:
                return self._judged(
                    Sample(time.monotonic(), fault=Unread(NO_ANSWER, str(error))), self._base
                )
            if isinstance(found, Verdict):
                return found
            self._question = None if found.selection.missing else found
            if self._question is None:
                return self._judged(take_sample(self._driver, found, events=True), found)
        return self._judged(take_sample(self._driver, self._question, events=True), self._question)

    def _awaited(self) -> Verdict | None:
        """Return a verdict while a late answer is missing, or None once it has come.

        The late answer itself is dropped.
        """
        try:
            self._driver.answer(0)
        except NoAnswer as error:
            return self._judged(
                Sample(time.monotonic(), fault=Unread(NO_ANSWER, str(error))),
                self._question or self._base,
            )
        return None

    def _judged(self, sample: Sample, question: Question) -> Verdict:
        self._xids += sample.xids
        # Xids are kept until the monitor restarts. Rates use only the samples that could be read.
        whole = dataclasses.replace(sample, xids=tuple(dict.fromkeys(self._xids)))
        if sample.fault is not None:
            return verdict([whole], question, read_node(question.runs_dir))
        self._samples.append(dataclasses.replace(sample, xids=()))
        seen = [*list(self._samples)[:-1], whole]
        return verdict(seen, question, read_node(question.runs_dir))


class _Server(ThreadingMixIn, WSGIServer):
    """A server with one thread for each request, up to 16; further requests are refused."""

    daemon_threads = True
    _free = threading.BoundedSemaphore(16)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a client that disconnects is normal."""


class _QuietHandler(WSGIRequestHandler):
    """A handler without a log line for each probe."""

    timeout = 10  # seconds for a request

    def log_message(self, *_: Any) -> None:
        pass


def _server(listen: str, latest: Latest) -> WSGIServer:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise InvalidRequest(f"--listen {listen} is not HOST:PORT: write it as in 127.0.0.1:9400")
    if ":" in host:
        raise InvalidRequest(
            f"--listen {listen} is not an IPv4 address: write it as in 127.0.0.1:9400"
        )
    registry = CollectorRegistry()
    registry.register(latest)
    metrics = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/metrics":
            page: Iterable[bytes] = metrics(environ, start_response)
            return page
        status, text = (
            latest.healthz()
            if environ["PATH_INFO"] == "/healthz"
            else ("404 Not Found", "/healthz or /metrics")
        )
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]

    try:
        return make_server(host, int(port), app, _Server, _QuietHandler)
    except OSError as error:
        raise InvalidRequest(
            f"--listen {listen} cannot be used ({error.strerror or error}): give an address of "
            "this host and a free port"
        ) from error
