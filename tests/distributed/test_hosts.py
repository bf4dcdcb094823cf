"""Two machines that are network namespaces on one bridge, with a cable between them that can be pulled."""

import fcntl
import json
import os
import re
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Trainbox, finish
from tests.distributed.processes import Job, listening

_JOBS = Path(__file__).with_name("jobs.py")
_TASK = (f"{_JOBS}:Shaky", "--device", "cpu", "--log-steps", "1", "--checkpoint-steps", "30", "--run", "r")
_HOSTS = ("h3", "h4")
# Each host's own end of the cable is its eth0, the end at the bridge is veth-h3.
_NEEDED = "needs root and two network namespaces, h3 and h4, whose eth0 hang on one bridge by veth-h3 and veth-h4"


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def _at(host: str) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{host}", "unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh"]


class Hosts:
    """The two hosts' addresses, and the first one's free port."""

    def __init__(self) -> None:
        self.addresses = [
            json.loads(_ip("-n", host, "-4", "-json", "addr", "show", "eth0"))[0]["addr_info"][0]["local"] for host in _HOSTS
        ]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.endpoint = f"{self.addresses[0]}:{free.getsockname()[1]}"

    def start(self, trainbox: Trainbox, rank: int, processes: int) -> "subprocess.Popen[str]":
        nodes = ("--nnodes", "2", "--node-rank", str(rank), "--rdzv-endpoint", self.endpoint, "--processes", str(processes))
        return trainbox.start("train", *_TASK, *nodes, inside=_at(_HOSTS[rank]))


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0 or not all(Path(f"/run/netns/{host}").exists() for host in _HOSTS):
        pytest.skip(_NEEDED)
    with (Path(tempfile.gettempdir()) / "trainbox-test-hosts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one test at a time pulls cables
        yield Hosts()
        for host in _HOSTS:
            _ip("link", "set", f"veth-{host}", "up")
            subprocess.run(["tc", "-n", host, "qdisc", "del", "dev", "eth0", "root"], check=False, capture_output=True)


@pytest.fixture(scope="module")
def digest_of_three(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the same training on three processes of one machine."""
    return Trainbox(tmp_path_factory.mktemp("one-machine")).train(*_TASK, "--processes", "3").digest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_late_node_is_waited_for_and_both_train_as_one_and_listen_to_each_other_alone(
    trainbox: Trainbox, hosts: Hosts, digest_of_three: str
) -> None:
    first = hosts.start(trainbox, 0, 2)
    assert first.stderr is not None
    assert first.stderr.readline() == f"trainbox: waiting for node 1 at {hosts.endpoint}, 10 s of 600 s\n"
    second = hosts.start(trainbox, 1, 1)
    trainbox.wait_for_step(first, "r", 1)
    for process, ranks, address in ((first, [0, 1], hosts.addresses[0]), (second, [2], hosts.addresses[1])):
        job = Job(process, ranks)
        found = set().union(*(listening(pid) for pid in [process.pid, job.launcher, *job.ranks.values()]))
        assert found == {address}
    ended = finish(first), finish(second)
    assert [each.code for each in ended] == [0, 0], ended
    assert ended[0].digest == digest_of_three
    assert ended[1].err == f"trainbox: 2 nodes met at {hosts.endpoint} over eth0: 2 + 1 processes\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_pulled_cable_ends_both_and_the_same_command_goes_on_over_a_slow_link(
    trainbox: Trainbox, hosts: Hosts, digest_of_three: str
) -> None:
    nodes = [hosts.start(trainbox, rank, processes) for rank, processes in enumerate((2, 1))]
    trainbox.wait_for_step(nodes[0], "r", 50)
    _ip("link", "set", f"veth-{_HOSTS[1]}", "down")
    ended = [finish(node) for node in nodes]
    assert [each.code for each in ended] == [7, 7], ended
    for each, other in zip(ended, (f"node 1 (h4, {hosts.addresses[1]})", f"node 0 ({hosts.addresses[0]})"), strict=True):
        lines = each.err.splitlines()
        assert re.fullmatch(
            rf"trainbox: {re.escape(other)} is lost \((Connection timed out|No route to host)\): "
            "the same command goes on from the newest checkpoint, on all nodes",
            lines[1],
        ), each.err
        assert "Traceback" not in each.err
    last_step = trainbox.entries("r", "train")[-1]["step"]
    assert 50 <= last_step < 400

    _ip("link", "set", f"veth-{_HOSTS[1]}", "up")
    slow = [
        "tc",
        "-n",
        _HOSTS[0],
        "qdisc",
        "add",
        "dev",
        "eth0",
        "root",
        "tbf",
        "rate",
        "100mbit",
        "burst",
        "64kb",
        "latency",
        "400ms",
    ]
    subprocess.run(slow, check=True)
    nodes = [hosts.start(trainbox, rank, processes) for rank, processes in enumerate((2, 1))]
    resumed = [finish(node) for node in nodes]
    assert [each.code for each in resumed] == [0, 0], resumed
    assert f"resume     from step {last_step // 30 * 30}, " in resumed[0].out
    assert resumed[0].digest == digest_of_three
