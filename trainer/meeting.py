"""Where the nodes of a job meet, and how each learns that another one is lost: by connections that stay open.

Node 0 listens at the endpoint until all are there. Each other node's connection to it, its line, stays open as long as the
node trains, and the kernel asks along it whether the other machine still answers.
Why: docs/decisions/0012-nodes-meet-on-one-interface.md.
"""

import contextlib
import errno
import ipaddress
import json
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import NetworkFailure, Preempted, WrongUse

_REPORT_EVERY_S = 10
_LOOK_EVERY_S, _LOOK_S = 1.0, 5.0
# A machine that has not answered for this long is lost; a switch that starts anew takes half of it.
_SILENT_S = 60
_PROBE_EVERY_S = 10
_LONGEST_LINE = 4096
_ANYWHERE = "start the same command on each machine, with an --rdzv-endpoint that all can reach and no other program uses"
_SIOCGIFADDR = 0x8915

Say = Callable[[str], None]


@dataclass(frozen=True)
class Node:
    """One of `nnodes` machines that start `processes` each for `job`; it looks for the others at `endpoint`.

    With `await_name` the endpoint's host may be a name that becomes known only later.
    """

    rank: int
    nnodes: int
    processes: int
    endpoint: str
    job: str
    timeout_s: int
    await_name: bool = False

    @property
    def place(self) -> tuple[str, int]:
        host, _, port = self.endpoint.rpartition(":")
        return host.strip("[]"), int(port)


class Line:
    """A connection between two nodes, on which each message is a JSON object on a line of its own."""

    host = ""  # the other machine's own name, once it has said it

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.connection, self.name, self._begun = connection, name, b""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            for option, value in (
                (socket.TCP_KEEPIDLE, _PROBE_EVERY_S),
                (socket.TCP_KEEPINTVL, _PROBE_EVERY_S),
                (socket.TCP_KEEPCNT, _SILENT_S // _PROBE_EVERY_S - 1),
                (socket.TCP_USER_TIMEOUT, _SILENT_S * 1000),
            ):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        return self.connection.fileno()

    def read(self) -> Mapping[str, Any] | None:
        """The next message, None if it is not whole yet; what comes after it stays in the connection.

        Raises:
            OSError: the other end is gone.
            ValueError: it speaks another language.
        """
        arrived = self.connection.recv(_LONGEST_LINE, socket.MSG_PEEK)
        if not arrived:
            raise ConnectionResetError(errno.ECONNRESET, "its connection was closed")
        self._begun += self.connection.recv(arrived.find(b"\n") + 1 or len(arrived))
        if len(self._begun) > _LONGEST_LINE:
            raise ValueError("not a message")
        if not self._begun.endswith(b"\n"):
            return None
        line, self._begun = self._begun, b""
        try:
            message = json.loads(line)
        except RecursionError as error:
            raise ValueError("not a message") from error
        if not isinstance(message, dict):
            raise ValueError("not a message")
        return message

    def send(self, **message: Any) -> None:
        """Say it; one that is gone does not hear it."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")


@dataclass(frozen=True)
class Meeting:
    """All nodes, found. `address` is node 0's; `store` is where it listens for torch's store, on node 0 alone."""

    address: str
    store_port: int
    store: socket.socket | None
    processes: tuple[int, ...]
    lines: tuple[Line, ...]

    @property
    def interface(self) -> str | None:
        """The name of the network interface by which this node reaches the others; None if it has several addresses there."""
        return _interface(self.lines[0].connection.getsockname()[0])

    def watch(self, heard: Callable[[str, int], None]) -> None:
        """Call `heard`, on a thread of its own, when the first other node ends or vanishes: with what, and the code due here.

        That is the other's own code if it was done (0) or stopped (75), else 7. Node 0 passes on to the others what fails:
        they have no lines among themselves.
        """
        threading.Thread(target=self._watch, args=(heard,), daemon=True).start()

    def leave(self, code: int) -> None:
        """Tell the others that this node ends with `code`."""
        for line in self.lines:
            line.send(ended=code)

    def _watch(self, heard: Callable[[str, int], None]) -> None:
        with selectors.DefaultSelector() as selector:
            for line in self.lines:
                selector.register(line, selectors.EVENT_READ, line)
            end = None
            while end is None:
                (key, _), *_ = selector.select()
                end = _end_of(key.data)
        what, due = end
        if due == NetworkFailure.exit_code:
            for line in self.lines:
                if line is not key.data:
                    line.send(lost=what)
        heard(what, due)


def _end_of(line: Line) -> tuple[str, int] | None:
    """What came over `line`, and the code that is due where it is heard; None if it has not come whole."""
    try:
        message = line.read()
    except (OSError, ValueError) as error:
        return f"{line.name} is lost ({getattr(error, 'strerror', None) or error})", NetworkFailure.exit_code
    if message is None:
        return None
    if "lost" in message:
        return str(message["lost"]), NetworkFailure.exit_code
    code = message.get("ended")
    return f"{line.name} ended with {code}", code if code in (0, Preempted.exit_code) else NetworkFailure.exit_code


def meet(node: Node, say: Say) -> Meeting:
    """Wait until all nodes are at the endpoint, telling each 10 s whom for.

    Raises:
        WrongUse: the endpoint's host is unknown or, on node 0, another machine's; the nodes contradict each other.
        NetworkFailure: the endpoint's port is in use, or not all came within the time.
    """
    return _host(node, say) if node.rank == 0 else _join(node, say)


class _Patience:
    """Up to the node's `timeout_s`, with a word each 10 s."""

    def __init__(self, node: Node, say: Say) -> None:
        self._node, self._say, self._begin, self._reports = node, say, time.monotonic(), 0

    def with_(self, whom: str, remark: str = "") -> None:
        """Raises NetworkFailure when there is none left."""
        node, waited_s = self._node, time.monotonic() - self._begin
        remark = f" ({remark})" if remark else ""
        if waited_s >= node.timeout_s:
            raise NetworkFailure(f"waited {node.timeout_s} s in vain for {whom} at {node.endpoint}{remark}: {_ANYWHERE}")
        if waited_s >= (self._reports + 1) * _REPORT_EVERY_S:
            self._reports += 1
            waited_s = self._reports * _REPORT_EVERY_S
            self._say(f"waiting for {whom} at {node.endpoint}, {waited_s} s of {node.timeout_s} s{remark}")


def _host(node: Node, say: Say) -> Meeting:
    patience = _Patience(node, say)
    listener = _listen(node, patience)
    address = listener.getsockname()[0]
    remark = "an address that only this machine can reach" if ipaddress.ip_address(address).is_loopback else ""
    if remark and node.await_name:  # not refused, since all nodes may be on this machine
        say(
            f"{node.place[0]}, where node 0 is to be found, is {address} here, {remark}: "
            "if the others are elsewhere, mend /etc/hosts, or set RDZV_ENDPOINT=ADDRESS:PORT on each"
        )
    come: dict[int, Line] = {}
    processes = {0: node.processes}
    with listener, contextlib.ExitStack() as connections, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)

        def drop(line: Line) -> None:
            with contextlib.suppress(KeyError):  # it was dropped in this same round
                selector.unregister(line)
            line.connection.close()

        while missing := [rank for rank in range(1, node.nnodes) if rank not in come]:
            patience.with_(_names(missing), remark)
            for key, _ in selector.select(_LOOK_EVERY_S):
                if key.fileobj is listener:
                    connection, peer = listener.accept()
                    line = Line(connections.enter_context(connection), peer[0])
                    selector.register(line, selectors.EVENT_READ, line)
                    continue
                line = key.data
                try:
                    if (hello := line.read()) is not None:
                        rank, older = _welcome(node, hello, line, come, say)
                        come[rank], processes[rank] = line, int(hello["processes"])
                        if older is not None:
                            drop(older)
                except (OSError, ValueError, KeyError, TypeError, _Refused):  # it left, or is no node of ours
                    come = {rank: other for rank, other in come.items() if other is not line}
                    drop(line)
        connections.pop_all()
    store = socket.create_server((address, 0), family=listener.family)
    lines = tuple(come[rank] for rank in sorted(come))
    counts = tuple(processes[rank] for rank in range(node.nnodes))
    for line in lines:
        line.send(store_port=store.getsockname()[1], processes=counts)
    return Meeting(address, store.getsockname()[1], store, counts, lines)


class _Refused(Exception):
    pass


def _welcome(node: Node, hello: Mapping[str, Any], line: Line, come: Mapping[int, Line], say: Say) -> tuple[int, Line | None]:
    """The rank of the node that says `hello`, and the line that its own takes the place of."""
    rank, nnodes, job = hello["node_rank"], hello["nnodes"], hello["job"]
    if rank not in range(1, nnodes) or line in come.values():
        raise ValueError(rank)
    host, name = hello["host"], f"node {rank} ({hello['host']}, {line.name})"
    older = come.get(rank)
    code = WrongUse.exit_code
    if job != node.job:
        reason, code = f"{name} is of job {job}, and job {node.job} meets at {node.endpoint}", NetworkFailure.exit_code
    elif nnodes != node.nnodes:
        reason = f"{name} was started for {nnodes} nodes, and node 0 for {node.nnodes}: give --nnodes the same number on each"
    elif older is not None and older.host != host:
        reason = f"there is a {older.name} already, and now {name}: give each machine a --node-rank of its own"
    else:
        line.name, line.host = name, host
        if older is not None:  # started anew, where nobody has told yet that the first one is dead
            reason = f"{name} takes the place of {older.name}"
            say(reason)
            older.send(refused=f"{reason}: give each machine a --node-rank of its own", code=code)
        return int(rank), older
    say(reason)
    line.send(refused=reason, code=code)
    raise _Refused


def _listen(node: Node, patience: _Patience) -> socket.socket:
    """On the endpoint's address, and on no other."""
    host, port = node.place
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            _refuse_name(node, error)
            patience.with_("the name of node 0", str(error.strerror))
            time.sleep(_LOOK_EVERY_S)
            continue
        for family, _, _, _, address in found:
            try:
                return socket.create_server(address, family=family)
            except OSError as error:
                last = error
        is_name = host != found[0][4][0]
        where = f"{host} ({found[0][4][0]})" if is_name else host
        if not (node.await_name and is_name and last.errno == errno.EADDRNOTAVAIL):
            break
        # A pod made anew has another address, and its name may still stand for the old one.
        patience.with_("the address of node 0", f"{where} is not this machine's")
        time.sleep(_LOOK_EVERY_S)
    if last.errno == errno.EADDRNOTAVAIL:
        raise WrongUse(
            f"{where} is not an address of this machine: --node-rank 0 belongs on the machine that --rdzv-endpoint names"
        )
    if last.errno == errno.EADDRINUSE:
        raise NetworkFailure(
            f"port {port} of {where} is in use by another program: give --rdzv-endpoint another port, the same on each machine"
        )
    raise NetworkFailure(f"node 0 cannot listen at {node.endpoint} ({last.strerror}): give --rdzv-endpoint another port")


def _join(node: Node, say: Say) -> Meeting:
    patience = _Patience(node, say)
    while True:
        try:
            return _knock(node, patience)
        except socket.gaierror as error:
            _refuse_name(node, error)
            remark = str(error.strerror)
        except OSError as error:  # not there yet; or it left again, and will be back
            remark = error.strerror or str(error)
        except (ValueError, KeyError, TypeError) as error:
            raise NetworkFailure(f"another program than Trainbox answers at {node.endpoint}: {_ANYWHERE}") from error
        patience.with_("node 0", remark)
        time.sleep(_LOOK_EVERY_S)


def _knock(node: Node, patience: _Patience) -> Meeting:
    """What node 0 answers once all are there."""
    with contextlib.ExitStack() as connections, selectors.DefaultSelector() as selector:
        connection = connections.enter_context(socket.create_connection(node.place, timeout=_LOOK_S))
        connection.settimeout(None)
        line = Line(connection, f"node 0 ({node.place[0]})")
        host = socket.gethostname()
        line.send(node_rank=node.rank, nnodes=node.nnodes, job=node.job, processes=node.processes, host=host)
        selector.register(line, selectors.EVENT_READ)
        while True:
            patience.with_("the other nodes")
            if selector.select(_LOOK_EVERY_S) and (answer := line.read()) is not None:
                if "refused" in answer:
                    raise (WrongUse if answer["code"] == WrongUse.exit_code else NetworkFailure)(answer["refused"])
                peer, processes = connection.getpeername()[0], tuple(answer["processes"])
                met = Meeting(peer, answer["store_port"], None, processes, (line,))
                connections.pop_all()
                return met


def _refuse_name(node: Node, error: socket.gaierror) -> None:
    if not node.await_name:
        raise WrongUse(
            f"--rdzv-endpoint {node.endpoint}: this machine knows no host {node.place[0]} ({error.strerror}): "
            "write its address, as in 192.168.1.10:29400"
        ) from error


def _names(ranks: Collection[int]) -> str:
    return f"node{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _interface(address: str) -> str | None:
    """The name of the interface whose address this is; None if it is not the first one there."""
    if sys.platform != "linux":
        return None
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.is_loopback:
        return "lo"
    if ip.version == 6:
        rows = [row.split() for row in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines()]
        return next((row[5] for row in rows if int(row[0], 16) == int(ip)), None)
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no address
            if answer[20:24] == ip.packed:
                return name
    return None
