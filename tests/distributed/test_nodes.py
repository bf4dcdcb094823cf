"""Nodes that meet on loopback before they train, and learn when another node ends."""

import json
import os
import queue
import re
import signal
import socket
from typing import Any

import pytest

from tests.support.commands import wait_until
from tests.support.faults import GATED, SignalGate, needs_linux
from tests.support.faults import messages as messages_of
from tests.support.nodes import Party, free_port, node_of
from tests.support.processes import Job
from tests.support.ranks import Ranks, StartedRanks
from tests.support.tiny import TINY
from trainbox.errors import Failure, NetworkFailure, WrongUse
from trainer.programs.ranks.meeting import Meeting

_HOST = socket.gethostname()


@needs_linux
def test_only_a_server_of_the_test_gets_a_free_port() -> None:
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)):
        socket.create_connection(("127.0.0.1", port)).close()


def test_three_nodes_agree_on_the_store_and_on_the_number_of_processes(
    party: Party,
) -> None:
    port = free_port()
    met = [each() for each in [party.start(node_of(rank, port, 3)) for rank in range(3)]]
    assert {each.address for each in met} == {"127.0.0.1"}
    assert {each.processes for each in met} == {(1, 2, 3)}
    assert met[0].store is not None
    assert {each.store_port for each in met} == {met[0].store.getsockname()[1]}
    assert met[0].store.getsockname()[0] == "127.0.0.1"
    assert [connection.name for connection in met[0].connections] == [
        f"node 1 ({_HOST}, 127.0.0.1)",
        f"node 2 ({_HOST}, 127.0.0.1)",
    ]
    assert party.said.empty()
    with pytest.raises(ConnectionRefusedError):  # the port is closed
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.usefixtures("often")
def test_a_node_that_waits_logs_which_nodes_are_missing(party: Party) -> None:
    port = free_port()
    first = party.start(node_of(0, port, 3))
    alone = "an address that only this machine can reach"
    assert party.hear() == f"waiting for nodes 1, 2 at 127.0.0.1:{port}, 1 s of 120 s ({alone})"
    there = queue.Queue[str]()
    second = party.start(node_of(1, port, 3), there.put)
    assert there.get() == f"waiting for the other nodes at 127.0.0.1:{port}, 1 s of 120 s"
    third = party.start(node_of(2, port, 3))
    assert first().processes == second().processes == third().processes == (1, 2, 3)


@pytest.mark.usefixtures("often")
def test_a_node_that_waits_for_the_first_one_logs_the_error(party: Party) -> None:
    port = free_port()
    second = party.start(node_of(1, port))
    assert (
        party.hear() == f"waiting for node 0 at 127.0.0.1:{port}, 1 s of 120 s (Connection refused)"
    )
    party.start(node_of(0, port))()
    assert second().processes == (1, 2)


@pytest.mark.parametrize(
    ("rank", "whom", "why"),
    [
        (0, "node 1", "an address that only this machine can reach"),
        (1, "node 0", "Connection refused"),
    ],
)
def test_a_node_that_never_comes_is_named(party: Party, rank: int, whom: str, why: str) -> None:
    port = free_port()
    with pytest.raises(NetworkFailure) as failure:
        party.start(node_of(rank, port, timeout_s=1))()
    assert str(failure.value) == (
        f"waited 1 s for {whom} at 127.0.0.1:{port} ({why}): start the same "
        "command on each machine, "
        "with an --rdzv-endpoint that all machines can reach and that no other program uses"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unknown_host_is_refused_unless_a_scheduler_will_make_it_known(
    party: Party, rank: int
) -> None:
    node = {"endpoint": "nobody.invalid:29400", "timeout_s": 1}
    with pytest.raises(
        WrongUse,
        match=r"^--rdzv-endpoint nobody.invalid:29400: this machine cannot find the host "
        r"nobody.invalid \(",
    ):
        party.start(node_of(rank, 0, **node))()
    with pytest.raises(
        NetworkFailure,
        match=r"^waited 1 s for (the name of )?node 0 at nobody.invalid:29400 \(",
    ):
        party.start(node_of(rank, 0, **node, await_name=True))()


def test_node_0_on_another_machine_than_the_endpoint_is_refused(party: Party) -> None:
    with pytest.raises(WrongUse) as failure:
        party.start(node_of(0, 0, endpoint="192.0.2.1:29400"))()
    assert str(failure.value) == (
        "192.0.2.1 is not an address of this machine: use --node-rank 0 on the machine "
        "that --rdzv-endpoint names"
    )


def test_a_name_with_an_old_address_is_looked_up_again(
    party: Party, often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that replaces another one gets the old pod's address for some seconds."""
    real, port = socket.getaddrinfo, free_port()
    addresses = iter(["192.0.2.1", "192.0.2.1"])

    def stale(host: str, *rest: Any, **named: Any) -> list[Any]:
        return real(next(addresses, "127.0.0.1") if host == "pod-0" else host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", stale)
    first = party.start(node_of(0, port, endpoint=f"pod-0:{port}", await_name=True))
    endpoint = f"at pod-0:{port}"
    assert (
        party.hear()
        == f"waiting for the address of node 0 {endpoint}, 1 s of 120 s (pod-0 (192.0.2.1) is "
        "not this machine's)"
    )
    second = party.start(
        node_of(1, port, endpoint=f"pod-0:{port}", await_name=True), lambda _: None
    )
    while (heard := party.hear()).startswith("waiting for the address of node 0 "):
        pass
    assert heard == (
        "the host of the endpoint, pod-0, is 127.0.0.1 on this machine, an address that only this "
        "machine can reach: if the other nodes run on other machines, correct /etc/hosts, or set "
        "RDZV_ENDPOINT=ADDRESS:PORT on each"
    )
    assert first().processes == second().processes == (1, 2)
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **named: real("192.0.2.1", *rest, **named)
    )
    with pytest.raises(
        NetworkFailure,
        match=rf"^waited 1 s for the address of node 0 {endpoint} \(pod-0 \(192.0.2.1\)",
    ):
        party.start(node_of(0, port, endpoint=f"pod-0:{port}", await_name=True, timeout_s=1))()


def test_a_port_in_use_is_named(party: Party) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            NetworkFailure, match=rf"^port {port} of 127.0.0.1 is in use by another program: "
        ):
            party.start(node_of(0, port))()


def test_another_program_at_the_endpoint_is_named(party: Party) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        second = party.start(node_of(1, port))
        connection, _ = other.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")
        with (
            connection,
            pytest.raises(
                NetworkFailure,
                match=f"^a program other than Trainbox answers at 127.0.0.1:{port}: ",
            ),
        ):
            second()


@pytest.mark.parametrize(
    ("guest", "failure", "reason"),
    [
        (
            {"nnodes": 4},
            WrongUse,
            f"node 2 ({_HOST}, 127.0.0.1) was started for 4 nodes, but node 0 for 3: set "
            "--nnodes to the same number on each node",
        ),
        (
            {"rank": 1},
            WrongUse,
            f"node 1 (elsewhere, 127.0.0.1) and node 1 ({_HOST}, 127.0.0.1) have the same rank: "
            "give each machine a --node-rank of its own",
        ),
        (
            {"job": "k"},
            NetworkFailure,
            f"node 2 ({_HOST}, 127.0.0.1) is of job k, but job j uses 127.0.0.1:",
        ),
    ],
)
@pytest.mark.usefixtures("often")
def test_a_node_that_contradicts_node_0_is_refused(
    party: Party, guest: dict[str, Any], failure: type[Failure], reason: str
) -> None:
    """The wrong node ends, and the other nodes keep waiting for the right one."""
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "elsewhere")
        first, second = (
            party.start(node_of(0, port, 3)),
            party.start(node_of(1, port, 3), lambda _: None),
        )
        while "waiting for node 2 at" not in party.hear():
            pass
    with pytest.raises(failure) as refused:
        party.start(node_of(**{"rank": 2, "port": port, "nnodes": 3} | guest), lambda _: None)()
    assert str(refused.value).startswith(reason)
    while not (heard := party.hear()).startswith(reason):
        assert heard.startswith("waiting for node 2 ")
    party.start(node_of(2, port, 3))()
    assert first().processes == second().processes == (1, 2, 3)


@pytest.mark.usefixtures("often")
def test_a_restarted_node_replaces_the_dead_one(party: Party) -> None:
    """The dead node's connection stays open for a minute; a node that still runs then ends."""
    port = free_port()
    first = party.start(node_of(0, port, 3))
    older = party.start(node_of(1, port, 3), lambda _: None)
    while "waiting for node 2 at" not in party.hear():
        pass
    newer = party.start(node_of(1, port, 3, processes=5), lambda _: None)
    reason = f"node 1 ({_HOST}, 127.0.0.1) replaces node 1 ({_HOST}, 127.0.0.1)"
    with pytest.raises(
        WrongUse, match=f"^{re.escape(reason)}: give each machine a --node-rank of its own$"
    ):
        older()
    while party.hear() != reason:
        pass
    third = party.start(node_of(2, port, 3), lambda _: None)
    assert first().processes == newer().processes == third().processes == (1, 5, 3)


@pytest.mark.usefixtures("often")
def test_strangers_and_nodes_that_leave_again_do_not_count(party: Party) -> None:
    port = free_port()
    first = party.start(node_of(0, port))
    party.hear()
    hello = {"rank": 1, "nnodes": 2, "job": "j", "processes": 1, "host": "h"}
    strange = [
        b"GET / HTTP/1.1\r\n",
        b"[]\n",
        b"{}\n",
        b"7\n",
        b"\n",
        b"\xff\n",
        b"x" * 10_000,
        b'{"rank": 5',
    ]
    strange += [b"[" * 4095 + b"\n"]
    strange += [
        json.dumps(hello | wrong).encode() + b"\n"
        for wrong in ({"rank": 0}, {"rank": []}, {"nnodes": "2"})
    ]
    for sent in [*strange, json.dumps(hello).encode()]:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(sent)
    assert party.start(node_of(1, port))().processes == first().processes == (1, 2)


@pytest.fixture
def three(party: Party) -> list[Meeting]:
    port = free_port()
    return [met() for met in [party.start(node_of(rank, port, 3)) for rank in range(3)]]


def _watch(node: Meeting, heard: "queue.Queue[tuple[str, int]]") -> None:
    node.watch(heard.put)


def test_all_nodes_learn_that_a_node_is_lost(three: list[Meeting]) -> None:
    """Node 0 reports the loss of node 2 to node 1, which has no connection to node 2."""
    heard = [queue.Queue[tuple[str, int]](), queue.Queue[tuple[str, int]]()]
    for node, messages in zip(three, heard, strict=False):
        _watch(node, messages)
    three[2].connections[0].socket.close()
    reason = f"node 2 ({_HOST}, 127.0.0.1) is lost (its connection was closed)"
    assert [messages.get() for messages in heard] == [(reason, 7), (reason, 7)]


@pytest.mark.parametrize(("code", "due"), [(0, 0), (75, 75), (143, 143), (5, 7), (137, 7)])
def test_the_other_nodes_learn_the_exit_code_of_a_node(
    three: list[Meeting], code: int, due: int
) -> None:
    heard = [queue.Queue[tuple[str, int]](), queue.Queue[tuple[str, int]]()]
    _watch(three[1], heard[1])
    three[0].leave(code)
    assert heard[1].get() == (f"node 0 (127.0.0.1) exited with code {code}", due)
    _watch(three[0], heard[0])
    three[2].leave(code)
    assert heard[0].get() == (
        f"node 2 ({_HOST}, 127.0.0.1) exited with code {code}",
        due,
    )


# Our torchrun, with `then` instead of torch's own part.
_PROGRAM = """
import os, signal, sys, threading, torch.distributed, torch.distributed.run as real
from trainer.programs.ranks import torchrun
torchrun._LOST_S = torchrun._EXITED_S = torchrun._TORCHRUN_S = 0.1
def run(arguments): {then}
real.run = run
sys.argv = ["torchrun", *{options}, "--nnodes=2", "--node-rank=1", "--nproc-per-node=1",
            "--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=j",
            "--rdzv-conf=join_timeout={timeout_s},await_name=0", "nothing.py"]
sys.exit(torchrun.main())
"""


def _start(ranks: Ranks, port: int, timeout_s: int, then: str, *options: str) -> StartedRanks:
    """Start node 1 of two, with more `options` of torchrun."""
    program = _PROGRAM.format(port=port, timeout_s=timeout_s, then=then, options=options)
    return _started(ranks, program)


def _started(ranks: Ranks, program: str) -> StartedRanks:
    run = {"TRAINBOX_RUN": str(ranks.folder)}  # for a user's program
    return ranks.start(1, program, module="tests.support.program", env=run)


def test_a_failed_rendezvous_is_one_line_and_exit_code_7(ranks: Ranks) -> None:
    ended = _start(ranks, free_port(), 1, "print('met')").wait()
    assert (ended.codes, ended.out, len(ended.errs[0].splitlines())) == ([7], "", 1)
    assert ended.errs[0].startswith("trainbox: waited 1 s for node 0 at 127.0.0.1:")


def test_a_lost_store_is_a_failure_of_the_network(party: Party, ranks: Ranks) -> None:
    port = free_port()
    first = party.start(node_of(0, port))
    then = "raise torch.distributed.DistStoreError('wait timeout after 60000ms')"
    node = _start(ranks, port, 120, then)
    heard = queue.Queue[tuple[str, int]]()
    _watch(first(), heard)
    ended = node.wait()
    assert ended.codes == [7]
    assert ended.errs[0].splitlines() == [
        f"trainbox: 2 nodes met at 127.0.0.1:{port} over lo: 1 + 1 processes",
        "trainbox: lost contact with the other nodes (wait timeout after 60000ms)",
    ]
    assert heard.get() == (f"node 1 ({_HOST}, 127.0.0.1) exited with code 7", 7)


def test_a_signal_before_the_ranks_start_stops_the_other_nodes_too(
    party: Party, ranks: Ranks
) -> None:
    port = free_port()
    first = party.start(node_of(0, port))
    node = _start(ranks, port, 120, "os.kill(os.getpid(), signal.SIGTERM); print('lives on')")
    heard = queue.Queue[tuple[str, int]]()
    _watch(first(), heard)
    ended = node.wait()
    assert (ended.codes, ended.out, len(ended.errs[0].splitlines())) == ([143], "", 1)
    assert heard.get() == (f"node 1 ({_HOST}, 127.0.0.1) exited with code 143", 143)


def test_a_script_may_end_earlier_on_another_node(party: Party, ranks: Ranks) -> None:
    port = free_port()
    first = party.start(node_of(0, port))
    then = "sys.stdin = open('go'); print('runs', flush=True); sys.stdin.read()"
    os.mkfifo(ranks.folder / "go")
    node = _start(ranks, port, 120, then, "--no-python")
    with (ranks.folder / "go").open("w"):
        wait_until(lambda: node.printed("out") == ["runs\n"], node)
        first().leave(0)
        line = (
            "trainbox: node 0 (127.0.0.1) exited with code 0, and this node continues until its "
            "own ranks exit\n"
        )
        wait_until(lambda: line in node.printed("err")[0], node)
    assert node.wait().codes == [0]


def test_a_node_notices_a_loss_right_after_another_node_has_ended(
    party: Party, ranks: Ranks
) -> None:
    port = free_port()
    others = [party.start(node_of(rank, port, 3)) for rank in (1, 2)]
    program = _PROGRAM.format(
        port=port,
        timeout_s=120,
        then="print('runs', flush=True); threading.Event().wait()",
        options=("--no-python",),
    )
    for given, used in (
        ("--nnodes=2", "--nnodes=3"),
        ("--node-rank=1", "--node-rank=0"),
        ("torchrun._EXITED_S = ", "torchrun._EXITED_S = 3600.0; torchrun._LOST_S = "),
    ):
        assert given in program
        program = program.replace(given, used)
    node = _started(ranks, program)
    wait_until(lambda: node.printed("out") == ["runs\n"], node)
    others[0]().leave(0)
    others[1]().connections[0].socket.close()
    ended = node.wait()
    assert ended.codes == [7]
    assert "node 2" in ended.errs[0].splitlines()[-1]
    assert "is lost (its connection was closed); torchrun on this node" in ended.errs[0]


@pytest.mark.parametrize("code", [75, None])
def test_torchs_own_part_does_not_outlive_a_node_that_ends_or_is_lost(
    party: Party, ranks: Ranks, code: int | None
) -> None:
    port = free_port()
    first = party.start(node_of(0, port))
    node = _start(ranks, port, 120, "print('runs', flush=True); threading.Event().wait()")
    wait_until(lambda: node.printed("out") == ["runs\n"], node)
    if code is None:
        first().connections[0].socket.close()
        what = "is lost (its connection was closed)"
    else:
        first().leave(code)
        what = f"exited with code {code}"
    ended = node.wait()
    assert ended.codes == [code or 7]
    assert ended.errs[0].splitlines()[1:] == [
        f"trainbox: node 0 (127.0.0.1) {what}; torchrun on this node did not exit, so it is killed"
    ]


_GATED = (*GATED, "--nnodes", "2")


def test_nodes_with_different_settings_name_the_setting(ranks: Ranks) -> None:
    words = ("train", TINY, "--run", "r", "--device", "cpu", "--nnodes", "2")
    place = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    nodes = [
        ranks.launch(*words, *place, "--node-rank", str(rank), "--lr", lr)
        for rank, lr in enumerate(("0.1", "0.2"))
    ]
    ended = [node.wait() for node in nodes]
    assert [node.code for node in ended] == [2, 2]
    found = [[line for line in messages_of(node) if "differs" in line] for node in ended]
    assert [line for (line,) in found] == [
        f"trainbox: learning_rate is {rate} on {_HOST}, but differs in another process: "
        "start the same version with the same arguments and TRAINBOX_ variables on each machine"
        for rate in (0.1, 0.2)
    ]


def test_a_signal_to_one_node_stops_all_with_a_checkpoint(ranks: Ranks) -> None:
    """Node 1 has more CPUs, and computes with the number of threads of node 0."""
    # Node 0 waits in an exchange for node 1, which waits for the signal.
    gate = SignalGate(ranks.folder, 10, 1)
    words = ("train", *_GATED, "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    nodes = [
        ranks.launch(
            *words,
            "--node-rank",
            str(rank),
            env={"OMP_NUM_THREADS": str(rank + 1)},
        )
        for rank in range(2)
    ]
    gate.wait_for(nodes[1])
    job = Job(nodes[1], [1])
    nodes[1].send_signal(signal.SIGINT)
    ended = [node.wait() for node in nodes]
    assert [each.code for each in ended] == [75, 75], ended
    assert "checkpoint saved: resume with the same command" in ended[0].errs[0]
    assert job.living() == []
    assert 11 <= ranks.entries("r", "train")[-1]["step"] < 100  # of 400
