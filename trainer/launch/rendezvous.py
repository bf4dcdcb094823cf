"""Where the nodes of a job meet, and how each learns that another one is lost: by connections that
stay open.

Node 0 listens at the endpoint until all are there. Each other node's connection to it, its line,
stays open as long as the node trains, and the kernel asks along it whether the other machine still
answers.
Why: docs/decisions/0012-nodes-meet-on-one-interface.md.
"""

import contextlib
import errno
import ipaddress
import re
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import NetworkFailure, Preempted, WrongUse
from trainer.launch.connection import Line, NotSigned

_REPORT_EVERY_S = 10
_LOOK_EVERY_S, _LOOK_S = 1.0, 5.0
# What strangers can take: connections at a time that have not introduced themselves, the time for
# it, lines in the log.
_MOST_GUESTS, _HELLO_S, _MOST_COMPLAINTS = 64, 10.0, 20
_MOST_NODES, _MOST_PROCESSES, _LONGEST_NAME = 65536, 4096, 256
_LONGEST_ANSWER, _LONGEST_REASON = 2**20, 1000
_SAME_SECRET = "set RDZV_SECRET to the same text on each node"  # noqa: S105 - no password
_ANYWHERE = (
    "start the same command on each machine, with an --rdzv-endpoint that all can reach and no "
    "other program uses"
)
_SIOCGIFADDR = 0x8915

Say = Callable[[str], None]


@dataclass(frozen=True)
class Node:
    """One of `nnodes` machines that start `processes` each for `job`; it looks for the others at
    `endpoint`.

    With `await_name` the endpoint's host may be a name that becomes known only later. With `secret`
    only nodes that have the same are let in, and believed.
    """

    rank: int
    nnodes: int
    processes: int
    endpoint: str
    job: str
    timeout_s: int
    await_name: bool = False
    secret: bytes | None = field(default=None, repr=False)

    @property
    def place(self) -> tuple[str, int]:
        host, _, port = self.endpoint.rpartition(":")
        return host.strip("[]"), int(port)


@dataclass(frozen=True)
class Meeting:
    """All nodes, found.

    `address` is node 0's; `store` is where it listens for torch's store, on node 0 alone.
    """

    address: str
    store_port: int
    store: socket.socket | None
    processes: tuple[int, ...]
    lines: tuple[Line, ...]

    @property
    def interface(self) -> str | None:
        """The name of the network interface by which this node reaches the others; None if it has
        several addresses there.
        """
        return _interface(self.lines[0].connection.getsockname()[0])

    def watch(self, heard: Callable[[str, int], None]) -> None:
        """Call `heard`, on a thread of its own, when the first other node ends or vanishes: with
        what, and the code due here.

        That is the other's own code if it was done (0) or stopped (75), else 7. Node 0 passes on to
        the others what fails: they have no lines among themselves.
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
    """What came over `line`, and the code that is due where it is heard; None if it has not come
    whole.
    """
    try:
        message = line.read()
        if message is None:
            return None
        if "lost" in message:
            return _text(message, "lost"), NetworkFailure.exit_code
        code = _whole(message, "ended", 0, 255)
    except (OSError, ValueError) as error:
        return (
            f"{line.name} is lost ({getattr(error, 'strerror', None) or error})",
            NetworkFailure.exit_code,
        )
    return f"{line.name} ended with {code}", code if code in (
        0,
        Preempted.exit_code,
    ) else NetworkFailure.exit_code


def _whole(message: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Raises ValueError where `message` does not have such a number."""
    value = message.get(name)
    if type(value) is not int or not low <= value <= high:  # a bool is an int, too
        raise ValueError(
            f"{name} is {str(value)[:_LONGEST_NAME]!r}, and not a whole number from {low} to {high}"
        )
    return value


def _text(message: Mapping[str, Any], name: str) -> str:
    """Raises ValueError where `message` does not have such a text."""
    value = message.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_NAME:
        raise ValueError(f"{name} is not a text of 1 to {_LONGEST_NAME} characters")
    return value


def _nonce(message: Mapping[str, Any]) -> str:
    value = _text(message, "nonce")
    if not re.fullmatch("[0-9a-f]{32}", value):
        raise ValueError("nonce is not 32 hex digits")
    return value


@dataclass(frozen=True)
class _Hello:
    """How another node introduces itself."""

    rank: int
    nnodes: int
    processes: int
    job: str
    host: str

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "_Hello":
        """Raises ValueError where a part is missing, of another type or out of range."""
        nnodes = _whole(message, "nnodes", 2, _MOST_NODES)
        rank, processes = (
            _whole(message, "node_rank", 1, nnodes - 1),
            _whole(message, "processes", 1, _MOST_PROCESSES),
        )
        return cls(rank, nnodes, processes, _text(message, "job"), _text(message, "host"))


def meet(node: Node, say: Say) -> Meeting:
    """Wait until all nodes are at the endpoint, telling each 10 s whom for.

    Raises:
        WrongUse: the endpoint's host is unknown or, on node 0, another machine's; the nodes
            contradict each other.
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
            raise NetworkFailure(
                f"waited {node.timeout_s} s in vain for {whom} at "
                f"{node.endpoint}{remark}: {_ANYWHERE}"
            )
        if waited_s >= (self._reports + 1) * _REPORT_EVERY_S:
            self._reports += 1
            waited_s = self._reports * _REPORT_EVERY_S
            self._say(
                f"waiting for {whom} at {node.endpoint}, {waited_s} s of {node.timeout_s} s{remark}"
            )


def _host(node: Node, say: Say) -> Meeting:
    patience = _Patience(node, say)
    listener = _listen(node, patience)
    address = listener.getsockname()[0]
    remark = (
        "an address that only this machine can reach"
        if ipaddress.ip_address(address).is_loopback
        else ""
    )
    if remark and node.await_name:  # not refused, since all nodes may be on this machine
        say(
            f"{node.place[0]}, where node 0 is to be found, is {address} here, {remark}: "
            "if the others are elsewhere, mend /etc/hosts, or set "
            "RDZV_ENDPOINT=ADDRESS:PORT on each"
        )
    with contextlib.ExitStack() as connections, _Reception(node, listener, say) as reception:
        while missing := [rank for rank in range(1, node.nnodes) if rank not in reception.come]:
            patience.with_(_names(missing), remark)
            reception.look()
        come = [reception.come[rank] for rank in range(1, node.nnodes)]
        lines = tuple(line for line, _ in come)
        for line in lines:
            connections.push(reception.keep(line))
        store = connections.enter_context(
            socket.create_server((address, 0), family=listener.family)
        )
        connections.pop_all()
    port, counts = store.getsockname()[1], (node.processes, *(hello.processes for _, hello in come))
    for line in lines:
        line.send(store_port=port, processes=counts)
    return Meeting(address, port, store, counts, lines)


@dataclass
class _Guest:
    """A connection that has not introduced itself yet."""

    line: Line
    deadline: float
    greeted: bool = False


class _Reception:
    """Node 0's side: lets nodes in and keeps strangers out, who can take only so many connections
    for so long.

    `come` has the line and the hello of each node that was let in, by rank.
    """

    def __init__(self, node: Node, listener: socket.socket, say: Say) -> None:
        self.come: dict[int, tuple[Line, _Hello]] = {}
        self._node, self._listener, self._say = node, listener, say
        self._guests: dict[Line, _Guest] = {}  # the oldest first
        self._said: set[str] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> "_Reception":
        return self

    def __exit__(self, *_: object) -> None:
        for line in [*self._guests, *(line for line, _ in self.come.values())]:
            line.connection.close()
        self._selector.close()
        self._listener.close()

    def keep(self, line: Line) -> socket.socket:
        """The line's connection, which stays open after the reception has closed."""
        self.come = {
            rank: (other, hello) for rank, (other, hello) in self.come.items() if other is not line
        }
        return line.connection

    def look(self) -> None:
        """Hear what has come within a second."""
        now = time.monotonic()
        for guest in [guest for guest in self._guests.values() if guest.deadline < now]:
            self._drop(guest.line)
        for key, _ in self._selector.select(_LOOK_EVERY_S):
            if key.data is None:
                self._accept()
            elif key.data.fileno() >= 0:  # it was not dropped in this same round
                self._hear(key.data)

    def _accept(self) -> None:
        # The oldest goes, since a node introduces itself at once. It comes again if it was one.
        while len(self._guests) >= _MOST_GUESTS:
            self._drop(next(iter(self._guests)))
        try:
            connection, peer = self._listener.accept()
        except OSError:  # it has left again, or this process may open no more files
            if self._guests:
                self._drop(next(iter(self._guests)))
            else:
                time.sleep(_LOOK_EVERY_S)
            return
        try:
            line = Line(connection, peer[0])
            self._selector.register(line, selectors.EVENT_READ, line)
        except OSError:
            connection.close()
            return
        self._guests[line] = _Guest(line, time.monotonic() + _HELLO_S)

    def _drop(self, line: Line) -> None:
        self._selector.unregister(line)
        line.connection.close()
        self._guests.pop(line, None)
        self.come = {
            rank: (other, hello) for rank, (other, hello) in self.come.items() if other is not line
        }

    def _hear(self, line: Line) -> None:
        guest = self._guests.get(line)
        try:
            message = line.read()
            if message is None:
                return
            if guest is None:
                raise ValueError("a node that was let in has nothing to say yet")
            if not guest.greeted:
                self._greet(guest, _nonce(message))
            else:
                self._welcome(line, _Hello.of(message))
        except NotSigned as unsigned:
            self._refuse_stranger(line, unsigned)
            self._drop(line)
        except _Refused as refused:
            if guest is not None:
                self._complain(str(refused))
                line.send(refused=str(refused), code=refused.code)
            self._drop(line)
        except ValueError as error:
            if guest is not None and guest.greeted:
                line.send(
                    refused=f"node 0 does not understand this node ({error})",
                    code=WrongUse.exit_code,
                )
            self._drop(line)
        except OSError:
            self._drop(line)

    def _greet(self, guest: _Guest, nonce: str) -> None:
        own = secrets.token_hex(16)
        guest.line.send(nonce=own)
        if self._node.secret is not None:
            guest.line.sign(self._node.secret, (own, nonce), is_first=True)
        guest.greeted = True

    def _welcome(self, line: Line, hello: _Hello) -> None:
        """Let the node that says `hello` in; one started anew, where nobody has noticed its first
        end, replaces itself.
        """
        name = f"node {hello.rank} ({hello.host}, {line.name})"
        self._refuse_another_job(name, hello)
        older = self.come.get(hello.rank)
        if older is not None:
            if older[1].host != hello.host:
                reason = (
                    f"there is a {older[0].name} already, and now {name}: give each machine a "
                    "--node-rank of its own"
                )
                raise _Refused(reason, WrongUse.exit_code)
            reason = f"{name} takes the place of {older[0].name}"
            self._complain(reason)
            older[0].send(
                refused=f"{reason}: give each machine a --node-rank of its own",
                code=WrongUse.exit_code,
            )
            self._drop(older[0])
        line.name = name
        del self._guests[line]
        self.come[hello.rank] = line, hello

    def _refuse_another_job(self, name: str, hello: _Hello) -> None:
        node = self._node
        if hello.job != node.job:
            reason = f"{name} is of job {hello.job}, and job {node.job} meets at {node.endpoint}"
            raise _Refused(reason, NetworkFailure.exit_code)
        if hello.nnodes != node.nnodes:
            raise _Refused(
                f"{name} was started for {hello.nnodes} nodes, and node 0 for {node.nnodes}: "
                "give --nnodes the same number on each",
                WrongUse.exit_code,
            )

    def _refuse_stranger(self, line: Line, unsigned: NotSigned) -> None:
        """Say why, to both sides: most often it is a node whose secret was forgotten."""
        try:
            hello = _Hello.of(unsigned.message)
            name = f"node {hello.rank} ({hello.host}, {line.name})"
            self._refuse_another_job(name, hello)
            if self._node.secret is None:
                raise _Refused(
                    f"{name} has a secret, and node 0 has none: {_SAME_SECRET}", WrongUse.exit_code
                )
            which = (
                "another secret than node 0" if unsigned.signed else "no secret, and node 0 has one"
            )
            raise _Refused(f"{name} has {which}: {_SAME_SECRET}", WrongUse.exit_code)
        except _Refused as refused:
            self._complain(str(refused))
            line.send(plain=True, refused=str(refused), code=refused.code)
        except ValueError:
            return

    def _complain(self, text: str) -> None:
        """Log it once, and not for ever: a stranger can be refused as often as it likes."""
        if text not in self._said and len(self._said) < _MOST_COMPLAINTS:
            self._said.add(text)
            self._say(text)


class _Refused(Exception):
    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


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
            ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
            if ip.is_unspecified or ip.is_multicast:
                raise WrongUse(
                    f"--rdzv-endpoint {node.endpoint} is {ip}, which is not the address of "
                    "one machine: "
                    "give the address by which the others reach node 0"
                )
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
            f"{where} is not an address of this machine: --node-rank 0 belongs on the "
            "machine that --rdzv-endpoint names"
        )
    if last.errno == errno.EADDRINUSE:
        raise NetworkFailure(
            f"port {port} of {where} is in use by another program: give --rdzv-endpoint "
            "another port, the same on each machine"
        )
    raise NetworkFailure(
        f"node 0 cannot listen at {node.endpoint} ({last.strerror}): give --rdzv-endpoint "
        "another port"
    )


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
        except NotSigned as error:
            raise NetworkFailure(
                f"what answers at {node.endpoint} does not know this node's secret: {_SAME_SECRET}"
            ) from error
        except ValueError as error:
            raise NetworkFailure(
                f"another program than Trainbox answers at {node.endpoint}: {_ANYWHERE}"
            ) from error
        patience.with_("node 0", remark)
        time.sleep(_LOOK_EVERY_S)


def _knock(node: Node, patience: _Patience) -> Meeting:
    """What node 0 answers once all are there."""
    with contextlib.ExitStack() as connections, selectors.DefaultSelector() as selector:
        connection = connections.enter_context(
            socket.create_connection(node.place, timeout=_LOOK_S)
        )
        connection.settimeout(None)
        line = Line(connection, f"node 0 ({node.place[0]})", _LONGEST_ANSWER)
        selector.register(line, selectors.EVENT_READ)

        def answer(whom: str) -> Mapping[str, Any]:
            while True:
                patience.with_(whom)
                if selector.select(_LOOK_EVERY_S) and (message := line.read()) is not None:
                    return message

        own = secrets.token_hex(16)
        line.send(nonce=own)
        nonce = _nonce(answer("node 0"))
        if node.secret is not None:
            line.sign(node.secret, (nonce, own), is_first=False)
        host = socket.gethostname()[:_LONGEST_NAME]
        line.send(
            node_rank=node.rank,
            nnodes=node.nnodes,
            job=node.job,
            processes=node.processes,
            host=host,
        )
        try:
            found = answer("the other nodes")
        except NotSigned as unsigned:
            found = unsigned.message
            # of a node 0 without the secret, or of somebody else in its place
            if "refused" not in found:
                raise
        if "refused" in found:
            code = _whole(found, "code", 0, 255)
            raise (WrongUse if code == WrongUse.exit_code else NetworkFailure)(
                str(found["refused"])[:_LONGEST_REASON]
            )
        processes = _processes(found, node)
        met = Meeting(
            connection.getpeername()[0],
            _whole(found, "store_port", 1, 65535),
            None,
            processes,
            (line,),
        )
        connections.pop_all()
        return met


def _processes(answer: Mapping[str, Any], node: Node) -> tuple[int, ...]:
    """How many each node has, as node 0 answers. Raises ValueError."""
    counts = answer.get("processes")
    if not isinstance(counts, list) or len(counts) != node.nnodes:
        raise ValueError(f"processes is not a list of {node.nnodes}")
    found = tuple(_whole({"processes": count}, "processes", 1, _MOST_PROCESSES) for count in counts)
    if found[node.rank] != node.processes:
        raise ValueError(
            f"processes says {found[node.rank]} of this node, which has {node.processes}"
        )
    return found


def _refuse_name(node: Node, error: socket.gaierror) -> None:
    if not node.await_name:
        raise WrongUse(
            f"--rdzv-endpoint {node.endpoint}: this machine knows no host {node.place[0]} "
            f"({error.strerror}): "
            "write its address, as in 192.168.1.10:29400"
        ) from error


def _names(ranks: Collection[int]) -> str:
    return f"node{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _interface(address: str) -> str | None:
    """The name of the interface whose address this is; None if it is not the first one there."""
    if sys.platform != "linux":
        return None
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.is_loopback:
        return "lo"
    if ip.version == 6:
        rows = [
            row.split()
            for row in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines()
        ]
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
