"""Two machines: network namespaces on one bridge, whose cable a test can pull."""

import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import Trainbox, finish
from tests.support.faults import GATED, Gate, clean_digest
from tests.support.processes import Job, listening

_WORDS = (*GATED, "--max-steps", "70", "--checkpoint-steps", "10")
_HOSTS = ("h3", "h4")
_PROCESSES = (2, 1)  # different on each machine


def _ip(*words: str) -> str:
    return subprocess.run(
        [shutil.which("ip") or "ip", *words], check=True, capture_output=True, text=True
    ).stdout


class Hosts:
    """The addresses of the machines, and the endpoint of their rendezvous on the first machine."""

    def __init__(self) -> None:
        shown = [
            json.loads(_ip("-n", host, "-4", "-json", "addr", "show", "eth0")) for host in _HOSTS
        ]
        self.addresses = [interfaces[0]["addr_info"][0]["local"] for interfaces in shown]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.endpoint = f"{self.addresses[0]}:{free.getsockname()[1]}"

    def start(self, trainbox: Trainbox, rank: int) -> "subprocess.Popen[str]":
        host = _HOSTS[rank]
        inside = (
            "nsenter",
            f"--net=/run/netns/{host}",
            "unshare",
            "--uts",
            "sh",
            "-c",
            f'hostname {host} && exec "$@"',
            "sh",
        )
        nodes = ("--nnodes", "2", "--node-rank", str(rank), "--rdzv-endpoint", self.endpoint)
        return trainbox.start(
            "train",
            *_WORDS,
            *nodes,
            "--processes",
            str(_PROCESSES[rank]),
            inside=inside,
        )


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0 or not all(Path(f"/run/netns/{host}").exists() for host in _HOSTS):
        pytest.skip(
            "needs root and the network namespaces h3 and h4, whose eth0 hang on one "
            "bridge by veth-h3 and veth-h4"
        )
    with (Path(tempfile.gettempdir()) / "trainbox-test-hosts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one test at a time may pull cables
        yield Hosts()
        _ip("link", "set", f"veth-{_HOSTS[1]}", "up")


@pytest.fixture(scope="module")
def clean_on_three(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the same training on three processes of one machine."""
    return clean_digest(tmp_path_factory.mktemp("clean-on-three"), (*_WORDS, "--processes", "3"))


@pytest.mark.waits
@pytest.mark.slow
def test_row_40_a_late_node_and_row_48_the_addresses_that_listen(
    trainbox: Trainbox, hosts: Hosts, clean_on_three: str
) -> None:
    gate = Gate(trainbox.folder, 40)
    first = hosts.start(trainbox, 0)
    assert first.stderr is not None
    assert (
        first.stderr.readline()
        == f"trainbox: waiting for node 1 at {hosts.endpoint}, 10 s of 600 s\n"
    )
    second = hosts.start(trainbox, 1)
    gate.wait_for(first)
    for process, ranks, address in zip(
        (first, second), ([0, 1], [2]), hosts.addresses, strict=True
    ):
        job = Job(process, ranks)
        pids = [process.pid, job.launcher, *job.ranks.values()]
        assert set().union(*map(listening, pids)) == {address}
    gate.release()
    ended = finish(first), finish(second)
    assert [each.code for each in ended] == [0, 0], ended
    assert ended[0].digest == clean_on_three
    assert ended[1].err == f"trainbox: 2 nodes met at {hosts.endpoint} over eth0: 2 + 1 processes\n"


@pytest.mark.waits
@pytest.mark.slow
def test_row_38_a_pulled_cable_and_row_39_a_slow_link(
    trainbox: Trainbox, hosts: Hosts, clean_on_three: str
) -> None:
    gate = Gate(trainbox.folder, 50)
    nodes = [hosts.start(trainbox, rank) for rank in range(2)]
    gate.wait_for(nodes[0])
    _ip("link", "set", f"veth-{_HOSTS[1]}", "down")
    gate.release()
    ended = [finish(node) for node in nodes]
    assert [each.code for each in ended] == [7, 7], ended
    others = f"node 1 (h4, {hosts.addresses[1]})", f"node 0 ({hosts.addresses[0]})"
    for each, other in zip(ended, others, strict=True):
        met, lost = each.err.splitlines()
        assert met == f"trainbox: 2 nodes met at {hosts.endpoint} over eth0: 2 + 1 processes"
        assert re.fullmatch(
            rf"trainbox: {re.escape(other)} is lost \((Connection timed out|No route to host)\): "
            "the same command on all nodes resumes from the newest checkpoint, if there is one",
            lost,
        )

    _ip("link", "set", f"veth-{_HOSTS[1]}", "up")
    slow = ("rate", "300kbit", "burst", "16kb", "latency", "400ms")
    subprocess.run(
        [
            shutil.which("tc") or "tc",
            "-n",
            _HOSTS[0],
            "qdisc",
            "replace",
            "dev",
            "eth0",
            "root",
            "tbf",
            *slow,
        ],
        check=True,
    )
    try:
        resumed = [finish(node) for node in [hosts.start(trainbox, rank) for rank in range(2)]]
    finally:
        subprocess.run(
            [shutil.which("tc") or "tc", "-n", _HOSTS[0], "qdisc", "del", "dev", "eth0", "root"],
            check=True,
        )
    assert [each.code for each in resumed] == [0, 0], resumed
    assert re.search("^resume +from step (30|40), ", resumed[0].out, re.MULTILINE), resumed[0].out
    (logged_ms,) = re.findall(
        "^step .*: the exchange of gradients takes .*% of the time \\(([0-9,]+) ms a step\\)",
        resumed[0].out,
        re.MULTILINE,
    )
    assert int(logged_ms.replace(",", "")) >= 100  # a step takes a few ms without the slow link
    assert resumed[0].digest == clean_on_three
