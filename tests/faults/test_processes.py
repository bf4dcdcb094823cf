"""Processes that are killed or stand still, ports that are taken, neighbours, and no memory
left.
"""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import Trainbox, clean_environment, finish
from tests.support.faults import GATED, TASKS, Gate, clean_digest, messages, needs_linux, needs_root
from tests.support.paths import SUPPORT
from tests.support.processes import Job, listening

_ON_TWO = (*GATED, "--processes", "2", "--checkpoint-steps", "10")


def _step_of_resume(out: str) -> int:
    match = re.search(r"^resume +from step (\d+), ", out, re.MULTILINE)
    return int(match[1]) if match else 0


@pytest.mark.slow
@needs_linux
@pytest.mark.timeout(1200)
def test_row_01_a_rank_killed_again_and_again(trainbox: Trainbox, clean_on_two: str) -> None:
    """Twenty times, one of the two at a step drawn by lot: never more than the steps since the last
    checkpoint are lost.
    """
    draw = random.Random(1)  # noqa: S311
    for first in range(10, 370, 18):
        rank, step = draw.choice("01"), draw.randrange(first, first + 18)
        gate = Gate(trainbox.folder, step, int(rank))
        process = trainbox.start("train", *_ON_TWO)
        gate.wait_for(process)
        job = Job(process, 2)
        os.kill(job.ranks[rank], signal.SIGKILL)
        ended = finish(process)
        assert ended.code == 137, ended.err
        assert (
            f"rank {rank} was killed by SIGKILL: the same command goes on from the "
            "newest checkpoint" in ended.err
        )
        job.wait_until_gone()
        gate.release()
        lost = trainbox.entries("r", "train")[-1]["step"] - max(_saved(trainbox.folder), default=0)
        assert 0 <= lost <= 20  # the checkpoint of the last ten may not be whole yet
    ended = trainbox.train(*_ON_TWO)
    assert ended.digest == clean_on_two


@pytest.mark.slow
@needs_linux
def test_row_02_all_ranks_killed(trainbox: Trainbox, clean_on_two: str) -> None:
    gates = [Gate(trainbox.folder, 200, rank) for rank in (0, 1)]
    process = trainbox.start("train", *_ON_TWO)
    for gate in gates:
        gate.wait_for(process)
    job = Job(process, 2)
    for pid in job.ranks.values():
        os.kill(pid, signal.SIGKILL)
    ended = finish(process)
    assert ended.code == 137, ended.err
    job.wait_until_gone()
    for gate in gates:
        gate.release()
    resumed = trainbox.train(*_ON_TWO)
    assert _step_of_resume(resumed.out) in (180, 190)
    assert resumed.digest == clean_on_two


def _saved(folder: Path) -> list[int]:
    return [
        int(path.stem.removeprefix("step-"))
        for path in (folder / "runs/r/checkpoints").glob("*.json")
    ]


def _listening(pids: list[int]) -> set[str]:
    """The sockets, by inode, on which these processes wait for connections."""
    links = set()
    for pid in pids:
        for number in Path(f"/proc/{pid}/fd").iterdir():
            try:
                links.add(str(number.readlink()))
            except FileNotFoundError:  # closed meanwhile
                continue
    return {inode for inode in _all_listening() if f"socket:[{inode}]" in links}


def _all_listening() -> set[str]:
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    return {words[9] for table in tables for line in table if (words := line.split())[3] == "0A"}


@needs_linux
def test_row_03_the_agent_killed(trainbox: Trainbox) -> None:
    """torchrun's agent is gone: no rank trains on unseen, no port stays taken."""
    gate = Gate(trainbox.folder, 100, 1)  # rank 0 is at work, and waits for this one
    process = trainbox.start("train", *_ON_TWO)
    gate.wait_for(process)
    job = Job(process, 2)
    held = _listening(job.living())
    assert held
    os.kill(job.launcher, signal.SIGKILL)
    ended = finish(process)
    assert ended.code == 137
    job.wait_until_gone()
    assert held & _all_listening() == set()
    assert max(_saved(trainbox.folder)) in (80, 90)


@needs_linux
def test_row_04_killed_fifty_times_at_random_moments_and_during_saves(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One process that has torch forks fifty trainings of one run: each is killed, half of them
    while a save is written.
    """
    words = (*GATED, "--max-steps", "1500", "--eval-every", "9")  # more than fifty forks come to
    killed = str(SUPPORT / "killed.py")
    done = subprocess.run(
        [sys.executable, killed, "50", *words],
        cwd=tmp_path,
        env=clean_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    moments = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("killed ")]
    assert len(moments) == 50
    assert moments.count("saving") >= 15  # a temporary file lay there when it was dead
    assert "damaged" not in done.stdout
    match = re.search(r"^digest +(\w+)", done.stdout, re.MULTILINE)
    assert match and match[1] == clean_digest(tmp_path_factory.mktemp("clean"), words)
    assert not list((tmp_path / "runs/r").rglob("*.tmp"))


@pytest.mark.slow  # torchrun gives a rank that does not hear 30 s before it kills it
@needs_linux
@pytest.mark.timeout(600)
def test_row_10_a_rank_that_stands_still(trainbox: Trainbox, clean_on_two: str) -> None:
    words = ("train", *GATED, "--checkpoint-steps", "10")
    gate = Gate(trainbox.folder, 100, 1)
    process = trainbox.start("60", "3", *words, module="tests.support.supervised")
    gate.wait_for(process)
    job = Job(process, 2)
    os.kill(job.ranks["1"], signal.SIGSTOP)
    ended = finish(process)
    assert ended.code == 7
    assert messages(ended)[0] == (
        "trainbox: rank 1 stood still and was killed: the same command goes on from the "
        "newest checkpoint"
    )
    assert "lost contact with another process: " in messages(ended)[1]
    assert len(messages(ended)) == 2
    job.wait_until_gone()
    gate.release()
    resumed = trainbox.train(*_ON_TWO)
    assert _step_of_resume(resumed.out) in (80, 90)
    assert resumed.digest == clean_on_two


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_row_21_the_port_to_meet_at_is_taken(trainbox: Trainbox, taken_port: int) -> None:
    """By a program that is no rendezvous."""
    endpoint = f"127.0.0.1:{taken_port}"
    nodes = ("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", endpoint, "--rdzv-id", "x")
    ended = trainbox("train", *GATED, *nodes)
    assert ended.code == 7
    warning, message = messages(ended)
    assert warning.startswith("trainbox: RDZV_SECRET is not set: ")
    assert message.startswith(
        f"trainbox: port {taken_port} of 127.0.0.1 is in use by another program: "
    )
    assert "Traceback" not in ended.err
    assert not (trainbox.folder / "runs").exists()


@pytest.mark.slow
def test_row_21_a_taken_port_of_the_environment_is_not_used_on_one_node(
    trainbox: Trainbox, taken_port: int
) -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken_port)}
    trainbox.train(*GATED, "--processes", "2", "--max-steps", "2", env=env)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_row_22_four_jobs_on_one_host(trainbox: Trainbox, clean_on_two: str) -> None:
    """Started together with the same words but for the run's name: none meets another's ranks, and
    each ends with its bits.
    """
    processes = [
        trainbox.start("train", *GATED[:-1], f"run-{i}", "--processes", "2") for i in range(4)
    ]
    ended = [finish(process) for process in processes]
    assert [end.code for end in ended] == [0] * 4, [end.err for end in ended]
    assert {end.digest for end in ended} == {clean_on_two}
    assert sorted(path.name for path in (trainbox.folder / "runs").iterdir()) == [
        f"run-{i}" for i in range(4)
    ]


@needs_linux
def test_row_48_nobody_outside_can_write_to_the_store_of_one_machine(trainbox: Trainbox) -> None:
    """What listens, listens on loopback; and it is the ranks' gloo alone, since they meet in a
    file.
    """
    gate = Gate(trainbox.folder, 40)
    process = trainbox.start("train", *_ON_TWO)
    gate.wait_for(process)
    job = Job(process, 2)
    assert listening(process.pid) == listening(job.launcher) == set()
    for rank in job.ranks.values():
        assert listening(rank) <= {"127.0.0.1"}
    gate.release()
    assert finish(process).code == 0


@needs_linux
@needs_root
def test_row_47_the_hosts_memory_used_up(trainbox: Trainbox) -> None:
    """Rank 1 may have 4 GiB of addresses from step 40 on; it wants 16."""
    words = (f"{TASKS}:Hungry", *GATED[1:], "--processes", "2", "--checkpoint-steps", "10")
    gate = Gate(trainbox.folder, 40, 1)
    process = trainbox.start("train", *words)
    gate.wait_for(process)
    job = Job(process, 2)
    for pid in job.ranks.values():
        size_kib = re.search(
            r"^VmSize:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
        )
        assert size_kib
        limit = (int(size_kib[1]) + 2**20) * 1024  # a GiB more than it has
        subprocess.run(
            [shutil.which("prlimit") or "prlimit", f"--pid={pid}", f"--as={limit}"], check=True
        )
    gate.release()
    ended = finish(process)
    assert ended.code == 5, ended.err
    assert len(messages(ended)) == 1
    assert "the host's memory is used up" in ended.err
    assert "lower --batch-size or --workers" in ended.err
    assert "Traceback" not in ended.err
    job.wait_until_gone()
    assert 40 in _saved(trainbox.folder)


@needs_linux
def test_row_47_a_batch_that_does_not_fit(trainbox: Trainbox) -> None:
    """Alone it has no room for 16 examples at once; of two processes, one has none for 16 in its
    second step.
    """
    words = (f"{TASKS}:Cramped", "--device", "cpu", "--batch-size", "16", "--max-steps", "45")
    alone = trainbox.train(*words, "--batch-size", "auto", "--run", "alone")
    line = (
        r"^the host's memory is used up \(.*DefaultCPUAllocator: can't allocate memory: .*\) "
        r"with 16 examples at once: cut into"
    )
    assert re.search(line, alone.out, re.MULTILINE)
    assert (
        "; batch norm sees 8 examples at once now\nbatch      16 = 1 process x 8 x 2 accumulation\n"
        in alone.out
    )

    two = (*words, "--batch-size", "32", "--processes", "2")
    asked = trainbox.train(*two, "--accumulation", "2", "--run", "asked")
    ended = trainbox.train(*two, "--set", "first=2", "--run", "cut")
    assert "\nprocess 1: the host's memory is used up (" in ended.out
    assert ended.out.count("cut into smaller parts, the batch stays") == 1
    assert "\nbatch      32 = 2 processes x 8 x 2 accumulation\n" in ended.out
    assert ended.digest == asked.digest
