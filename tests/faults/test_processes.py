"""Processes that are killed or stop, ports in use, other jobs, and memory that is used up."""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.commands import Trainbox, finish
from tests.support.faults import GATED, TASKS, Gate, messages, needs_linux, needs_root
from tests.support.processes import Job, listening, wait_until_none
from tests.support.ranks import Ranks

_SLOW = pytest.mark.slow
_FORKED_ON_TWO = (*GATED, "--checkpoint-steps", "10")
_ON_TWO = (*_FORKED_ON_TWO, "--processes", "2")


def _step_of_resume(out: str) -> int:
    match = re.search(r"^resume +from step (\d+), ", out, re.MULTILINE)
    return int(match[1]) if match else 0


@pytest.mark.slow
@needs_linux
def test_row_01_a_rank_killed_again_and_again(
    trainbox: Trainbox, ranks: Ranks, clean_on_two: str
) -> None:
    """Kill one of two ranks at random steps; at most the steps after a checkpoint are lost.

    The first and the last start run the real command. In the others, the ranks are forks.
    """
    draw = random.Random(1)  # noqa: S311
    starts = range(10, 370, 30)
    for first in starts:
        rank, step = draw.choice((0, 1)), draw.randrange(first, first + 30)
        gate = Gate(trainbox.folder, step, rank)
        if first in (starts[0], starts[-1]):
            _kill_a_rank_of_the_command(trainbox, rank, gate)
        else:
            _kill_a_forked_rank(ranks, rank, gate)
        gate.release()
        lost = ranks.entries("r", "train")[-1]["step"] - max(_saved(ranks.folder), default=0)
        assert 0 <= lost <= 20  # the newest checkpoint may be incomplete
    assert ranks.train(2, *_FORKED_ON_TWO).digest == clean_on_two


def _kill_a_rank_of_the_command(trainbox: Trainbox, rank: int, gate: Gate) -> None:
    process = trainbox.start("train", *_ON_TWO)
    gate.wait_for(process)
    job = Job(process, 2)
    os.kill(job.ranks[str(rank)], signal.SIGKILL)
    ended = finish(process)
    assert ended.code == 137, ended.err
    assert (
        f"rank {rank} was killed by SIGKILL: the same command resumes from the newest checkpoint, "
        "if there is one" in ended.err
    )
    job.wait_until_gone()


def _kill_a_forked_rank(ranks: Ranks, rank: int, gate: Gate) -> None:
    training = ranks.start(2, "train", *_FORKED_ON_TWO)
    gate.wait_for(training)
    training.send_signal(signal.SIGKILL, rank)
    ended = training.wait()
    assert ended.codes[rank] == -signal.SIGKILL, ended
    assert ended.codes[1 - rank] == 7, ended


@pytest.mark.slow
@pytest.mark.rare
@needs_linux
def test_row_02_all_ranks_killed(trainbox: Trainbox, ranks: Ranks, clean_on_two: str) -> None:
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
    resumed = ranks.train(2, *_FORKED_ON_TWO)
    assert _step_of_resume(resumed.out) in (180, 190)
    assert resumed.digest == clean_on_two


def _saved(folder: Path) -> list[int]:
    return [
        int(path.stem.removeprefix("step-"))
        for path in (folder / "runs/r/checkpoints").glob("*.json")
    ]


def _listening(pids: list[int]) -> set[str]:
    """Return the inodes of the sockets on which these processes wait for connections."""
    links = set()
    for pid in pids:
        for number in Path(f"/proc/{pid}/fd").iterdir():
            try:
                links.add(str(number.readlink()))
            except FileNotFoundError:  # just closed
                continue
    return {inode for inode in _all_listening() if f"socket:[{inode}]" in links}


def _all_listening() -> set[str]:
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    return {words[9] for table in tables for line in table if (words := line.split())[3] == "0A"}


@needs_linux
@pytest.mark.slow
def test_row_03_the_agent_killed_and_row_48_only_loopback_listens(trainbox: Trainbox) -> None:
    """If torchrun's agent is killed, its ranks end and no port stays in use.

    Before that, the ranks listen on loopback only, and the launcher and the agent do not listen.
    """
    gate = Gate(trainbox.folder, 100, 1)  # rank 0 waits for rank 1
    process = trainbox.start("train", *_ON_TWO)
    gate.wait_for(process)
    job = Job(process, 2)
    assert listening(process.pid) == listening(job.launcher) == set()
    for rank in job.ranks.values():
        assert listening(rank) <= {"127.0.0.1"}
    held = _listening(job.living())
    assert held
    os.kill(job.launcher, signal.SIGKILL)
    ended = finish(process)
    assert ended.code == 137
    job.wait_until_gone()
    assert held & _all_listening() == set()
    assert max(_saved(trainbox.folder)) in (80, 90)


@needs_linux
@pytest.mark.parametrize(("kills", "steps"), [(8, 240), pytest.param(50, 1500, marks=_SLOW)])
def test_row_04_killed_at_random_moments_and_during_saves(
    ranks: Ranks, digest_of: Callable[..., str], kills: int, steps: int
) -> None:
    """Kill half of the starts of one run in a step, and half of them while a file is written."""
    words = (f"{TASKS}:HeldInSaves", *GATED[1:], "--max-steps", str(steps), "--eval-every", "9")
    saving = 0
    for number in range(kills):
        draw = random.Random(number)  # noqa: S311
        step = "save" if number % 2 == 0 else _newest(ranks.folder) + draw.randint(1, 9)
        gate = Gate(ranks.folder, step)
        env = {"HELD_FSYNC": str(draw.randint(1, 20))}
        training = ranks.start(1, "train", *words, "--checkpoint-steps", "3", env=env)
        gate.wait_for(training)
        training.send_signal(signal.SIGKILL)
        assert training.wait().codes == [-signal.SIGKILL]
        gate.release()
        saving += any((ranks.folder / "runs/r").rglob("*.tmp"))
    assert saving >= kills // 2
    ended = ranks.train(1, *words)
    assert "damaged" not in ended.out
    assert ended.digest == digest_of(1, *words)
    assert not list((ranks.folder / "runs/r").rglob("*.tmp"))


def _newest(folder: Path) -> int:
    """Return the largest step of any file of a checkpoint, also of an incomplete one."""
    files = (folder / "runs/r/checkpoints").glob("step-*")
    return max((int(file.name.split(".")[0].removeprefix("step-")) for file in files), default=0)


@pytest.mark.waits
@pytest.mark.slow  # torchrun waits 30 s before it kills a stopped rank
@needs_linux
def test_row_10_a_rank_that_hangs(trainbox: Trainbox, ranks: Ranks, clean_on_two: str) -> None:
    gate = Gate(trainbox.folder, 100, 1)
    process = trainbox.start("60", "3", "train", *_FORKED_ON_TWO, module="tests.support.supervised")
    gate.wait_for(process)
    job = Job(process, 2)
    os.kill(job.ranks["1"], signal.SIGSTOP)
    ended = finish(process)
    assert ended.code == 7
    assert messages(ended)[0] == (
        "trainbox: rank 1 hung and was killed: the same command resumes from the newest "
        "checkpoint, if there is one"
    )
    assert "lost contact with another process: " in messages(ended)[1]
    assert len(messages(ended)) == 2
    job.wait_until_gone()
    gate.release()
    resumed = ranks.train(2, *_FORKED_ON_TWO)
    assert _step_of_resume(resumed.out) in (80, 90)
    assert resumed.digest == clean_on_two


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_row_21_the_port_of_the_rendezvous_is_taken(ranks: Ranks, taken_port: int) -> None:
    """The port belongs to a program that is not a rendezvous."""
    endpoint = f"127.0.0.1:{taken_port}"
    nodes = ("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", endpoint, "--rdzv-id", "x")
    ended = ranks.launch("train", *GATED, *nodes).wait()
    assert ended.code == 7
    (message,) = messages(ended)
    assert message.startswith(
        f"trainbox: port {taken_port} of 127.0.0.1 is in use by another program: "
    )
    assert "Traceback" not in ended.errs[0]
    assert not (ranks.folder / "runs").exists()


@pytest.mark.slow
def test_row_21_a_taken_port_of_the_environment_is_not_used_on_one_node(
    trainbox: Trainbox, taken_port: int
) -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken_port)}
    trainbox.train(*GATED, "--processes", "2", "--max-steps", "2", env=env)


@pytest.mark.slow
@pytest.mark.rare
def test_row_22_four_jobs_on_one_host(trainbox: Trainbox, clean_on_two: str) -> None:
    """Start four commands together that differ only in the run's name.

    The ranks of different jobs do not meet, and each job ends with the bits of a clean run.
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


def _limit_memory(pid: int) -> None:
    """Let a process have at most 1 GiB of addresses more than it has now."""
    size_kib = re.search(
        r"^VmSize:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
    )
    assert size_kib
    limit = (int(size_kib[1]) + 2**20) * 1024
    subprocess.run(
        [shutil.which("prlimit") or "prlimit", f"--pid={pid}", f"--as={limit}"], check=True
    )


@needs_linux
@needs_root
def test_row_47_the_hosts_memory_used_up(ranks: Ranks) -> None:
    """From step 40 on, a rank may have 1 GiB more of addresses; rank 1 asks for 16 GiB."""
    words = (f"{TASKS}:Hungry", *GATED[1:], "--checkpoint-steps", "10")
    gate = Gate(ranks.folder, 40, 1)
    training = ranks.start(2, "train", *words)
    gate.wait_for(training)
    for pid in training.pids:
        _limit_memory(pid)
    gate.release()
    ended = training.wait()
    assert ended.codes[1] == 5, ended
    (message,) = [line for line in ended.errs[1].splitlines() if line.startswith("trainbox: ")]
    assert "the host's memory is used up" in message
    assert "lower --batch-size or --workers" in message
    assert "Traceback" not in "".join(ended.errs)
    assert 40 in _saved(ranks.folder)


@pytest.mark.slow
@needs_linux
@needs_root
def test_row_47_the_command_reports_used_up_memory_once_and_leaves_no_process(
    trainbox: Trainbox,
) -> None:
    """Start the real launcher and torchrun; the ranks are limited as in the test above."""
    words = (f"{TASKS}:Hungry", *GATED[1:], "--processes", "2", "--checkpoint-steps", "10")
    gate = Gate(trainbox.folder, 40, 1)
    process = trainbox.start("train", *words)
    gate.wait_for(process)
    job = Job(process, 2)
    for pid in job.ranks.values():
        _limit_memory(pid)
    gate.release()
    ended = finish(process)
    assert ended.code == 5, ended.err
    (message,) = messages(ended)
    assert "the host's memory is used up" in message
    assert "lower --batch-size or --workers" in message
    assert "Traceback" not in ended.err
    job.wait_until_gone()
    assert 40 in _saved(trainbox.folder)


@contextlib.contextmanager
def _memory_cgroup(limit_mib: int) -> Iterator[Path]:
    """Make a cgroup with a limit, or skip the test. Its processes have ended after the body."""
    version_1 = Path("/sys/fs/cgroup/memory")
    root, name = (
        (version_1, "limit_in_bytes") if version_1.is_dir() else (Path("/sys/fs/cgroup"), "max")
    )
    folder = root / f"trainbox-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / f"memory.{name}").write_text(str(limit_mib * 2**20))
    except OSError as error:
        pytest.skip(f"no cgroup with a memory limit can be made: {error}")
    yield folder
    folder.rmdir()


@needs_linux
@needs_root
def test_row_47_a_process_that_the_kernel_kills(trainbox: Trainbox) -> None:
    (trainbox.folder / "eat.py").write_text("x = [b'x' * 2**24 for _ in range(64)]")
    with _memory_cgroup(300) as cgroup:
        inside = ("sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh")
        ended = finish(trainbox.start("run", "--restarts", "3", "eat.py", inside=inside))
    assert ended.code == 5, ended.err
    assert "trainbox: the memory limit of 300 MiB is used up" in ended.err
    assert "restart" not in ended.err


@needs_linux
def test_row_47_a_batch_that_does_not_fit(ranks: Ranks) -> None:
    """One process has no memory for 16 examples, and neither has one of two, at once or later."""
    words = (f"{TASKS}:Cramped", "--device", "cpu", "--batch-size", "16", "--max-steps", "45")
    alone = ranks.train(1, *words, "--run", "alone")
    line = (
        r"^the host's memory is used up \(.*DefaultCPUAllocator: can't allocate memory: .*\) "
        r"with 16 examples at once: restarting with"
    )
    assert re.search(line, alone.out, re.MULTILINE)
    assert (
        "; batch norm now sees 8 examples at once\nbatch      16 = 1 process x 8 x 2 accumulation\n"
        in alone.out
    )

    two = (*words, "--batch-size", "32")
    asked = ranks.train(2, *two, "--accumulation", "2", "--run", "asked")
    ended = ranks.train(2, *two, "--set", "first=2", "--run", "cut")
    assert "process 1: the host's memory is used up (" in ended.out
    assert ended.out.count("restarting with smaller micro-batches of the same batch") == 1
    assert "\nbatch      32 = 2 processes x 8 x 2 accumulation\n" in ended.out
    assert ended.digest == asked.digest
    early = ranks.train(2, *two, "--run", "early", "--rehearsal")
    assert "process 1: the host's memory is used up (" in early.out
    assert early.digest == asked.digest


@needs_linux
@pytest.mark.parametrize(
    ("task", "gate", "where"),
    [
        ("Loaded", "gate-example", r"waiting for a batch of the data \(.*/trainer/data/"),
        ("Gated", "gate-0-3", r"waiting for _wait_at \(.*fault_tasks.py, line \d+\)"),
    ],
)
@pytest.mark.slow
def test_a_single_process_that_hangs_is_ended_with_its_place(
    trainbox: Trainbox, task: str, gate: str, where: str
) -> None:
    os.mkfifo(trainbox.folder / gate)
    words = ["train", f"{TASKS}:{task}", "--device", "cpu", "--run", "r", "--no-rehearsal"]
    words += ["--workers", "1"]
    ended = trainbox(*words, "--hang-minutes", "0.1")
    assert ended.code == 7, ended.err
    assert re.search(rf"no step for 0.1 minutes, {where}", ended.err)
    wait_until_none(str(trainbox.folder))
    (trainbox.folder / gate).unlink()
    assert trainbox(*words).code == 0  # a start on a busy machine may take more than 6 s
