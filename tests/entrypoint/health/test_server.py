"""The pages that the monitor serves over HTTP."""

import http.client
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from prometheus_client import CollectorRegistry

from entrypoint.health.metrics import Latest, served
from entrypoint.health.monitor import _address
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
    with served("127.0.0.1", 0, latest()) as address:
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


def test_a_client_that_sends_nothing_does_not_stop_the_others() -> None:
    with serving() as address, socket.create_connection(address) as client:
        client.sendall(b"G")
        assert get(address, "/healthz") == (200, HEALTHZ)


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


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("listen", ["[::1]:0", "::1:0", "[::]:0"])
def test_ipv6(listen: str) -> None:
    """A pod of an IPv6 cluster gives its address without brackets."""
    with served(*_address(listen), latest()) as (_, port):
        assert get(("::1", port), "/healthz") == (200, HEALTHZ)
