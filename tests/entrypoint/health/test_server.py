"""The HTTP server of the monitor: its pages, floods of connections, and slow clients."""

import http.client
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import pytest
from prometheus_client import CollectorRegistry

from entrypoint.health import metrics
from entrypoint.health.metrics import MOST_CONNECTIONS, Latest, served
from entrypoint.health.verdict import Finding, Mode, Result, Verdict

UUID = "GPU-1"
OF_GPU = f'gpu="1",name="H100",uuid="{UUID}"'
VERDICT = Verdict(
    Mode.MONITOR,
    (Finding("xid", Result.WARN, "Xid 31", gpu="1", uuid=UUID),),
    gpus=(
        {
            "gpu": "1",
            "uuid": UUID,
            "name": "H100",
            "memory_mib": 81559,
            "utilization_percent": 35,
            "memory_used_mib": 3,
            "energy_mj": 1500,
            "ecc_corrected": 7,
            "ecc_uncorrected": 1,
        },
    ),
)
HEALTHZ = "OPEN, WARN: 1 GPU; xid (GPU 1)\n"
NO_TIMEOUT_S = 600.0  # only a server that does not answer at all reaches this

Address = tuple[str, int]


def latest() -> Latest:
    newest = Latest(stale_s=NO_TIMEOUT_S)
    newest.put(VERDICT, {(UUID, 79): 1, (UUID, 31): 2})
    return newest


@contextmanager
def serving() -> Iterator[Address]:
    with served("127.0.0.1", 0, latest().application()) as address:
        yield address


def get(
    address: Address, path: str, headers: Mapping[str, str] | None = None, method: str = "GET"
) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*address, timeout=NO_TIMEOUT_S)
    try:
        connection.request(method, path, headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@contextmanager
def half_open(address: Address, count: int, sent: bytes = b"G") -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        clients = []
        for _ in range(count):
            client = stack.enter_context(socket.create_connection(address, timeout=NO_TIMEOUT_S))
            client.sendall(sent)
            clients.append(client)
        yield clients


def test_a_flood_of_half_open_connections_is_bounded(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The files that a process may open do not run out, and each request is answered."""
    monkeypatch.setattr(metrics, "DEADLINE_S", NO_TIMEOUT_S)
    begin, most = threading.active_count(), 0
    with serving() as address, ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(half_open(address, MOST_CONNECTIONS))
            assert get(address, "/healthz") == (200, HEALTHZ)
            most = max(most, threading.active_count())
    assert most <= begin + 1 + MOST_CONNECTIONS
    assert capfd.readouterr().err == ""


def test_a_slow_client_is_disconnected_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics, "DEADLINE_S", 0.2)
    with serving() as address, half_open(address, 1) as (client,):
        client.settimeout(0.02)
        closed = False
        while not closed:
            try:
                client.sendall(b"x")
                closed = client.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                closed = True
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/healthz?verbose=1", 200, HEALTHZ),
        ("HEAD", "/healthz", 200, ""),
        ("GET", "/", 404, "/healthz or /metrics\n"),
    ],
)
def test_an_answer(method: str, path: str, status: int, text: str) -> None:
    with serving() as address:
        assert get(address, path, method=method) == (status, text)


def test_the_metrics_have_prometheus_units_and_the_format_that_the_client_accepts() -> None:
    with serving() as address:
        lines = get(address, "/metrics")[1].splitlines()
        accept = "application/openmetrics-text;version="
        assert get(address, "/metrics", {"Accept": f"{accept}1.0.0"})[1].endswith("# EOF\n")
    corrected, uncorrected = (
        f'gpu="1",kind="{kind}",name="H100",uuid="{UUID}"' for kind in ("corrected", "uncorrected")
    )
    assert {line for line in lines if line.startswith("trainbox_gpu_")} == {
        f"trainbox_gpu_utilization_ratio{{{OF_GPU}}} 0.35",
        f"trainbox_gpu_memory_size_bytes{{{OF_GPU}}} 8.5520809984e+10",
        f"trainbox_gpu_memory_used_bytes{{{OF_GPU}}} 3.145728e+06",
        f"trainbox_gpu_energy_joules_total{{{OF_GPU}}} 1.5",
        f"trainbox_gpu_ecc_errors_total{{{corrected}}} 7.0",
        f"trainbox_gpu_ecc_errors_total{{{uncorrected}}} 1.0",
        f'trainbox_gpu_info{{{OF_GPU},vbios=""}} 1.0',
        f"trainbox_gpu_xids_total{{{OF_GPU}}} 3.0",
        f"trainbox_gpu_last_xid{{{OF_GPU}}} 31.0",
    }
    assert f'trainbox_health_check{{check="xid",{OF_GPU}}} 2.0' in lines


def test_a_counter_of_xids_begins_at_0_and_a_slice_has_those_of_its_gpu() -> None:
    gpus = (
        {"gpu": "0", "uuid": "GPU-0", "name": "H100", "memory_mib": 0},
        {"gpu": "1:0", "uuid": "MIG-1", "mig_parent": UUID, "name": "H100 MIG", "memory_mib": 0},
    )
    newest, registry = Latest(stale_s=NO_TIMEOUT_S), CollectorRegistry()
    newest.put(Verdict(Mode.MONITOR, (), gpus), {(UUID, 79): 1})
    registry.register(newest)
    counted = [
        registry.get_sample_value(
            "trainbox_gpu_xids_total", {label: str(gpu[label]) for label in ("gpu", "uuid", "name")}
        )
        for gpu in gpus
    ]
    assert counted == [0, 1]
