"""The batch scripts for SLURM: what they start and when they go back into the queue; then on a real
SLURM of two nodes.

The nodes train on CPU processes. `hosts-here` on PATH pulls a node's cable, where the node is one
of its hosts.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.commands import clean_environment
from tests.support.faults import GATED, Gate, clean_digest
from tests.support.sweep_options import requested_sweep
from trainbox.errors import code_of_cause

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guides/slurm.md"
RUN = ROOT / "deploy/slurm/run.sh"
SCRIPTS = ("one-node", "several-nodes", "sweep")


# Without SLURM: stand-ins for its programs, which record their arguments.


def run_in_a_job(
    folder: Path,
    *words: str,
    program: Path = RUN,
    step: str = "exit 0",
    programs: dict[str, str] | None = None,
    **env: str,
) -> tuple[int, list[list[str]], str]:
    """Run `program`; return its exit code, its calls of srun and scontrol, and stderr.

    `step` is the script that srun runs.
    """
    programs = (programs or {}) | {
        "srun": f'echo "srun GPUS=$GPUS $*" >>calls; {step}',
        "scontrol": 'echo "scontrol $*" >>calls',
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    variables = clean_environment(SLURM_JOB_ID="7", **({"SLURM_JOB_NUM_NODES": "1"} | env))
    done = subprocess.run(
        ["bash", program, *words],
        cwd=folder,
        env=variables | {"PATH": f"{folder}:{variables['PATH']}"},
        capture_output=True,
        text=True,
    )
    calls = folder / "calls"
    return (
        done.returncode,
        [line.split() for line in calls.read_text().splitlines()] if calls.exists() else [],
        done.stderr,
    )


# fmt: off
_RUN_INS = [
    ("", ".venv/bin/trainbox"),
    ("venv:/opt/trainbox", "/opt/trainbox/bin/trainbox"),
    ("apptainer:images/trainbox.sif", "env SIF=images/trainbox.sif deploy/apptainer/trainbox.sh"),
    ("pyxis:registry.example#trainbox:0.1.0", "--container-image=registry.example#trainbox:0.1.0 "
     "--container-mounts={here}:{here} --container-workdir={here} trainbox"),
]
# fmt: on


@pytest.mark.parametrize(("run_in", "program"), _RUN_INS)
def test_run_in_selects_the_program(tmp_path: Path, run_in: str, program: str) -> None:
    nodes = 3 if run_in.startswith("venv") else 1
    given = {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_CPUS_PER_TASK": "6"}
    given |= {"SLURM_GPUS_ON_NODE": "2", "RUN_IN": run_in}
    code, calls, _ = run_in_a_job(tmp_path, "train", "mnist", **given)
    assert code == 0
    tasks = (
        f"--nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpus-per-task=6 "
        "--kill-on-bad-exit=0 --wait=60 --export=ALL"
    )
    label = " --label" * (nodes > 1)
    assert calls == [
        f"srun GPUS=2 {tasks}{label} {program.format(here=tmp_path)} train mnist".split()
    ]


def test_another_value_of_run_in_is_refused(tmp_path: Path) -> None:
    code, calls, err = run_in_a_job(tmp_path, "train", RUN_IN="docker:trainbox")
    assert (code, calls) == (2, [])
    assert (
        err == "run.sh: RUN_IN=docker:trainbox is unknown: set RUN_IN to venv:FOLDER, "
        "apptainer:IMAGE.sif or pyxis:IMAGE\n"
    )


@pytest.mark.parametrize(
    ("code", "env", "again"),
    [
        *[(code, {}, False) for code in (0, 1, 2, 4, 5, 6, 8, 127, 193)],
        *[(code, {}, True) for code in (3, 7, 75, 129, 192)],
        (7, {"SLURM_RESTART_COUNT": "19"}, True),
        (7, {"SLURM_RESTART_COUNT": "20"}, False),
        (137, {"SLURM_RESTART_COUNT": "2", "RESTARTS": "2"}, False),
        (75, {"SLURM_RESTART_COUNT": "500"}, True),
    ],
)
def test_the_exit_code_decides_whether_the_job_is_requeued(
    tmp_path: Path, code: int, env: dict[str, str], again: bool
) -> None:
    ended, calls, err = run_in_a_job(tmp_path, "train", step=f"exit {code}", **env)
    assert ended == code
    assert calls[1:] == ([["scontrol", "requeue", "7"]] if again else [])
    assert len(err.splitlines()) == (code != 0)


def test_an_error_of_srun_or_apptainer_is_not_a_signal(tmp_path: Path) -> None:
    """Without Pyxis, srun refuses `--container-image`. Apptainer also exits with code 255."""
    refusal = "srun: unrecognized option '--container-image=x'"
    step = f'echo "{refusal}" >&2; exit 255'
    code, calls, err = run_in_a_job(tmp_path, "train", step=step, RUN_IN="pyxis:x")
    assert (code, [call[0] for call in calls]) == (255, ["srun"])
    assert err.splitlines() == [
        refusal,
        "run.sh: srun or Apptainer exited with code 255, not trainbox: manual action is needed, "
        "see the lines above",
    ]


@pytest.mark.parametrize(
    ("codes", "decisive"),
    [
        *[((7, 5), 5), ((7, 2), 2), ((75, 4), 4), ((137, 5), 5), ((1, 7), 1), ((75, 1), 1)],
        *[((1, 3), 3), ((1, 137), 137), ((7, 137), 137), ((75, 7), 7), ((75, 75), 75)],
        *[((137, 255), 255), ((255, 7), 255), ((1, 134), 1), ((7, 134), 134), ((143, 75), 75)],
    ],
)
def test_the_node_that_failed_first_sets_the_exit_code(
    tmp_path: Path, codes: tuple[int, int], decisive: int
) -> None:
    """srun exits with the highest code of all nodes.

    A node that only lost contact exits with code 7, and a node that waited exits with code 75.
    """
    lines = [
        f"srun: error: n{task + 1}: task {task}: Exited with exit code {code}"
        for task, code in enumerate(codes)
    ]
    # The first line was printed by a task.
    printed = ["0: srun: error: n3: task 2: Exited with exit code 6", "1: trainbox: x", *lines]
    step = "; ".join([*(f"echo '{line}' >&2" for line in printed), f"exit {max(codes)}"])
    code, calls, err = run_in_a_job(tmp_path, "train", step=step, SLURM_JOB_NUM_NODES="2")
    assert code == decisive == code_of_cause(codes)
    assert bool(calls[1:]) == (decisive in (3, 7, 75, 134, 137))
    assert err.splitlines()[:-1] == printed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_a_full_disk_does_not_change_the_exit_code(tmp_path: Path) -> None:
    """Neither the log nor the folder for temporary files can be written."""
    script = tmp_path / "full"
    script.write_text(f'TMPDIR=/nonexistent exec bash {RUN} "$@" 2>/dev/full\n')
    errors = [f"srun: error: n{n}: task {n - 1}: Exited with exit code {9 - 2 * n}" for n in (1, 2)]
    step = "; ".join([*(f"echo '{line}' >&2" for line in errors), "exit 7"])
    code, calls, _ = run_in_a_job(
        tmp_path, "train", program=script, step=step, SLURM_JOB_NUM_NODES="2"
    )
    assert (code, calls[1:]) == (5, [])


def warned_step(code: int) -> str:
    """Return the code of a step that gets a warning, and then exits with `code`."""
    # run.sh closes this descriptor after it has installed its handler.
    warn = "while [ -e /proc/$PPID/fd/3 ]; do :; done; kill -USR1 $PPID"
    return f"trap 'exit {code}' USR1; {warn}; while :; do sleep 0.1; done"


def test_after_a_warning_run_sh_waits_for_the_step(tmp_path: Path) -> None:
    """run.sh exits with the step's exit code."""
    assert run_in_a_job(tmp_path, "train", step=warned_step(0))[::2] == (0, "")


@pytest.mark.parametrize(("code", "says"), [(75, False), (138, True), (7, False)])
def test_a_time_limit_without_time_for_a_step_is_reported(
    tmp_path: Path, code: int, says: bool
) -> None:
    ended, calls, err = run_in_a_job(tmp_path, "train", step=warned_step(code))
    assert (ended, calls[-1]) == (code, ["scontrol", "requeue", "7"])
    assert ("saved anything new: give it a longer --time\n" in err) is says
    assert err.endswith(f"run.sh: trainbox exited with code {code}: the job is requeued\n")


def test_a_step_that_the_warning_kills_is_waited_for_once(tmp_path: Path) -> None:
    code, calls, _ = run_in_a_job(tmp_path, "train", step="kill -USR1 $$")
    assert (code, [words[0] for words in calls]) == (128 + signal.SIGUSR1, ["srun", "scontrol"])


def test_a_cancelled_job_is_not_requeued(tmp_path: Path) -> None:
    """SLURM then sends a SIGTERM to the batch script as well."""
    code, calls, err = run_in_a_job(tmp_path, "train", step="kill -TERM $PPID; exit 75")
    assert (code, [words[0] for words in calls], err) == (-signal.SIGTERM, ["srun"], "")


def test_only_the_stopped_task_of_an_array_is_requeued(tmp_path: Path) -> None:
    """The last task of an array has the same job number as the array."""
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    _, calls, _ = run_in_a_job(tmp_path, "sweep", step="exit 75", **array)
    assert calls[1:] == [["scontrol", "requeue", "7_3"]]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_requests_all_that_a_requeue_needs(name: str) -> None:
    options = re.findall(
        r"^#SBATCH (\S+)", (ROOT / f"deploy/slurm/{name}.sbatch").read_text(), re.MULTILINE
    )
    assert {"--signal=B:USR1@120", "--requeue", "--open-mode=append"} <= set(options)
    # with `--nodes=1-4`, SLURM would then give one node
    assert not any("ntasks" in option for option in options)


@pytest.mark.parametrize(
    ("script", "task", "words", "started"),
    [
        ("one-node", "", "", "train"),
        ("one-node", "", "run train.py -- --epochs 2", "run train.py -- --epochs 2"),
        ("several-nodes", "", "mnist --run run", "train mnist --run run"),
        ("several-nodes", "", "run train.py", "run train.py"),
        # The other tasks of an array join the sweep.
        ("sweep", "0", "mnist --seeds 2", "sweep mnist --seeds 2"),
        ("sweep", "1", "mnist --seeds 2", "sweep mnist --seeds 2 --worker"),
        ("sweep", "0", "run a.py -- --lr {lr}", "sweep run a.py -- --lr {lr}"),
        ("sweep", "1", "run a.py -- --lr {lr}", "sweep run --worker a.py -- --lr {lr}"),
    ],
)
def test_the_first_word_and_the_task_of_an_array_select_the_command(
    tmp_path: Path, script: str, task: str, words: str, started: str
) -> None:
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_TASK_MIN": "0"}
    batch = ROOT / f"deploy/slurm/{script}.sbatch"
    env = array if task else {}
    code, calls, _ = run_in_a_job(tmp_path, *words.split(), program=batch, **env)
    assert (code, len(calls)) == (0, 1)
    assert calls[0][calls[0].index(".venv/bin/trainbox") + 1 :] == started.split()


@pytest.mark.parametrize("name", ["one-node", "several-nodes", "sweep"])
def test_a_job_from_another_folder_names_the_cure(tmp_path: Path, name: str) -> None:
    script = ROOT / f"deploy/slurm/{name}.sbatch"
    ended = subprocess.run(
        ["bash", str(script), "digits"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    cure = f"no deploy/slurm/run.sh in {tmp_path}: submit in the folder of the checkout\n"
    assert (ended.returncode, ended.stderr) == (2, cure)


def commands_of_the_page() -> list[tuple[str, list[str]]]:
    """Return (script, arguments) of each sbatch command in docs/guides/slurm.md."""
    found = re.findall(
        r"^[^|\n]*\bsbatch .*?deploy/slurm/(\S+)\.sbatch +([^#\n]*)", PAGE.read_text(), re.MULTILINE
    )
    return [(script, words.split()) for script, words in found]


def test_the_commands_of_the_page_name_existing_scripts_and_valid_options() -> None:
    commands = commands_of_the_page()
    assert {script for script, _ in commands} == set(SCRIPTS)
    assert len(commands) >= 5
    for script, words in commands:
        if words[0] == "run" or words[0].startswith("my_tasks/"):
            continue  # a script or a task of the reader
        if script == "sweep":
            assert requested_sweep(words, {}).total > 0, words
            continue
        check = [sys.executable, "-P", "-m", "entrypoint", "plan", *words]
        assert subprocess.run(check, env=clean_environment(), check=False).returncode == 0, words


# On a real SLURM.


def sinfo() -> list[str]:
    """Return the state of each node, or nothing if SLURM does not answer."""
    done = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else []


def wait_for(
    condition: Callable[[], object], what: Callable[[], str], timeout_s: float = 1000
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out:\n{what()}"
        time.sleep(0.2)


class Slurm:
    """Submits jobs from a folder that only has `deploy`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.submitted = folder, list[str]()
        (folder / "deploy").symlink_to(ROOT / "deploy")

    def submit(self, script: str, *words: str, options: tuple[str, ...] = ()) -> str:
        """Submit a job with 2 CPUs and 1 GB on each node and without a GPU; return its number."""
        return self._submitted(f"deploy/slurm/{script}.sbatch", *words, options=options)

    def submit_lines(self, lines: str, *options: str) -> str:
        """Submit a batch script with these lines, and `trainbox` as the page writes it."""
        command = f"{sys.prefix}/bin/trainbox"
        text = re.sub(r"srun (?:\S*/)?trainbox run", f"srun {command} run --processes 2", lines)
        output = "--output=trainbox-%j.log"
        (self.folder / "page.sbatch").write_text(f"#!/bin/bash\n{text}")
        return self._submitted("page.sbatch", options=(output, *options))

    def _submitted(self, *words: str, options: tuple[str, ...]) -> str:
        resources = ("--gpus-per-node=0", "--cpus-per-task=2", "--mem=1G", *options)
        env = clean_environment(OMP_NUM_THREADS="1", RUN_IN=f"venv:{sys.prefix}")
        done = subprocess.run(
            ["sbatch", "--parsable", *resources, *words],
            cwd=self.folder,
            env=env | {name: value for name, value in os.environ.items() if name == "SLURM_CONF"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        self.submitted.append(done.stdout.strip())
        return self.submitted[-1]

    def job(self, number: str) -> dict[str, str]:
        shown = scontrol("show", "job", "--oneliner", number).splitlines()[0]
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def log(self, number: str) -> str:
        path = self.folder / f"trainbox-{number}.log"
        return path.read_text() if path.exists() else ""

    def wait_for_log(self, number: str, text: str) -> None:
        wait_for(
            lambda: text in self.log(number), lambda: f"{self.job(number)}\n{self.log(number)}"
        )

    def finish(self, number: str, state: str = "COMPLETED") -> dict[str, str]:
        """Wait until the job has ended in this state."""
        running = ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "NODE_FAIL")
        wait_for(
            lambda: self.job(number)["JobState"] not in running,
            lambda: f"{self.job(number)}\n{self.log(number)}",
        )
        job = self.job(number)
        assert job["JobState"] == state, f"{job}\n{self.log(number)}"
        return job

    def digest(self, number: str) -> str:
        (digest,) = re.findall(r"^(?:0: )?digest +([0-9a-f]{64})", self.log(number), re.MULTILINE)
        return str(digest)

    def steps(self) -> list[int]:
        lines = (self.folder / "runs/r/metrics.jsonl").read_text().splitlines()
        return [entry["step"] for line in lines if (entry := json.loads(line))["kind"] == "train"]


def scontrol(*words: str) -> str:
    return subprocess.run(["scontrol", *words], check=True, capture_output=True, text=True).stdout


def idle() -> bool:
    return sinfo() == ["idle"] * 2


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if not shutil.which("sbatch"):
        pytest.skip("no `sbatch` on PATH")
    if len(sinfo()) != 2:
        pytest.skip("no SLURM of two nodes answers: `sinfo` lists others or fails")
    with (Path(tempfile.gettempdir()) / "trainbox-test-slurm.lock").open("w") as lock:
        # one test at a time, also with several pytest processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        wait_for(idle, lambda: f"nodes are not idle: {sinfo()}")
        runner = Slurm(tmp_path)
        yield runner
        if runner.submitted:
            subprocess.run(["scancel", "--quiet", *runner.submitted], check=True)
        wait_for(idle, lambda: f"nodes are not idle: {sinfo()}")


@pytest.mark.waits
@pytest.mark.slow
def test_two_nodes_near_their_time_limit_are_requeued_to_the_same_bits(slurm: Slurm) -> None:
    gate = Gate(slurm.folder, step=100)
    number = slurm.submit("several-nodes", *GATED, "--processes", "2", options=("--time=10",))
    wait_for(gate._reached, lambda: slurm.log(number))
    assert "4 processes on 2 nodes; this is node 0, rendezvous at n1:" in slurm.log(number)
    hours, minutes, _ = map(int, slurm.job(number)["RunTime"].split(":"))
    elapsed = 60 * hours + minutes
    # the two minutes of --signal begin at once
    scontrol("update", f"JobId={number}", f"TimeLimit={elapsed + 2}")
    slurm.wait_for_log(number, "trainbox: SIGUSR1 received: saving what was trained")
    scontrol("update", f"JobId={number}", f"TimeLimit={elapsed + 10}")
    gate.release()
    job = slurm.finish(number)
    assert (job["Restarts"], job["NumNodes"]) == ("1", "2")
    assert "run.sh: trainbox exited with code 75: the job is requeued" in slurm.log(number)
    assert "resume     from step 10" in slurm.log(number)
    assert slurm.steps() == list(range(1, 401))
    on_one_node = slurm.submit("one-node", *GATED[:-1], "one", "--processes", "4")
    assert slurm.finish(on_one_node)["NumNodes"] == "1"
    assert slurm.digest(number) == slurm.digest(on_one_node)


@pytest.mark.waits
@pytest.mark.slow
def test_a_lost_node_is_dropped_and_the_job_resumes_to_the_same_bits(slurm: Slurm) -> None:
    if not shutil.which("hosts-here") or "NodeAddr=10.77.0.12 " not in scontrol(
        "show", "node", "n2"
    ):
        pytest.skip("the network of the nodes cannot be cut: they are not hosts of `hosts-here`")
    gate = Gate(slurm.folder, step=100)
    words = (*GATED, "--processes", "2", "--shards", "4")
    number = slurm.submit("several-nodes", *words, options=("--nodes=1-2",))
    wait_for(gate._reached, lambda: slurm.log(number))
    assert slurm.job(number)["NumNodes"] == "2"
    subprocess.run(["hosts-here", "cut", "2"], check=True)
    try:
        gate.release()
        job = slurm.finish(number)
    finally:
        subprocess.run(["hosts-here", "join", "2"], check=True)
    assert (job["Restarts"], job["NumNodes"], job["NodeList"]) == ("1", "1", "n1")
    # of the bests at steps 40 and 80, the second may still have been only in memory
    assert re.search("resume     from step [48]0, ", slurm.log(number))
    assert slurm.steps() == list(range(1, 401))
    assert slurm.digest(number) == clean_digest(
        slurm.folder, (*GATED[:-1], "clean", "--shards", "4")
    )


# Each rank waits for SIGTERM in the first start. In the second one, the ranks add up their numbers.
OWN_SCRIPT = """
import json, os, pathlib, signal, sys
import torch, torch.distributed as distributed
run, rank = pathlib.Path(os.environ["TRAINBOX_RUN"]), os.environ["RANK"]
saved = run / f"saved-{rank}.json"
if sys.argv[1] != "wait" or saved.exists():
    distributed.init_process_group("gloo")
    total = torch.tensor(float(rank) + 1)
    distributed.all_reduce(total)
    names = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    found = {name: os.environ[name] for name in names}
    of_srun = ("PROCID", "LOCALID", "NODEID", "NTASKS", "NNODES")
    found["srun"] = [int(os.environ[f"SLURM_{name}"]) for name in of_srun]
    saved.write_text(json.dumps(found | {"total": total.item()}))
    distributed.destroy_process_group()
    sys.exit(int(sys.argv[2]))
def save(*_):
    saved.touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.waits
@pytest.mark.slow
@pytest.mark.rare
def test_a_script_on_two_nodes_is_requeued_and_finds_its_folder(slurm: Slurm) -> None:
    (slurm.folder / "mine.py").write_text(OWN_SCRIPT)
    words = ("run", "--run", "r", "--processes", "2", "mine.py", "--", "wait", "0")
    number = slurm.submit("several-nodes", *words)
    wait_for(
        lambda: len(re.findall("^[01]: ready$", slurm.log(number), re.MULTILINE)) == 4,
        lambda: slurm.log(number),
    )
    subprocess.run(["scancel", "--batch", "--signal=USR1", number], check=True)
    job, log, run = slurm.finish(number), slurm.log(number), slurm.folder / "runs/r"
    assert (job["Restarts"], job["NumNodes"]) == ("1", "2")
    assert log.count("run.sh: trainbox exited with code 75: the job is requeued") == 1
    found = [json.loads((run / f"saved-{rank}.json").read_text()) for rank in range(4)]
    assert len({(rank.pop("MASTER_ADDR"), rank.pop("MASTER_PORT")) for rank in found}) == 1
    assert found == [
        {
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank % 2),
            "srun": [rank, rank % 2, rank // 2, 4, 2],  # as if srun had started four tasks
            "total": 10.0,
        }
        for rank in range(4)
    ]
    assert {path.name for path in run.iterdir() if "saved" not in path.name} >= {
        "config.json",
        "manifest.json",
        "logs",
    }
    assert {path.name for path in (run / "logs").iterdir()} == {
        f"node-{node}-rank-{rank}.log" for node in range(2) for rank in range(2)
    }
    manifest = json.loads((run / "manifest.json").read_text())
    found = [(each["exit_code"], each["nodes"], each["processes"]) for each in manifest["starts"]]
    assert found == [(75, 2, 2), (0, 2, 2)]
    assert {start["scheduler"]["SLURM_JOB_ID"] for start in manifest["starts"]} == {number}


# Takes its rank from srun's variables, as many scripts do.
_OF_SRUN = """
import os, sys
import torch, torch.distributed as distributed
rank, count = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
distributed.init_process_group("gloo", rank=rank, world_size=count)
total = torch.ones(1)
distributed.all_reduce(total)
print("rank", rank, "of", int(total), *sys.argv[1:], flush=True)
distributed.destroy_process_group()
"""


@pytest.mark.waits
@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("heading", ["srun python", "srun torchrun"])
def test_the_lines_after_the_change_of_a_batch_script_train_on_two_nodes(
    slurm: Slurm, heading: str
) -> None:
    (slurm.folder / "train.py").write_text(_OF_SRUN)
    page = (ROOT / "docs/guides/from-your-batch-script.md").read_text()
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    *_, after = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    number = slurm.submit_lines(after, "--nodes=2", "--ntasks-per-node=1")
    slurm.finish(number)
    found = re.findall(r"^rank (\d) of (\d) --epochs 90$", slurm.log(number), re.MULTILINE)
    assert sorted(found) == [(str(rank), "4") for rank in range(4)], slurm.log(number)
