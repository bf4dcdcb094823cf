"""Which nodes may join a training of several machines, and what strangers at its port can do.

The tests run on loopback and without torch.
"""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import clean_environment
from tests.support.nodes import Party, free_port, node_of
from tests.support.ranks import Ranks
from trainbox.errors import NetworkFailure, WrongUse
from trainer.programs.ranks import reception, torchrun

_HELLO = {"rank": 1, "nnodes": 2, "job": "j", "processes": 1, "host": "h"}


class _Stranger:
    """A connection to node 0 that sends messages by hand."""

    def __init__(self, port: int) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._file = self.connection.makefile("rb")

    def send(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(line)

    def rest(self) -> bytes:
        """Return what node 0 still sends before it closes the connection."""
        with contextlib.suppress(ConnectionResetError):
            return self._file.read()
        return b""

    def close(self) -> None:
        self._file.close()
        self.connection.close()


@pytest.fixture
def strangers() -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def start(port: int) -> _Stranger:
            return stack.enter_context(contextlib.closing(_Stranger(port)))

        yield start


def _listening(party: Party, **other: Any) -> tuple[Any, int]:
    """Start node 0 of two, and return it with its port when it listens."""
    port = free_port()
    first = party.start(node_of(0, port, **other))
    while True:
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection(("127.0.0.1", port)),
        ):
            return first, port
        time.sleep(0.01)


@pytest.mark.parametrize(
    "hello",
    [
        {"processes": 0},
        {"processes": 1.0},
        {"rank": True},
        {"rank": 0},
        {"rank": 2},
        {"nnodes": [2]},
        {"job": 7},
        {"host": None},
    ],
)
def test_a_hello_of_another_program_is_refused_and_node_1_still_joins(
    party: Party, strangers: Any, hello: dict[str, Any]
) -> None:
    first, port = _listening(party)
    stranger = strangers(port)
    stranger.send(json.dumps(_HELLO | hello).encode() + b"\n")
    assert stranger.rest() == b""
    assert party.start(node_of(1, port))().processes == first().processes == (1, 2)


def test_garbage_only_closes_the_connection_of_the_stranger(party: Party, strangers: Any) -> None:
    first, port = _listening(party)
    infinite = json.dumps(_HELLO).replace('"processes": 1', '"processes": Infinity').encode()
    for words in (
        b"GET / HTTP/1.1\r\n",
        b"[]\n",
        b"\n",
        b"\xff\n",
        b"x" * 5000,
        b"{}\n",
        b"{" * 4000 + b"\n",
        b'{"a":' * 900 + b"\n",
        b"[" * 4095 + b"\n",
        infinite + b"\n",
    ):
        stranger = strangers(port)
        stranger.send(words)
        assert stranger.rest() == b""
    assert party.start(node_of(1, port))().processes == first().processes == (1, 2)


@pytest.mark.parametrize("begin", [b"", b"{", b'{"rank": 1'])
def test_a_silent_or_slow_stranger_is_dropped_in_time(
    party: Party, strangers: Any, monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    monkeypatch.setattr(reception, "_HELLO_S", 0.3)
    monkeypatch.setattr(reception, "LOOK_EVERY_S", 0.1)
    first, port = _listening(party)
    stranger = strangers(port)
    stranger.send(begin)
    assert stranger.rest() == b""
    assert party.start(node_of(1, port))().processes == first().processes == (1, 2)


_NODE_0 = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))  # fewer files, fewer strangers needed
from trainer.programs.ranks.node import Node
from trainer.programs.ranks.rendezvous import meet
print(meet(Node(0, 2, 1, f"127.0.0.1:{sys.argv[1]}", "j", 120), print).processes)
"""


def test_a_thousand_silent_connections_do_not_keep_node_1_out(
    party: Party,
) -> None:
    port = free_port()
    node_0 = subprocess.Popen(
        [sys.executable, "-c", _NODE_0, str(port)],
        env=clean_environment(),
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with contextlib.ExitStack() as silent:
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                silent.enter_context(socket.create_connection(("127.0.0.1", port)))
                break
            assert node_0.poll() is None
            time.sleep(0.02)
        for _ in range(300):
            silent.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        assert len(list(Path(f"/proc/{node_0.pid}/fd").iterdir())) < 100
        assert party.start(node_of(1, port))().processes == (1, 2)
    out, err = node_0.communicate()
    assert (node_0.returncode, out, err) == (0, "(1, 2)\n", "")


@pytest.mark.parametrize(
    "answer",
    [
        {"store_port": "1", "processes": [1, 2]},
        {"store_port": 1, "processes": [1, None]},
        {"store_port": 1, "processes": [1]},
        {"processes": [1, 2]},
        {"refused": 7, "code": 2},
    ],
)
def test_an_answer_of_another_program_is_refused(party: Party, answer: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        port = impostor.getsockname()[1]
        second = party.start(node_of(1, port))
        connection, _ = impostor.accept()
        with connection:
            connection.sendall(json.dumps(answer).encode() + b"\n")
            with pytest.raises(
                NetworkFailure,
                match=f"^a program other than Trainbox answers at 127.0.0.1:{port}: ",
            ):
                second()


def test_an_endpoint_of_all_interfaces_is_refused_under_any_name(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    everywhere = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("0.0.0.0", 1))]  # noqa: S104
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: everywhere)
    with pytest.raises(
        WrongUse,
        match=r"^--rdzv-endpoint any:1 is 0.0.0.0, which is not the address of one machine: ",
    ):
        party.start(node_of(0, 0, endpoint="any:1"))()


# In torchrun.


def test_a_message_of_a_peer_is_printed_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torchrun.message("node 1 (\x1b[2J\x07evil\r\n\u202ehost, 10.0.0.7) is lost")
    assert (
        capsys.readouterr().err
        == r"trainbox: node 1 (\x1b[2J\x07evil \u202ehost, 10.0.0.7) is lost" + "\n"
    )


_PROGRAM = """
import sys
import trainer.programs.ranks.rendezvous as rendezvous
from trainer.programs.ranks import torchrun
rendezvous.host = lambda *_: [][0]
sys.argv = ["torchrun", "--nnodes=2", "--node-rank=0", "--nproc-per-node=1",
            "--rdzv-endpoint=127.0.0.1:29999", "--rdzv-id=j",
            "--rdzv-conf=join_timeout=120,await_name=0", "nothing.py"]
sys.exit(torchrun.main())
"""


def test_a_crash_of_the_rendezvous_gives_code_7(ranks: Ranks) -> None:
    ended = ranks.start(1, _PROGRAM, module="tests.support.program").wait()
    assert (ended.codes, ended.out) == ([7], "")
    assert ended.errs[0].splitlines() == [
        "trainbox: the rendezvous at 127.0.0.1:29999 failed (IndexError: list index out of range): "
        "start the same command again on each machine",
    ]
