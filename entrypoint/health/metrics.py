"""The newest verdict as metrics for Prometheus and as an answer for probes."""

import time
from collections.abc import Iterable, Iterator, Mapping
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from entrypoint.health.screen import closing_line
from entrypoint.health.verdict import Result, Verdict

# Prometheus alerts compare these numbers. From 3 on, a run must not start.
LEVELS = {
    Result.NA: -1,
    Result.PASS: 0,
    Result.INFO: 1,
    Result.WARN: 2,
    Result.UNKNOWN: 3,
    Result.CRITICAL: 4,
}
# The figures of a GPU: their metric, its text, and the factor to Prometheus' base unit.
_GAUGES = {
    "temperature_c": ("trainbox_gpu_temperature_celsius", "The GPU's temperature", 1),
    "utilization_percent": (
        "trainbox_gpu_utilization_ratio",
        "Share of the time in which a program computed on the GPU",
        0.01,
    ),
    "memory_used_mib": ("trainbox_gpu_memory_used_bytes", "Memory in use on the GPU", 2**20),
    "power_w": ("trainbox_gpu_power_watts", "Power that the GPU draws", 1),
}
_ENERGY = ("trainbox_gpu_energy_joules", "Energy used since the driver was loaded")
_ECC = ("trainbox_gpu_ecc_errors", "Memory errors since the driver was loaded")
_XIDS = ("trainbox_gpu_xids", "Xids since the monitor was started")
_GPU = ("gpu", "uuid", "name")


class Latest(Collector):
    """The newest verdict and the Xids so far, put by one thread and served by another."""

    def __init__(self, stale_s: float) -> None:
        self._stale_s = stale_s
        self._newest: tuple[float, Verdict, Mapping[tuple[str, int], int]] | None = None

    def put(self, verdict: Verdict, xids: Mapping[tuple[str, int], int]) -> None:
        """Replace the verdict, and the number of events of each (UUID, Xid)."""
        self._newest = (time.monotonic(), verdict, dict(xids))

    def application(self) -> WSGIApplication:
        """Return /metrics and /healthz."""
        registry = CollectorRegistry()
        registry.register(self)
        metrics = make_wsgi_app(registry)

        def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            if environ["PATH_INFO"] == "/metrics":
                try:
                    choose_encoder(environ.get("HTTP_ACCEPT", ""))
                except (TypeError, ValueError):  # a version that is not a number
                    status, text = "400 Bad Request", "the version in Accept is malformed"
                else:
                    return metrics(environ, start_response)  # type: ignore[no-any-return]
            elif environ["PATH_INFO"] == "/healthz":
                status, text = self.healthz()
            else:
                status, text = "404 Not Found", "/healthz or /metrics"
            start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{text}\n".encode()]

        return answer

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
        yield _checks(verdict)
        yield from _figures(verdict)
        events = CounterMetricFamily(*_XIDS, labels=["uuid", "xid"])
        for (uuid, xid), count in xids.items():
            events.add_metric([uuid, str(xid)], count)
        yield events


def _checks(verdict: Verdict) -> Metric:
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
    return checks


def _figures(verdict: Verdict) -> Iterator[Metric]:
    gpus = [([gpu[label] for label in _GPU], gpu) for gpu in verdict.gpus]
    for name, (metric, text, factor) in _GAUGES.items():
        gauge = GaugeMetricFamily(metric, text, labels=_GPU)
        for labels, gpu in gpus:
            if name in gpu:
                gauge.add_metric(labels, round(gpu[name] * factor, 2))
        yield gauge
    energy = CounterMetricFamily(*_ENERGY, labels=_GPU)
    errors = CounterMetricFamily(*_ECC, labels=[*_GPU, "kind"])
    for labels, gpu in gpus:
        if "energy_mj" in gpu:
            energy.add_metric(labels, gpu["energy_mj"] / 1000)
        for kind in ("corrected", "uncorrected"):
            if (name := f"ecc_{kind}") in gpu:
                errors.add_metric([*labels, kind], gpu[name])
    yield from (energy, errors)
