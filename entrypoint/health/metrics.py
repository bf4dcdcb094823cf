"""The newest verdict as metrics for Prometheus and as an answer for probes, served over HTTP."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from entrypoint.health.figures import FIGURES
from entrypoint.health.verdict import LEVELS, Result, Verdict, closing_line
from entrypoint.system.torch_build import torch_cuda

_XIDS = ("trainbox_gpu_xids", "Xids since the monitor was started")
_LAST_XID = ("trainbox_gpu_last_xid", "The newest Xid since the monitor was started, 0 for none")
_GPU = ("gpu", "uuid", "name")


class Latest(Collector):
    """The newest verdict and the Xids so far, put by one thread and served by another."""

    def __init__(self, stale_s: float) -> None:
        self._stale_s = stale_s
        self._newest: tuple[float, Verdict, Mapping[tuple[str, int], int]] | None = None

    def put(self, verdict: Verdict, xids: Mapping[tuple[str, int], int]) -> None:
        """Replace the verdict, and the number of events of each (UUID, Xid), the newest last."""
        self._newest = (time.monotonic(), verdict, dict(xids))

    def healthz(self) -> tuple[str, str]:
        """Return (HTTP status, text); 503 if the verdict is too old, since the monitor hangs."""
        if self._newest is None:
            return "503 Service Unavailable", "no examination has finished yet"
        at_s, verdict, _ = self._newest
        if (age_s := time.monotonic() - at_s) > self._stale_s:
            return (
                "503 Service Unavailable",
                f"the last examination is {age_s:.0f} s old: the monitor or the driver hangs",
            )
        return ("200 OK" if verdict.open else "503 Service Unavailable"), closing_line(verdict)

    def collect(self) -> Iterator[Metric]:
        """Return the verdict, each check of each GPU, and the GPUs' figures for Prometheus."""
        if self._newest is None:
            return
        at_s, verdict, xids = self._newest
        yield GaugeMetricFamily(
            "trainbox_health_open", "1 if a run may start or continue", value=int(verdict.open)
        )
        yield GaugeMetricFamily(
            "trainbox_health_age_seconds",
            "Time since the last examination",
            value=time.monotonic() - at_s,
        )
        yield InfoMetricFamily(
            "trainbox_health",
            "The versions of Trainbox and of the driver, and the CUDA that torch is built for",
            value={
                "version": version("trainbox"),
                "driver_version": verdict.driver_version or "",
                "torch_cuda": torch_cuda() or "",
            },
        )
        yield _checks(verdict)
        yield from _figures(verdict)
        yield from _xids(verdict, xids)


def _checks(verdict: Verdict) -> Metric:
    checks = GaugeMetricFamily(
        "trainbox_health_check",
        "The worst result of a check: -1 NA, 0 PASS, 1 INFO, 2 WARN, 3 UNKNOWN, 4 CRITICAL",
        labels=["check", *_GPU],
    )
    names = {gpu["uuid"]: gpu["name"] for gpu in verdict.gpus}
    levels: dict[tuple[str, ...], int] = {}
    for finding in verdict.findings:
        uuid = finding.uuid or ""
        key = (finding.check, finding.gpu or "", uuid, names.get(uuid, ""))
        levels[key] = max(levels.get(key, LEVELS[Result.NA]), LEVELS[finding.result])
    for labels, level in levels.items():
        checks.add_metric(labels, level)
    return checks


def _figures(verdict: Verdict) -> Iterator[Metric]:
    memory = GaugeMetricFamily("trainbox_gpu_memory_size_bytes", "Memory of the GPU", labels=_GPU)
    boards = InfoMetricFamily("trainbox_gpu", "The firmware of the GPU", labels=_GPU)
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for figure in FIGURES:
        kind = CounterMetricFamily if figure.counts else GaugeMetricFamily
        labels = [*_GPU, "kind"] if figure.kind else _GPU
        families.setdefault(
            figure.metric, kind(f"trainbox_gpu_{figure.metric}", figure.text, labels=labels)
        )
    for gpu in verdict.gpus:
        labels = [gpu[label] for label in _GPU]
        boards.add_metric(labels, {"vbios": gpu.get("vbios", "")})
        if gpu["memory_mib"]:  # 0 if it is hidden
            memory.add_metric(labels, gpu["memory_mib"] * 2**20)
        for figure in FIGURES:
            if figure.name in gpu:
                value = round(gpu[figure.name] * figure.factor, 2)
                families[figure.metric].add_metric([*labels, *filter(None, [figure.kind])], value)
    yield from (memory, *families.values(), boards)


def _xids(verdict: Verdict, xids: Mapping[tuple[str, int], int]) -> Iterator[Metric]:
    """Return the number of Xids of each GPU and the newest one: from 0, so that a rise is seen."""
    events = CounterMetricFamily(*_XIDS, labels=_GPU)
    last = GaugeMetricFamily(*_LAST_XID, labels=_GPU)
    for gpu in verdict.gpus:
        # The driver reports the Xids of slices for their GPU.
        uuid = gpu.get("mig_parent", gpu["uuid"])
        own = {xid: count for (owner, xid), count in xids.items() if owner == uuid}
        labels = [gpu[label] for label in _GPU]
        events.add_metric(labels, sum(own.values()))
        last.add_metric(labels, [0, *own][-1])
    yield from (events, last)


@contextmanager
def served(
    host: str, port: int, latest: Latest, trainings: Collector | None = None
) -> Iterator[tuple[str, int]]:
    """Serve /metrics and /healthz during the body, which gets the host and the port.

    /metrics also has the metrics of `trainings`.

    Port 0 is any free port.

    Raises:
        OSError: `host` is not an address of this machine, or the port is taken.
    """
    registry = CollectorRegistry()
    registry.register(latest)
    if trainings is not None:
        registry.register(trainings)
    server, thread = start_http_server(port, host, registry)
    server.set_app(_with_healthz(latest, make_wsgi_app(registry)))
    # Without a traceback for each client that ends its connection early.
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    try:
        yield host, server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _with_healthz(latest: Latest, metrics: WSGIApplication) -> WSGIApplication:
    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/metrics":
            return metrics(environ, start_response)
        status, text = "404 Not Found", "/healthz or /metrics"
        if environ["PATH_INFO"] == "/healthz":
            status, text = latest.healthz()
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]

    return answer
