"""The HTTP server of the monitor under load: many scrapes, slow clients, one thread."""

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress

import pytest

from entrypoint.health import server
from entrypoint.health.metrics import Latest
from entrypoint.health.server import Page, served
from entrypoint.health.verdict import Finding, Mode, Result, Verdict

SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: monitor\r\nAccept: text/plain\r\n\r\n"
UUID = "GPU-1"
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
NO_TIMEOUT_S = 600.0  # only a server that does not answer at all reaches this


def latest() -> Latest:
    newest = Latest(stale_s=NO_TIMEOUT_S)
    newest.put(VERDICT, {(UUID, 31): 2})
    return newest


Connect = Callable[..., socket.socket]


@pytest.fixture
def connect() -> Iterator[Connect]:
    with ExitStack() as stack:

        def connect(address: tuple[str, int], sent: bytes = b"") -> socket.socket:
            client = stack.enter_context(socket.create_connection(address, timeout=NO_TIMEOUT_S))
            client.sendall(sent)
            return client

        yield connect


def received(client: socket.socket) -> str:
    """Return what the server sends until it closes the connection."""
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts).decode()


def test_200_scrapes_are_answered_beside_50_slow_clients(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "DEADLINE_S", NO_TIMEOUT_S)
    threads = threading.active_count()
    with served("127.0.0.1", 0, latest().page) as address:
        slow = [connect(address, SCRAPE[:1]) for _ in range(50)]
        scrapes = [connect(address) for _ in range(200)]
        for scrape in scrapes:
            scrape.sendall(SCRAPE)
        answers = [received(scrape) for scrape in scrapes]
        assert threading.active_count() == threads + 1
        # The slow clients are still connected, and are answered once they have sent the rest.
        for client in slow:
            client.sendall(SCRAPE[1:])
        answers += [received(client) for client in slow]
    assert threading.active_count() == threads
    assert {answer.splitlines()[0] for answer in answers} == {"HTTP/1.1 200 OK"}
    assert all(answer.endswith('xid="31"} 2.0\n') for answer in answers)


def test_a_client_that_keeps_sending_is_closed_at_its_deadline(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "DEADLINE_S", 0.2)
    with served("127.0.0.1", 0, latest().page) as address:
        client = connect(address)
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


def test_the_oldest_connection_is_closed_for_a_new_one(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "DEADLINE_S", NO_TIMEOUT_S)
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 5)
    with served("127.0.0.1", 0, latest().page) as address:
        slow = [connect(address, b"G") for _ in range(5)]
        assert received(connect(address, SCRAPE)).startswith("HTTP/1.1 200 OK")
        # Linux resets the connection only if the server has not read the byte yet.
        with suppress(ConnectionResetError):
            assert slow[0].recv(1) == b""
        slow[1].sendall(SCRAPE[1:])
        assert received(slow[1]).startswith("HTTP/1.1 200 OK")


def test_128_clients_can_wait_to_be_accepted(connect: Connect) -> None:
    """A full backlog would drop a connection, which is tried again after a second."""
    busy, free = threading.Event(), threading.Event()

    def page(_path: str, _headers: Mapping[str, str]) -> Page:
        busy.set()
        free.wait(NO_TIMEOUT_S)
        return Page("200 OK", "text/plain", b"")

    with served("127.0.0.1", 0, page) as address, ExitStack() as stack:
        stack.callback(free.set)
        first = connect(address, SCRAPE)
        assert busy.wait(NO_TIMEOUT_S)
        for _ in range(128):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
            assert waiting.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED
        free.set()
        assert received(first).startswith("HTTP/1.1 200 OK")


ESTABLISHED = 1  # the first byte of Linux's tcp_info


@pytest.mark.parametrize(
    ("request_line", "answer"),
    [
        ("GET /healthz HTTP/1.1", "200 OK|OPEN, WARN: 1 GPU; xid (GPU 1)\n"),
        ("GET /healthz?verbose=1 HTTP/1.0", "200 OK|OPEN, WARN: 1 GPU; xid (GPU 1)\n"),
        ("HEAD /healthz HTTP/1.1", "200 OK|"),
        ("GET / HTTP/1.1", "404 Not Found|/healthz or /metrics\n"),
        ("POST /metrics HTTP/1.1", "405 Method Not Allowed|use GET\n"),
        ("nonsense", "405 Method Not Allowed|use GET\n"),
    ],
)
def test_an_answer(connect: Connect, request_line: str, answer: str) -> None:
    with served("127.0.0.1", 0, latest().page) as address:
        head, _, body = received(connect(address, f"{request_line}\r\n\r\n".encode())).partition(
            "\r\n\r\n"
        )
    status, _, text = answer.partition("|")
    assert (head.splitlines()[0], body) == (f"HTTP/1.1 {status}", text)


def test_a_request_without_an_end_is_closed_at_its_longest_size(connect: Connect) -> None:
    with served("127.0.0.1", 0, latest().page) as address:
        client = connect(address)
        with pytest.raises(OSError):
            while True:
                client.sendall(b"x" * 2**16)


def test_the_metrics_have_prometheus_units() -> None:
    lines = latest().page("/metrics", {}).body.decode().splitlines()
    of_gpu = f'gpu="1",name="H100",uuid="{UUID}"'
    assert {line for line in lines if line.startswith("trainbox_gpu_")} == {
        f"trainbox_gpu_utilization_ratio{{{of_gpu}}} 0.35",
        f"trainbox_gpu_memory_used_bytes{{{of_gpu}}} 3.145728e+06",
        f"trainbox_gpu_energy_joules_total{{{of_gpu}}} 1.5",
        f'trainbox_gpu_ecc_errors_total{{gpu="1",kind="corrected",name="H100",uuid="{UUID}"}} 7.0',
        f'trainbox_gpu_ecc_errors_total{{gpu="1",kind="uncorrected",name="H100",uuid="{UUID}"}} '
        "1.0",
        f'trainbox_gpu_xids_total{{uuid="{UUID}",xid="31"}} 2.0',
    }
    openmetrics = latest().page("/metrics", {"accept": "application/openmetrics-text"})
    assert openmetrics.body.decode().endswith("# EOF\n")


def test_a_client_with_an_invalid_version_gets_the_plain_format() -> None:
    accept = "application/openmetrics-text;version=one"
    assert latest().page("/metrics", {"accept": accept}).content_type.startswith("text/plain")
