"""Connect the nodes of a job, and notice when a node is lost.

Node 0 listens at the endpoint until all nodes are connected. Each other node keeps its connection
to node 0 open during the whole training. TCP keepalive shows whether the other machine still
answers. The reasons are in docs/decisions/0012-nodes-meet-on-one-interface.md.
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
# Limits on strangers: open connections without a hello, seconds until the hello, lines in the log.
_MOST_GUESTS, _HELLO_S, _MOST_COMPLAINTS = 64, 10.0, 20
_MOST_NODES, _MOST_PROCESSES, _LONGEST_NAME = 65536, 4096, 256
_LONGEST_ANSWER, _LONGEST_REASON = 2**20, 1000
_SAME_SECRET = "set RDZV_SECRET to the same text on each node"  # noqa: S105 - no password
# The remedy if a node cannot find the other nodes.
_ANYWHERE = (
    "start the same command on each machine, with an --rdzv-endpoint that all can reach and no "
    "other program uses"
)
_SIOCGIFADDR = 0x8915  # Linux: read the IPv4 address of an interface

Say = Callable[[str], None]


@dataclass(frozen=True)
class Node:
    """One of the `nnodes` machines of `job`, which starts `processes` ranks.

    The node looks for the other nodes at `endpoint` (`host:port`) for at most `timeout_s` seconds.
    With `await_name`, the host of the endpoint may become known later. With `secret`, only nodes
    that have the same secret may join, and only their messages are accepted.
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
        """Return the host and the port of the endpoint."""
        host, _, port = self.endpoint.rpartition(":")
        return host.strip("[]"), int(port)


@dataclass(frozen=True)
class Meeting:
    """The connected nodes of a job.

    `address` is the address of node 0, and `store_port` is the port for torch's store. `store` is
    the listening socket of the store on node 0, and None on other nodes. `processes` has the number
    of ranks of each node. `lines` has the connections: on node 0 to each other node, else to node
    0.
    """

    address: str
    store_port: int
    store: socket.socket | None
    processes: tuple[int, ...]
    lines: tuple[Line, ...]

    @property
    def interface(self) -> str | None:
        """Return the name of the network interface by which this node reaches the other nodes.

        Return None if the connection uses another than the first IPv4 address. Return None on
        systems other than Linux.
        """
        return _interface(self.lines[0].connection.getsockname()[0])

    def watch(self, heard: Callable[[str, int], None]) -> None:
        """Call `heard`, on a new thread, when the first other node exits or is lost.

        The arguments are a description and the exit code for this node. If the other node succeeded
        (0) or was stopped (75), this node uses the same code, and otherwise 7. Node 0 forwards
        failures, because the other nodes have no connections to each other.
        """
        threading.Thread(target=self._watch, args=(heard,), daemon=True).start()

    def leave(self, code: int) -> None:
        """Report to the other nodes that this node exits with `code`."""
        for line in self.lines:
            line.send(ended=code)

    def _watch(self, heard: Callable[[str, int], None]) -> None:
        """Wait for the end of one other node, forward a failure and call `heard`."""
        # Wait until the first node reports its end, or until its connection breaks.
        with selectors.DefaultSelector() as selector:
            for line in self.lines:
                selector.register(line, selectors.EVENT_READ, line)
            end = None
            while end is None:
                (key, _), *_ = selector.select()
                end = _end_of(key.data)
        # Forward a failure before this node acts on it. The node that failed needs no report.
        what, due = end
        if due == NetworkFailure.exit_code:
            for line in self.lines:
                if line is not key.data:
                    line.send(lost=what)
        heard(what, due)


def _end_of(line: Line) -> tuple[str, int] | None:
    """Read from `line`, and return what happened and the exit code for this node.

    Return None if the message is not complete yet. A broken connection means that the node is lost.
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
    """Return the integer `name` of `message`.

    Raises:
        ValueError: The value is not an integer from `low` to `high`.
    """
    value = message.get(name)
    if type(value) is not int or not low <= value <= high:  # a bool is an int, too
        raise ValueError(
            f"{name} is {str(value)[:_LONGEST_NAME]!r}, and not a whole number from {low} to {high}"
        )
    return value


def _text(message: Mapping[str, Any], name: str) -> str:
    """Return the text `name` of `message`.

    Raises:
        ValueError: The value is not a text, or it is empty or too long.
    """
    value = message.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_NAME:
        raise ValueError(f"{name} is not a text of 1 to {_LONGEST_NAME} characters")
    return value


def _nonce(message: Mapping[str, Any]) -> str:
    """Return the nonce of `message`.

    Raises:
        ValueError: The nonce is not 32 hexadecimal digits.
    """
    value = _text(message, "nonce")
    if not re.fullmatch("[0-9a-f]{32}", value):
        raise ValueError("nonce is not 32 hex digits")
    return value


@dataclass(frozen=True)
class _Hello:
    """The message by which another node introduces itself."""

    rank: int
    nnodes: int
    processes: int
    job: str
    host: str

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "_Hello":
        """Return the hello in `message`.

        Raises:
            ValueError: A field is missing, has another type or is out of range.
        """
        nnodes = _whole(message, "nnodes", 2, _MOST_NODES)
        rank, processes = (
            _whole(message, "node_rank", 1, nnodes - 1),
            _whole(message, "processes", 1, _MOST_PROCESSES),
        )
        return cls(rank, nnodes, processes, _text(message, "job"), _text(message, "host"))


def meet(node: Node, say: Say) -> Meeting:
    """Wait until all nodes are connected, and log every 10 s which nodes are missing.

    Raises:
        WrongUse: The host of the endpoint is unknown, or on node 0 it is not this machine. Or the
            nodes contradict each other.
        NetworkFailure: The port of the endpoint is in use, or a node is missing after `timeout_s`.
    """
    return _host(node, say) if node.rank == 0 else _join(node, say)


class _Patience:
    """A limit of `timeout_s` seconds on waiting, with a log line every 10 s."""

    def __init__(self, node: Node, say: Say) -> None:
        self._node, self._say, self._begin, self._reports = node, say, time.monotonic(), 0

    def with_(self, whom: str, remark: str = "") -> None:
        """Log that this node waits for `whom`, if a line is due.

        Callers repeat this call while they wait. `remark` is added to the message.

        Raises:
            NetworkFailure: The time is up.
        """
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
    """Let all other nodes in, and send them the port of the store."""
    # Listen. A loopback address is suspicious, but not refused: all nodes may be on this machine.
    patience = _Patience(node, say)
    listener = _listen(node, patience)
    address = listener.getsockname()[0]
    remark = (
        "an address that only this machine can reach"
        if ipaddress.ip_address(address).is_loopback
        else ""
    )
    if remark and node.await_name:
        say(
            f"{node.place[0]}, where node 0 is to be found, is {address} here, {remark}: "
            "if the others are elsewhere, mend /etc/hosts, or set "
            "RDZV_ENDPOINT=ADDRESS:PORT on each"
        )
    with contextlib.ExitStack() as connections, _Reception(node, listener, say) as reception:
        # Let nodes in until none is missing.
        while missing := [rank for rank in range(1, node.nnodes) if rank not in reception.come]:
            patience.with_(_names(missing), remark)
            reception.look()
        # Take the connections over, and open the port for torch's store. If anything fails, the
        # stack closes them. `pop_all` keeps them open.
        come = [reception.come[rank] for rank in range(1, node.nnodes)]
        lines = tuple(line for line, _ in come)
        for line in lines:
            connections.push(reception.keep(line))
        store = connections.enter_context(
            socket.create_server((address, 0), family=listener.family)
        )
        connections.pop_all()
    # Send the answer for which all other nodes wait.
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
    """The side of node 0, which lets nodes in and limits what strangers can use.

    `come` has the connection and the hello of each node that has joined, by rank.
    """

    def __init__(self, node: Node, listener: socket.socket, say: Say) -> None:
        self.come: dict[int, tuple[Line, _Hello]] = {}
        self._node, self._listener, self._say = node, listener, say
        self._guests: dict[Line, _Guest] = {}  # in the order of arrival
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
        """Return the connection of `line`, which stays open when the reception closes."""
        self.come = {
            rank: (other, hello) for rank, (other, hello) in self.come.items() if other is not line
        }
        return line.connection

    def look(self) -> None:
        """Process what arrives within a second, and close connections without a hello in time."""
        now = time.monotonic()
        for guest in [guest for guest in self._guests.values() if guest.deadline < now]:
            self._drop(guest.line)
        for key, _ in self._selector.select(_LOOK_EVERY_S):
            if key.data is None:
                self._accept()
            elif key.data.fileno() >= 0:  # negative: closed earlier in this round
                self._hear(key.data)

    def _accept(self) -> None:
        """Accept a connection as a guest, and close the oldest guest if there are too many."""
        # Close the oldest guest: a node introduces itself at once. A slow node connects again.
        while len(self._guests) >= _MOST_GUESTS:
            self._drop(next(iter(self._guests)))
        try:
            connection, peer = self._listener.accept()
        except OSError:  # the peer has closed it, or this process has too many open files
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
        """Close `line`, and forget its guest or its node."""
        self._selector.unregister(line)
        line.connection.close()
        self._guests.pop(line, None)
        self.come = {
            rank: (other, hello) for rank, (other, hello) in self.come.items() if other is not line
        }

    def _hear(self, line: Line) -> None:
        """Read a message from `line`: a nonce first, then a hello.

        Whatever is wrong with the message, only this connection is closed.
        """
        # Read the message. Its meaning depends on what this connection has sent before.
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
        # Close the connection on any fault. A reason is sent only to what looks like a node.
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
        """Send a nonce of this node. With a secret, sign all messages from here on."""
        own = secrets.token_hex(16)
        guest.line.send(nonce=own)
        if self._node.secret is not None:
            guest.line.sign(self._node.secret, (own, nonce), is_first=True)
        guest.greeted = True

    def _welcome(self, line: Line, hello: _Hello) -> None:
        """Let in the node that has sent `hello`.

        A node that was restarted replaces its older connection, whose end nobody may have noticed.

        Raises:
            _Refused: The node is of another job, or another machine has its rank.
        """
        name = f"node {hello.rank} ({hello.host}, {line.name})"
        self._refuse_another_job(name, hello)
        # The rank is taken: by an earlier start on the same machine, or by another machine.
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
        """Check that `hello` has the job and the number of nodes of this node.

        Raises:
            _Refused: One of them differs.
        """
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
        """Log and send the reason for an unsigned message.

        Most often, one of the nodes was started without the secret.
        """
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
        """Log `text` once.

        The number of lines is limited, because a stranger can try as often as it wants.
        """
        if text not in self._said and len(self._said) < _MOST_COMPLAINTS:
            self._said.add(text)
            self._say(text)


class _Refused(Exception):
    """A node that may not join, with the exit code that it should use."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


def _listen(node: Node, patience: _Patience) -> socket.socket:
    """Return a socket that listens only at the address of the endpoint.

    Raises:
        WrongUse: The host is unknown, or it is not the address of this machine.
        NetworkFailure: The port is in use, or the system refuses to listen.
    """
    host, port = node.place
    while True:
        # Look the host up. With `await_name`, an unknown name may become known.
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            _refuse_name(node, error)
            patience.with_("the name of node 0", str(error.strerror))
            time.sleep(_LOOK_EVERY_S)
            continue
        # Listen at the first of its addresses that works.
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
        # A restarted pod has a new address, and for a while its name may have the old one.
        is_name = host != found[0][4][0]
        where = f"{host} ({found[0][4][0]})" if is_name else host
        if not (node.await_name and is_name and last.errno == errno.EADDRNOTAVAIL):
            break
        patience.with_("the address of node 0", f"{where} is not this machine's")
        time.sleep(_LOOK_EVERY_S)
    # No address works: the reason decides the error.
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
    """Connect to node 0 until it lets this node in.

    Raises:
        WrongUse: The host is unknown, or node 0 refuses this node.
        NetworkFailure: Another program answers, the secrets differ, or the time is up.
    """
    patience = _Patience(node, say)
    while True:
        try:
            return _knock(node, patience)
        except socket.gaierror as error:
            _refuse_name(node, error)
            remark = str(error.strerror)
        except OSError as error:  # node 0 has not started yet, or it restarts
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
    """Introduce this node to node 0, and wait for the answer that all nodes have joined.

    Raises:
        OSError: The connection fails, and the caller tries again.
        NotSigned: Node 0 does not have the secret of this node.
        ValueError: The answer is not from Trainbox.
        WrongUse: Node 0 refuses this node, because the nodes contradict each other.
        NetworkFailure: Node 0 belongs to another job, or the time is up.
    """
    with contextlib.ExitStack() as connections, selectors.DefaultSelector() as selector:
        # Connect. From here on the selector limits each wait, and not the socket.
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

        # Exchange nonces. With a secret, both sides sign all messages from here on.
        own = secrets.token_hex(16)
        line.send(nonce=own)
        nonce = _nonce(answer("node 0"))
        if node.secret is not None:
            line.sign(node.secret, (nonce, own), is_first=False)
        # Introduce this node.
        host = socket.gethostname()[:_LONGEST_NAME]
        line.send(
            node_rank=node.rank,
            nnodes=node.nnodes,
            job=node.job,
            processes=node.processes,
            host=host,
        )
        # Wait until all nodes have joined. An unsigned refusal is accepted too: it comes from a
        # node 0 without the secret, or from another program in its place.
        try:
            found = answer("the other nodes")
        except NotSigned as unsigned:
            found = unsigned.message
            if "refused" not in found:
                raise
        if "refused" in found:
            code = _whole(found, "code", 0, 255)
            raise (WrongUse if code == WrongUse.exit_code else NetworkFailure)(
                str(found["refused"])[:_LONGEST_REASON]
            )
        # Check the answer, and keep the connection open.
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
    """Return the number of ranks of each node from the answer of node 0.

    Raises:
        ValueError: The list has another length, an impossible number, or contradicts this node.
    """
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
    """Raise WrongUse for an unknown host, unless its name may become known later."""
    if not node.await_name:
        raise WrongUse(
            f"--rdzv-endpoint {node.endpoint}: this machine knows no host {node.place[0]} "
            f"({error.strerror}): "
            "write its address, as in 192.168.1.10:29400"
        ) from error


def _names(ranks: Collection[int]) -> str:
    """Return `node 1` or `nodes 1, 2`."""
    return f"node{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _interface(address: str) -> str | None:
    """Return the name of the interface that has `address`, or None if it is not found."""
    if sys.platform != "linux":
        return None
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.is_loopback:
        return "lo"
    # Linux lists IPv6 addresses in a file, and it returns the first IPv4 address by an ioctl.
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
                continue  # the interface has no IPv4 address
            if answer[20:24] == ip.packed:
                return name
    return None
