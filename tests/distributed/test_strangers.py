"""Which nodes may join a training of several machines, and what strangers at its port can do.

The tests run on loopback and without torch.
"""

import contextlib
import json
import queue
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
from tests.support.ranks import Ranks, StartedRanks
from trainbox.contract.errors import Failure, NetworkFailure, WrongUse
from trainer.launch import reception, torchrun
from trainer.launch.connection import Connection
from trainer.launch.secret import take_secret

_HOST = socket.gethostname()
_SECRET, _OTHER = b"0123456789abcdef", b"fedcba9876543210"
_NONCE = "0" * 32
_HELLO = {"node_rank": 1, "nnodes": 2, "job": "j", "processes": 1, "host": "h"}


class _Stranger:
    """A connection to node 0 that sends messages by hand."""

    def __init__(self, port: int) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._file = self.connection.makefile("rb")

    def send(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(line)

    def greet(self) -> str:
        self.send(json.dumps({"nonce": _NONCE}).encode() + b"\n")
        nonce: str = json.loads(self.line())["nonce"]
        return nonce

    def line(self) -> bytes:
        return self._file.readline()

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
    ("hello", "reason"),
    [
        ({"processes": 5_000_000}, "processes is '5000000', not an integer from 1 to 4096"),
        ({"processes": 0}, "processes is '0', not an integer from 1 to 4096"),
        ({"processes": 1.0}, "processes is '1.0', not an integer from 1 to 4096"),
        ({"node_rank": True}, "node_rank is 'True', not an integer from 1 to 1"),
        ({"node_rank": 0}, "node_rank is '0', not an integer from 1 to 1"),
        ({"node_rank": 2}, "node_rank is '2', not an integer from 1 to 1"),
        ({"nnodes": [2]}, "nnodes is '[2]', not an integer from 2 to 65536"),
        ({"nnodes": 10**9}, "nnodes is '1000000000', not an integer from 2 to 65536"),
        ({"job": 7}, "job is not a string of 1 to 256 characters"),
        ({"host": "h" * 257}, "host is not a string of 1 to 256 characters"),
        ({"host": None}, "host is not a string of 1 to 256 characters"),
    ],
)
def test_a_hello_out_of_range_is_refused_and_node_1_still_joins(
    party: Party, strangers: Any, hello: dict[str, Any], reason: str
) -> None:
    first, port = _listening(party)
    stranger = strangers(port)
    stranger.greet()
    stranger.send(json.dumps(_HELLO | hello).encode() + b"\n")
    assert json.loads(stranger.rest()) == {
        "refused": f"node 0 does not understand this node ({reason})",
        "code": 2,
    }
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
        b'{"nonce": 7}\n',
        b'{"nonce": "zz"}\n',
        b"{}\n",
    ):
        stranger = strangers(port)
        stranger.send(words)
        assert stranger.rest() == b""
    for words in (
        b"{" * 4000 + b"\n",
        b'{"a":' * 900 + b"\n",
        b"[" * 4095 + b"\n",
        infinite + b"\n",
        b"a" * 64 + b' {"b": 1}\n',
    ):
        stranger = strangers(port)
        stranger.greet()
        stranger.send(words)
        assert b"store_port" not in stranger.rest()
    assert party.start(node_of(1, port))().processes == first().processes == (1, 2)


@pytest.mark.parametrize("begin", [b"", b"{", b'{"nonce": "00'])
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
from trainer.launch.node import Node
from trainer.launch.rendezvous import meet
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
    out, err = node_0.communicate(timeout=120)
    assert (node_0.returncode, out, err) == (0, "(1, 2)\n", "")


# The secret.


def test_nodes_with_the_same_secret_connect_and_report_their_ends(party: Party) -> None:
    port = free_port()
    nodes = [
        met() for met in [party.start(node_of(rank, port, 3, secret=_SECRET)) for rank in range(3)]
    ]
    assert {node.processes for node in nodes} == {(1, 2, 3)}
    heard = queue.Queue[tuple[str, int]]()
    nodes[1].watch(lambda what, due: heard.put((what, due)))
    nodes[0].leave(75)
    assert heard.get(timeout=120) == ("node 0 (127.0.0.1) exited with code 75", 75)


@pytest.mark.parametrize(
    ("here", "there", "reason"),
    [
        (_SECRET, None, f"node 1 ({_HOST}, 127.0.0.1) does not have a secret, but node 0 has one"),
        (_SECRET, _OTHER, f"node 1 ({_HOST}, 127.0.0.1) has a different secret than node 0"),
        (None, _OTHER, f"node 1 ({_HOST}, 127.0.0.1) has a secret, but node 0 does not have one"),
    ],
)
@pytest.mark.parametrize("job", ["j", "another"])
def test_a_node_without_the_same_secret_is_refused_and_the_right_one_joins(
    party: Party, here: bytes | None, there: bytes | None, reason: str, job: str
) -> None:
    """A node of another job at a shared port is refused with code 7: its scheduler may retry."""
    port = free_port()
    first = party.start(node_of(0, port, secret=here))
    failure: type[Failure] = WrongUse
    text = f"{reason}: set RDZV_SECRET to the same text on each node"
    if job == "another":
        failure, text = (
            NetworkFailure,
            f"node 1 ({_HOST}, 127.0.0.1) is of job another, but job j uses 127.0.0.1:{port}: "
            "give each job an endpoint of its own",
        )
    with pytest.raises(failure) as refused:
        party.start(node_of(1, port, secret=there, job=job), lambda _: None)()
    assert str(refused.value) == text
    while (heard := party.hear()) != text:
        assert heard.startswith("waiting for node 1 ")
    assert (
        party.start(node_of(1, port, secret=here), lambda _: None)().processes
        == first().processes
        == (1, 2)
    )


def test_a_recorded_hello_cannot_be_sent_again(party: Party, strangers: Any) -> None:
    first, port = _listening(party, secret=_SECRET)
    recorder, replayer = strangers(port), strangers(port)
    nonce = recorder.greet()
    ours, recorded = socket.socketpair()
    with ours, recorded:
        line = _unlimited(ours)
        line.sign(_SECRET, (nonce, _NONCE), is_first=False)
        line.send(**_HELLO)
        hello = recorded.recv(4096)
    replayer.greet()
    replayer.send(hello)
    assert json.loads(replayer.rest())["code"] == 2
    recorder.send(hello)  # on its own connection, the message is valid
    assert b'"store_port"' in recorder.line()
    assert first().processes == (1, 1)


def _unlimited(connected: socket.socket) -> Connection:
    """Return a connection on a pair of sockets, which do not have TCP's settings."""
    connection = Connection.__new__(Connection)
    connection.socket, connection.name = connected, ""
    connection._longest, connection._received_part = 4096, b""
    return connection


def test_a_message_is_accepted_once_and_in_one_direction() -> None:
    ends = socket.socketpair()
    with ends[0], ends[1]:
        lines = [_unlimited(end) for end in ends]
        for is_first, line in zip((True, False), lines, strict=True):
            line.sign(_SECRET, (_NONCE, _NONCE), is_first=is_first)
        lines[0].send(ended=0)
        sent = ends[1].recv(4096, socket.MSG_PEEK)
        assert lines[1].read() == {"ended": 0}
        for number in (0, 1):  # again, and back to the sender
            ends[number].sendall(sent)
            with pytest.raises(
                ValueError, match="^its message is not signed with the secret of this node$"
            ):
                lines[1 - number].read()


def test_a_program_that_pretends_to_be_node_0_is_refused(party: Party) -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        port = impostor.getsockname()[1]
        second = party.start(node_of(1, port, secret=_SECRET))
        connection, _ = impostor.accept()
        with connection:
            connection.sendall(json.dumps({"nonce": _NONCE}).encode() + b"\n")
            connection.sendall(json.dumps({"store_port": 1, "processes": [1, 2]}).encode() + b"\n")
            with pytest.raises(NetworkFailure) as failure:
                second()
    assert str(failure.value) == (
        f"the program at 127.0.0.1:{port} does not have this node's secret: set "
        "RDZV_SECRET to the same text on each node"
    )


@pytest.mark.parametrize(
    "answer",
    [
        {"store_port": 0, "processes": [1, 2]},
        {"store_port": 1, "processes": [1, 10**6]},
        {"processes": [1, 2]},
    ],
)
def test_an_answer_out_of_range_is_refused(party: Party, answer: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        port = impostor.getsockname()[1]
        second = party.start(node_of(1, port))
        connection, _ = impostor.accept()
        with connection:
            connection.sendall(
                json.dumps({"nonce": _NONCE}).encode() + b"\n" + json.dumps(answer).encode() + b"\n"
            )
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


def test_the_secret_is_taken_out_of_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    for env in (
        {"RDZV_SECRET": "0123456789abcdef"},
        {"RDZV_SECRET_FILE": str(file), "RDZV_SECRET": ""},
    ):
        assert take_secret(env) == _SECRET
        assert env == {}
    assert take_secret({"RDZV_SECRET": ""}) is None
    assert repr(node_of(0, 1, secret=_SECRET)) == repr(node_of(0, 1))


def test_a_secret_that_cannot_protect_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef")
    file.chmod(0o644)
    cases = {
        "RDZV_SECRET and RDZV_SECRET_FILE are both set: unset one of them": {
            "RDZV_SECRET": "x",
            "RDZV_SECRET_FILE": "y",
        },
        "the secret of RDZV_SECRET has 5 characters: use 16 to 4096 characters, as "
        "`openssl rand -hex 32` makes them": {"RDZV_SECRET": " short "},
        f"RDZV_SECRET_FILE={file} is open to every user of this machine (mode 644): "
        f"chmod 600 {file}": {"RDZV_SECRET_FILE": str(file)},
        f"RDZV_SECRET_FILE={tmp_path} is not a file: name the file that contains the secret": {
            "RDZV_SECRET_FILE": str(tmp_path)
        },
        f"RDZV_SECRET_FILE={file}x cannot be read (No such file or directory): name a file "
        "that you can read": {"RDZV_SECRET_FILE": f"{file}x"},
    }
    for text, env in cases.items():
        with pytest.raises(WrongUse) as refused:
            take_secret(dict(env))
        assert str(refused.value) == text


# In torchrun.


def test_a_message_of_a_peer_is_printed_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torchrun._log("node 1 (\x1b[2J\x07evil\r\n\u202ehost, 10.0.0.7) is lost")
    assert (
        capsys.readouterr().err
        == r"trainbox: node 1 (\x1b[2J\x07evil \u202ehost, 10.0.0.7) is lost" + "\n"
    )


_PROGRAM = """
import os, sys, torch.distributed.run as real
from trainer.launch import torchrun
{before}
def run(arguments):
    print([name for name in os.environ if name.startswith("RDZV_SECRET")], flush=True)
real.run = run
sys.argv = ["torchrun", "--nnodes=2", "--node-rank=0", "--nproc-per-node=1",
            "--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=j",
            "--rdzv-conf=join_timeout=120,await_name=0", "nothing.py"]
sys.exit(torchrun.main())
"""


def _node_0(ranks: Ranks, port: int, before: str = "", **env: str) -> StartedRanks:
    program = _PROGRAM.format(port=port, before=before)
    return ranks.start(1, program, module="tests.support.program", env=env)


def test_ranks_do_not_inherit_the_secret_and_it_is_not_printed(party: Party, ranks: Ranks) -> None:
    port = free_port()
    node = _node_0(ranks, port, RDZV_SECRET=_SECRET.decode())
    party.start(node_of(1, port, secret=_SECRET), lambda _: None)()
    ended = node.wait()
    assert (ended.codes, ended.out) == ([0], "[]\n")
    assert [line for line in ended.errs[0].splitlines() if "waiting for node 1" not in line] == [
        f"trainbox: 2 nodes met at 127.0.0.1:{port} over lo: 1 + 2 processes"
    ]


def test_a_missing_secret_gives_a_warning_and_a_crash_of_the_rendezvous_code_7(
    ranks: Ranks,
) -> None:
    node = _node_0(
        ranks, 29999, before="import trainer.launch.rendezvous as m; m.host = lambda *_: [][0]"
    )
    ended = node.wait()
    assert (ended.codes, ended.out) == ([7], "")
    assert ended.errs[0].splitlines() == [
        "trainbox: RDZV_SECRET is not set, so every program that reaches 127.0.0.1:29999 can "
        "join this training as a node: "
        "set it to the same text on each node",
        "trainbox: the rendezvous at 127.0.0.1:29999 failed (IndexError: list index out of range): "
        "start the same command again on each machine",
    ]
