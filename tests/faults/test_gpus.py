"""GPUs that fail while two processes train.

The NVML stub provides the GPUs, and everything else is real (watched.py).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import Ended, clean_environment, wait_until
from tests.support.faults import GATED, Gate, checkpoints, messages, needs_linux
from tests.support.nvml_stub.build import build_stub, stub_env, write_config
from tests.support.paths import SUPPORT
from tests.support.processes import Job

pytestmark = [needs_linux, pytest.mark.slow, pytest.mark.waits]
WATCHED = SUPPORT / "watched.py"
UUID = "GPU-00000000-0000-0000-0000-000000000001"
_ON_TWO_GPUS = ("train", GATED[0], *GATED[3:], "--gpus", "2", "--checkpoint-steps", "1000")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("the NVML stub needs a C compiler: cc is not on PATH")
    return build_stub(tmp_path_factory.mktemp("nvml"))


class Watched:
    """Trainings on two GPUs of the NVML stub in one folder."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder, self.library = folder, library
        self.started: list[subprocess.Popen[str]] = []
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.put()

    def put(self, **keys: object) -> None:
        """Set the answers of the driver; `gpu1__xid` is the key gpu1.xid."""
        config = {key.replace("__", "."): value for key, value in keys.items()}
        self.config = write_config(self.folder / "nvml.conf", "h100", config, count=2)

    def start(self, *words: str, budget_s: float = 50) -> subprocess.Popen[str]:
        with (self.folder / "out").open("w") as out, (self.folder / "err").open("w") as err:
            process = subprocess.Popen(
                [sys.executable, WATCHED, str(budget_s), *_ON_TWO_GPUS, *words],
                cwd=self.folder,
                env=clean_environment(
                    OMP_NUM_THREADS="1",
                    TMPDIR=str(self.temporary),
                    **stub_env(self.library.parent, self.config),
                ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
            )
        self.started.append(process)
        self.read = 0
        return process

    def printed(self, process: "subprocess.Popen[str]", text: str) -> str:
        """Wait for the next line of standard error with `text`, and return it."""
        found: list[str] = []

        def look() -> bool:
            lines = (self.folder / "err").read_text().split("\n")[:-1]
            found[:] = [line for line in lines[self.read :] if text in line]
            self.read = lines.index(found[0], self.read) + 1 if found else self.read
            return bool(found)

        wait_until(look, process)
        return found[0]

    def finish(self, process: "subprocess.Popen[str]") -> Ended:
        code = process.wait()
        return Ended(code, (self.folder / "out").read_text(), (self.folder / "err").read_text())

    def train(self, *words: str) -> Ended:
        return self.finish(self.start(*words))

    def events(self) -> list[tuple[str, str, str]]:
        """Return (check, result, uuid) of the hardware's entries in metrics.jsonl."""
        lines = (self.folder / "runs/r/metrics.jsonl").read_text().splitlines()
        entries = [entry for line in lines if (entry := json.loads(line))["kind"] == "health"]
        return [(entry["check"], entry["result"], entry["uuid"]) for entry in entries]


@pytest.fixture
def watched(tmp_path: Path, library: Path) -> Iterator[Watched]:
    made = Watched(tmp_path, library)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_row_35_a_fatal_xid_saves_and_ends_the_job(watched: Watched) -> None:
    """An Xid of the program is logged. A fatal Xid saves a checkpoint and gives exit code 3."""
    watched.put(gpu1__xid=31)
    gates = [Gate(watched.folder, 100, rank) for rank in (0, 1)]
    process = watched.start()
    for gate in gates:
        gate.wait_for(process)
    watched.put(gpu1__xid="31,31")
    assert "xid WARN: Xid 31" in watched.printed(process, UUID)
    watched.put(gpu1__xid="31,31,79")
    assert "xid CRITICAL: Xid 79: the GPU has fallen off the bus" in watched.printed(process, UUID)
    for gate in gates:
        gate.release()
    ended = watched.finish(process)
    assert ended.code == 3
    assert "the hardware failed: saving what was trained, then stopping" in ended.err
    kept = max(
        int(re.sub(r"\D", "", name)) for name in checkpoints(watched.folder) if name.endswith(".pt")
    )
    assert kept >= 100
    assert watched.events() == [("xid", "WARN", UUID), ("xid", "CRITICAL", UUID)]
    assert list(watched.temporary.glob("trainbox-health-*")) == []

    again = watched.train()
    assert again.code == 0, again.err
    assert f"resume     from step {kept}" in again.out
    assert watched.events() == [("xid", "WARN", UUID), ("xid", "CRITICAL", UUID)], (
        "the events stay in the run"
    )


@pytest.mark.rare
@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"gpu1__ret": 15}, "handle CRITICAL: NVML 15: GPU is lost"),
        (
            {"gpu1__ecc__volatile__uncorrected": 1},
            "ecc-uncorrected CRITICAL: 1 uncorrected memory errors",
        ),
        (
            {"gpu1__field__230": 2},
            "recovery-action CRITICAL: the driver recommends 2 (node reboot)",
        ),
        ({"gpu1__nvlink3__state": 0}, "nvlink CRITICAL: 17 of 18 links active: down 3; NVSwitch"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_row_35_a_gpu_that_breaks_ends_the_job(
    watched: Watched, keys: dict[str, object], text: str
) -> None:
    gate = Gate(watched.folder, 100)
    process = watched.start()
    gate.wait_for(process)
    watched.put(**keys)
    # A link that is down is a warning first.
    printed = watched.printed(process, " CRITICAL: ")
    assert UUID in printed and text in printed
    gate.release()
    ended = watched.finish(process)
    assert ended.code == 3
    assert any(name.endswith(".pt") for name in checkpoints(watched.folder))


def test_row_35_a_rank_that_hangs_on_a_broken_gpu_is_killed(watched: Watched) -> None:
    """The Xid is found while another reading hangs, and it is recorded in the run.

    The ranks cannot record the Xid, because they hang.
    """
    gate = Gate(watched.folder, 100)
    process = watched.start("--checkpoint-steps", "10", budget_s=2)
    gate.wait_for(process)
    job = Job(process, 2)
    watched.put(gpu1__hang__ecc=1)
    watched.put(gpu1__hang__ecc=1, gpu1__xid=79)
    ended = watched.finish(process)
    assert ended.code == 3
    assert "not stopped 2 s after the signal: killed" in ended.err
    job.wait_until_gone()
    gate.release()
    assert watched.events() == [("xid", "CRITICAL", UUID)]
    assert any(name.endswith(".pt") for name in checkpoints(watched.folder))


@pytest.mark.rare
def test_row_35_minor_events_are_logged_once(watched: Watched) -> None:
    """A slowdown and a driver that hangs and recovers are logged, and the training continues."""
    gate = Gate(watched.folder, 100)
    process = watched.start()
    gate.wait_for(process)
    watched.put(gpu1__clocks_event_reasons="0x40")
    assert "slowdown WARN: hardware thermal slowdown now, in 1 of the last" in watched.printed(
        process, UUID
    )
    watched.put()
    assert "slowdown WARN" not in watched.printed(process, UUID)
    watched.put(hang=1)
    assert "driver UNKNOWN: the NVIDIA driver does not answer" in watched.printed(process, "node")
    watched.put()
    assert "driver PASS" in watched.printed(process, "node")
    gate.release()
    ended = watched.finish(process)
    assert ended.code == 0, ended.err
    logged = [(check, result) for check, result, _ in watched.events()]
    assert logged[:1] == [("slowdown", "WARN")] and logged[-2:] == [
        ("driver", "UNKNOWN"),
        ("driver", "PASS"),
    ]


@pytest.mark.rare
def test_row_35_the_watch_outlives_its_process_and_the_folder_of_its_events(
    watched: Watched,
) -> None:
    gate = Gate(watched.folder, 100)
    process = watched.start()
    gate.wait_for(process)
    (events,) = watched.temporary.glob("trainbox-health-*")
    shutil.rmtree(events)
    watched.put(gpu1__temperature=87)
    assert "(not in the run's metrics.jsonl: " in watched.printed(process, "temperature WARN")
    for pid in driver_processes(process.pid):
        os.kill(pid, signal.SIGSEGV)
    assert "died in the driver's library" in watched.printed(process, "driver UNKNOWN")
    watched.printed(process, "driver PASS")
    # A signal that hits a reading leaves it out, and this process is replaced at once. The process
    # that listens for Xids is replaced seconds later, and it hears only the Xids that follow.
    xids: list[str] = []

    def heard() -> bool:
        xids.append("79")
        watched.put(gpu1__xid=",".join(xids))
        return "Xid 79" in (watched.folder / "err").read_text()

    wait_until(heard, process)
    gate.release()
    assert watched.finish(process).code == 3


def driver_processes(parent: int) -> list[int]:
    """Return the processes that query the driver: forks of the entrypoint in its session."""
    stats = {
        int(path.parent.name): path.read_text().rpartition(")")[2].split()
        for path in Path("/proc").glob("[0-9]*/stat")
    }
    return [
        pid
        for pid, words in stats.items()
        if int(words[1]) == parent and int(words[3]) == os.getsid(parent)
    ]


def test_row_36_the_gate_is_closed_for_a_gpu_with_an_uncorrected_error(watched: Watched) -> None:
    watched.put(gpu1__ecc__volatile__uncorrected=1)
    closed = watched.train()
    assert closed.code == 3
    (line,) = messages(closed)
    assert line.startswith(
        f"trainbox: the health gate is closed. GPU 1 ({UUID}): ecc-uncorrected CRITICAL: "
        "1 uncorrected"
    )
    assert line.endswith("(`trainbox health` lists all findings; HEALTH=0 trains nevertheless)")
    assert not (watched.folder / "runs").exists()
    spared = watched.train("--gpus", "1", "--max-steps", "5")
    assert spared.code == 0, spared.err
    assert re.match(r"health     OPEN, PASS: 1 GPU, 0\.\d\d s\n", spared.out)


@pytest.mark.rare
def test_row_36_no_health_trains_nevertheless(watched: Watched) -> None:
    watched.put(gpu1__ecc__volatile__uncorrected=1)
    ended = watched.train("--no-health", "--max-steps", "5")
    assert ended.code == 0, ended.err
    assert "health" not in ended.out
