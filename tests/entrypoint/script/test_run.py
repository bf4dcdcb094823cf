"""`trainbox run`: the contract with a script, its records and its exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Trainbox, finish, wait_until
from tests.support.kinds import slow_but
from tests.support.nvml_stub.build import stub_env, write_config
from tests.support.paths import ROOT
from trainbox.errors import WrongUse
from trainbox.options.config import config_in

ONE = ("run",)

# A script that counts its starts, and ends the start N with the Nth code of its arguments.
COUNTING = """
import os, pathlib, signal, sys
count = pathlib.Path(os.environ["TRAINBOX_RUN"], "count")
starts = int(count.read_text()) if count.exists() else 0
count.write_text(str(starts + 1))
code = int(sys.argv[1 + starts])
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def script(trainbox: Trainbox, text: str, name: str = "train.py") -> str:
    (trainbox.folder / name).write_text(text)
    return name


def only_run(trainbox: Trainbox) -> Path:
    (run,) = (trainbox.folder / "runs").iterdir()
    return run


def read(run: Path, name: str) -> Any:
    return json.loads((run / name).read_text())


def test_two_ranks_find_each_other_and_their_run(trainbox: Trainbox) -> None:
    """The one real start by torchrun: environment, sys.path, output, records and exit code."""
    (trainbox.folder / "project").mkdir()
    (trainbox.folder / "project/entrypoint.py").write_text("name = 'of the user'\n")
    (trainbox.folder / "lib/trainer").mkdir(parents=True)
    (trainbox.folder / "lib/trainer/__init__.py").write_text("name = 'of the user'\n")
    (trainbox.folder / "project/train.py").write_text(
        """
import json, os, sys
import entrypoint, trainer
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR CUDA_VISIBLE_DEVICES".split()
names.append("TORCHELASTIC_USE_AGENT_STORE")  # otherwise rank 0 opens one on all interfaces
seen = {name: os.environ[name] for name in names}
seen |= {"arguments": sys.argv[1:], "run": os.environ["TRAINBOX_RUN"], "total": int(total)}
seen |= {"modules": [entrypoint.name, trainer.name]}
slurm = ("ARRAY_TASK_ID", "JOB_ID", "PROCID", "LOCALID", "NTASKS", "NTASKS_PER_NODE")
seen |= {"slurm": [os.environ["SLURM_" + name] for name in slurm]}
seen |= {"own": [name for name in os.environ if name in ("TRAINBOX_PIPES", "TRAINBOX_RESTORED")]}
if dist.get_rank() == 0:
    print(json.dumps({"step": 3, "loss": 0.5, "samples": 1000}))
    print("a message", file=sys.stderr)
dist.barrier()
os.write(1, (json.dumps(seen) + "\\n").encode())
dist.destroy_process_group()
sys.exit(9)
"""
    )
    # A task of an array, which srun has started on one node of several.
    job = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_JOB_ID": "70", "SLURM_JOB_NUM_NODES": "2"}
    job |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}
    job |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    ended = finish(
        trainbox.start(
            *("run", "--processes", "2", "--prefix", "project/train.py"),
            *("--", "--out", "{run}/x", "--gpus", "4", "--api-key", "abc"),
            env={"PYTHONPATH": str(trainbox.folder / "lib")} | job,
        )
    )
    assert ended.code == 9, ended.err
    run = only_run(trainbox)
    outs = [re.match(r"\[(\d)\] (\{.*)", line) for line in ended.out.splitlines()]
    seen = {int(out[1]): json.loads(out[2]) for out in outs if out and "RANK" in out[2]}
    for rank in (0, 1):
        assert seen[rank] == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "arguments": ["--out", f"{run}/x", "--gpus", "4", "--api-key", "abc"],
            "run": str(run),
            "total": 3,
            "modules": ["of the user", "of the user"],
            "slurm": ["7", "70", str(rank), str(rank), "2", "2"],
            "own": [],
        }
    assert "[0] a message\n" in ended.err
    assert "a message\n" in (run / "logs/rank-0.log").read_text()
    assert '"RANK": "1"' in (run / "logs/rank-1.log").read_text()
    (entry,) = trainbox.entries(run.name, "train")
    assert entry.pop("time_unix_s") > 0
    assert entry == {"kind": "train", "step": 3, "loss": 0.5, "samples": 1000}
    assert re.search(r"^samples +1,000$", ended.err, re.MULTILINE)
    manifest = read(run, "manifest.json")
    assert set(manifest["sources"]) == {"train.py"}
    assert [path.name for path in (run / "sources").iterdir()] == ["train.py"]
    (start,) = manifest["starts"]
    assert (start["exit_code"], start["processes"]) == (9, 2)
    assert start["scheduler"] == job
    hidden = ["--out", "{run}/x", "--gpus", "4", "--api-key", "(not shown)"]
    assert manifest["arguments"] == start["arguments"] == hidden
    assert manifest["packages"]["torch"]
    assert read(run, "config.json") == {
        "kind": "script",
        "script": "project/train.py",
        "is_module": False,
        "arguments": ["--out", "{run}/x", "--gpus", "4", "--api-key", "abc"],
    }


@pytest.mark.slow
def test_the_first_run_of_the_page(trainbox: Trainbox) -> None:
    page = (ROOT / "docs/guides/own-script.md").read_text()
    code, console = re.findall(r"```(?:python|console)\n(.*?)```", page, re.DOTALL)[:2]
    command, *lines = console.splitlines()
    script(trainbox, code)
    ended = trainbox(*command.removeprefix("$ trainbox ").split())
    assert ended.code == 0, ended.err

    def plain(text: str) -> str:
        text = re.sub(r"to /\S*/runs/", "to /runs/", text)
        return re.sub(r"train-[0-9a-f]{8}", "train-NAME", re.sub(r"[\d.]+ s$", "N s", text))

    seen = sorted(map(plain, [*ended.out.splitlines(), *ended.err.splitlines()]))
    assert seen == sorted(map(plain, lines))


@pytest.mark.slow
def test_a_terminal_shows_only_rank_0(trainbox: Trainbox) -> None:
    name = script(trainbox, "import os, sys; sys.stdout.write('rank ' + os.environ['RANK'])")
    terminal = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    inside = (sys.executable, "-c", terminal)
    ended = finish(trainbox.start("run", "--processes", "2", name, inside=inside))
    assert ended.code == 0, ended.out
    assert "rank 0" in ended.out and "rank 1" not in ended.out
    assert "the 2 processes did not call init_process_group" in ended.out
    logs = only_run(trainbox) / "logs"
    assert [(logs / f"rank-{rank}.log").read_text() for rank in (0, 1)] == ["rank 0", "rank 1"]


_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID")


def test_a_single_process_has_no_variable_of_torchrun_and_all_of_the_scheduler(
    forked: Trainbox,
) -> None:
    name = script(forked, "import json, os; print(json.dumps(dict(os.environ)))")
    ended = forked(*ONE, name, env={"SLURM_JOB_ID": "7", "DEVICE": "cpu"})
    assert ended.code == 0, ended.err
    assert "trainbox: device cpu (from DEVICE)\n" in ended.err
    environment = json.loads(ended.out.splitlines()[0])
    assert not environment.keys() & set(_OF_TORCHRUN)
    assert environment["SLURM_JOB_ID"] == "7"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import os; os.environ['LOCAL_RANK']", "LOCAL_RANK"),
        # The message of torch.distributed.init_process_group.
        ("raise ValueError('environment variable RANK expected, but not set')", "RANK"),
    ],
)
def test_a_script_that_needs_torchrun_gets_the_option_named(
    forked: Trainbox, code: str, found: str
) -> None:
    ended = forked(*ONE, script(forked, code))
    assert ended.code == 1
    expected = f"trainbox: the script needs the variables of torchrun, such as {found}: add "
    assert f"{expected}--torchrun\n" in ended.err


def test_a_module_that_the_python_of_a_script_lacks_is_named(forked: Trainbox) -> None:
    ended = forked(*ONE, script(forked, "import notthere.part"))
    assert ended.code == 1
    assert (
        f"trainbox: {sys.executable} (Trainbox) has no module notthere: install it there, name "
        "another Python with --python, or set PYTHONPATH to the folder that has the module\n"
    ) in ended.err
    caught = (
        "try:\n    import notthere\nexcept ImportError:\n    print('none')\nraise SystemExit(1)"
    )
    assert "has no module" not in forked(*ONE, "--run", "b", script(forked, caught)).err


@pytest.mark.parametrize(
    ("module", "package", "name"),
    [
        ("lib.nothere", "lib", "nothere"),
        ("lib.nets.no.deep", "lib.nets", "no"),
        ("json.nothere", "json", "nothere"),
    ],
)
def test_a_module_that_a_package_lacks_is_not_to_be_installed(
    forked: Trainbox, module: str, package: str, name: str
) -> None:
    (forked.folder / "lib/nets").mkdir(parents=True)
    (forked.folder / "lib/nets/__init__.py").touch()
    ended = forked(*ONE, script(forked, f"import {module}"))
    expected = f"trainbox: the package {package} has no module {name}: correct the import, or use "
    assert f"{expected}another version of {package}\n" in ended.err
    assert "install" not in ended.err


def test_a_module_in_another_folder_is_found_by_pythonpath(forked: Trainbox) -> None:
    (forked.folder / "other").mkdir()
    (forked.folder / "other/helper2.py").touch()
    name = script(forked, "import helper2")
    ended = forked(*ONE, name)
    assert "or set PYTHONPATH to the folder that has the module\n" in ended.err
    assert forked(*ONE, name, env={"PYTHONPATH": "other"}).code == 0


@pytest.mark.parametrize(
    ("restarts", "codes", "starts"),
    [
        (0, (75, 0), 1),
        (0, (-9, 0), 1),
        (1, (75, 0), 2),
        (5, (75, 3, 7, -9, 0), 5),
        (2, (75, 75, 75, 0), 3),
        (5, (1, 0), 1),
        (10, (1, 2, 255, 0), 4),
    ],
)
def test_restarts(forked: Trainbox, restarts: int, codes: tuple[int, ...], starts: int) -> None:
    words = [str(code) for code in codes]
    any_code = ("--restart-on", "any") if restarts >= 10 else ()
    options = ("--restarts", str(restarts), *any_code)
    ended = forked(*ONE, *options, script(forked, COUNTING), *words)
    run = only_run(forked)
    assert (run / "count").read_text() == str(starts)
    last = codes[starts - 1]
    # A scheduler would start a script that always exits with code 75 for ever.
    assert ended.code == (1 if last == 75 else last if last >= 0 else 128 - last)
    text = "the script exited with code 75 without a signal to stop, so the exit code is 1: "
    assert ended.err.count(text) == (last == 75)
    text = "trainbox: the script was killed by SIGKILL: the same command starts it again"
    assert ended.err.count(text) == (-9 in codes[:starts])
    assert "checkpoint" not in ended.err
    recorded = [start["exit_code"] for start in read(run, "manifest.json")["starts"]]
    assert recorded == [*(c if c >= 0 else 128 - c for c in codes[: starts - 1]), ended.code]


STOPPABLE = """
import os, pathlib, signal, sys
run = pathlib.Path(os.environ["TRAINBOX_RUN"])
def stop(*_):
    (run / "saved").touch()
    sys.exit(0)
{handler}
(run / "ready").touch()
while True:
    signal.pause()
"""


def test_a_stop_is_a_sigterm_and_exits_with_75(trainbox: Trainbox) -> None:
    name = script(trainbox, STOPPABLE.format(handler="signal.signal(signal.SIGTERM, stop)"))
    process = trainbox.start(*ONE, "--run", "r", "--restarts", "3", name)
    run = trainbox.folder / "runs/r"
    wait_until((run / "ready").exists, process)
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 75
    assert (run / "saved").exists()
    assert len(read(run, "manifest.json")["starts"]) == 1  # a requested stop has no restart


@pytest.mark.parametrize(
    ("code", "saves"),
    [
        pytest.param(75, "", id="nothing"),
        pytest.param(75, "train.log", id="log"),
        pytest.param(75, "checkpoint.pt", id="checkpoint"),
        pytest.param(0, "", id="nothing-0", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_script_has_code_75_only_if_it_has_saved(
    trainbox: Trainbox, code: int, saves: str
) -> None:
    """A scheduler would start a script that only appends to its log for ever."""
    text = f"""
import os, pathlib, signal, sys
run = pathlib.Path(os.environ["TRAINBOX_RUN"])
def stop(*_):
    for name in {saves!r}.split():
        (run / name).open("a").write("step\\n")
    sys.exit({code})
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while True:
    signal.pause()
"""
    process = trainbox.start(*ONE, "--run", "r", script(trainbox, text))
    log = trainbox.folder / "runs/r/logs/rank-0.log"
    wait_until(lambda: log.exists() and "ready" in log.read_text(), process)
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    has_saved = saves == "checkpoint.pt"
    assert ended.code == (75 if has_saved else 143), ended.err
    text = "trainbox: the script has stopped without a new checkpoint in its run folder, so the "
    assert ended.err.count(text) == (not has_saved)


@pytest.mark.parametrize("number", slow_but([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]))
@pytest.mark.parametrize(
    "processes",
    [
        pytest.param((), id="one"),
        pytest.param(("--processes", "2"), id="two", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("saves", [True, False])
def test_what_a_script_without_a_handler_has_lost_is_stated(
    trainbox: Trainbox, processes: tuple[str, ...], saves: bool, number: signal.Signals
) -> None:
    code = """
import os, pathlib, time
run = pathlib.Path(os.environ["TRAINBOX_RUN"])
if {saves}:
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints/last.pt").touch()
    os.utime(run / "checkpoints/last.pt", (time.time() - 100,) * 2)
print("ready", flush=True)
time.sleep(60)
"""
    code = code.format(saves=saves)
    process = trainbox.start(*ONE, "--run", "r", *processes, script(trainbox, code))
    logs = [trainbox.folder / f"runs/r/logs/rank-{rank}.log" for rank in range(bool(processes) + 1)]
    wait_until(lambda: all(log.exists() and "ready" in log.read_text() for log in logs), process)
    process.send_signal(number)
    ended = finish(process)
    assert ended.code == (75 if saves else 128 + number), ended.err
    assert "nothing is lost" not in ended.err
    if saves:
        pattern = (
            rf"trainbox: {number.name} has ended the script: what it has done since its newest "
            r"file in the run folder \(checkpoints/last.pt, 1\d\d s ago\) is lost, unless it was "
            r"saved elsewhere\n"
        )
    else:
        pattern = (
            rf"trainbox: {number.name} has ended the script, which has saved no file in its run "
            r"folder: it begins again\n"
        )
    assert len(re.findall(pattern, ended.err)) == 1, ended.err


def test_a_signal_that_slurm_sends_to_all_processes_does_not_end_a_script(forked: Trainbox) -> None:
    name = script(forked, "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); exit(9)")
    assert forked(*ONE, name).code == 9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "last"),
    [
        (3, "os.abort()"),  # as gloo does if another rank has closed its connections
        (5, "os.kill(os.getpid(), signal.SIGKILL)"),
    ],
)
def test_the_code_that_a_rank_has_chosen_comes_before_a_signal(
    trainbox: Trainbox, code: int, last: str
) -> None:
    """Rank 1 ends while rank 0 is in the end of its interpreter."""
    run = f"""
import atexit, os, signal, sys, time
if os.environ["RANK"] == "1":
    {last}
atexit.register(time.sleep, 1.5)
sys.exit({code})
"""
    ended = finish(trainbox.start(*ONE, "--processes", "2", script(trainbox, run)))
    assert ended.code == code, ended.err


@pytest.mark.slow
def test_a_script_gets_ctrl_c_as_such_and_may_end_its_training_early(trainbox: Trainbox) -> None:
    code = """
import os, pathlib, time
try:
    (pathlib.Path(os.environ["TRAINBOX_RUN"]) / ("ready" + os.environ["RANK"])).touch()
    time.sleep(60)
except KeyboardInterrupt:
    print("tests the model", flush=True)
"""
    process = trainbox.start(*ONE, "--processes", "2", "--run", "r", script(trainbox, code))
    ready = [trainbox.folder / f"runs/r/ready{rank}" for rank in (0, 1)]
    wait_until(lambda: all(path.exists() for path in ready), process)
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert (ended.code, ended.out.count("tests the model")) == (0, 2), ended.err
    assert "SIGINT received: the script gets SIGINT and has 50 s to save and exit (send it " in (
        ended.err
    )


def test_ctrl_c_reaches_the_processes_for_which_a_script_waits(trainbox: Trainbox) -> None:
    """As in a terminal. Python waits at its exit for the processes of multiprocessing."""
    code = """
import multiprocessing, os, pathlib, time
def train():
    (pathlib.Path(os.environ["TRAINBOX_RUN"]) / "ready").touch()
    time.sleep(100)
process = multiprocessing.get_context("fork").Process(target=train)
process.start()
process.join()
"""
    process = trainbox.start(*ONE, "--run", "r", script(trainbox, code))
    wait_until((trainbox.folder / "runs/r/ready").exists, process)
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.code == 75, ended.err
    assert "killed" not in ended.err


@pytest.mark.parametrize(
    ("number", "signals"),
    [
        (signal.SIGTERM, ["SIGTERM"]),
        (signal.SIGINT, ["SIGINT", "SIGTERM"]),
    ],
)
def test_a_script_that_ignores_the_stop_is_killed_by_one_more_signal(
    trainbox: Trainbox, number: signal.Signals, signals: list[str]
) -> None:
    handler = """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: print(signal.Signals(number).name, flush=True))
"""
    ignoring = STOPPABLE.format(handler=handler)
    process = trainbox.start(*ONE, "--run", "r", script(trainbox, ignoring))
    wait_until((trainbox.folder / "runs/r/ready").exists, process)
    # A second signal within 1 s counts as an echo of the first one.
    wait_until(lambda: _has_ended_after(process, number), process)
    ended = finish(process)
    assert ended.code == 128 + number
    assert [line for line in ended.out.splitlines() if line.startswith("SIG")] == signals
    which = {1: "second", 2: "third"}[len(signals)]
    assert f"{which} signal: killed; the same command starts it again" in ended.err


def _has_ended_after(process: "subprocess.Popen[str]", number: signal.Signals) -> bool:
    process.send_signal(number)
    try:
        process.wait(0.5)
    except subprocess.TimeoutExpired:
        return False
    return True


@pytest.mark.waits
@pytest.mark.parametrize(
    ("minutes", "processes"),
    [
        pytest.param("0.04", (), id="one"),
        pytest.param("0.1", ("--processes", "2"), id="two", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_hangs_is_ended_and_started_again(
    trainbox: Trainbox, minutes: str, processes: tuple[str, ...]
) -> None:
    code = """
import os, pathlib, sys, time
marker = pathlib.Path(os.environ["TRAINBOX_RUN"], "started" + os.environ.get("RANK", ""))
if marker.exists():
    raise SystemExit(0)
marker.touch()
begin = time.monotonic()
is_busy = os.environ.get("RANK", "0") == "0"
while is_busy and time.monotonic() < begin + 80 * float(sys.argv[1]):  # longer than the limit
    until = time.process_time() + 0.02
    while time.process_time() < until:
        pass
    time.sleep(0.03)
time.sleep(600)
"""
    options = ("--restarts", "1", *processes, "--run", "r")
    limit = {"TRAINBOX_HANG_MINUTES": minutes}
    ended = trainbox(*ONE, *options, script(trainbox, code), minutes, env=limit)
    assert ended.code == 0, ended.err
    text = f"the script hangs: no output and no CPU time for {minutes} minutes: the script gets"
    assert ended.err.count(text) == 1
    starts = read(trainbox.folder / "runs/r", "manifest.json")["starts"]
    assert [start["exit_code"] for start in starts] == [7, 0]
    assert starts[0]["duration_s"] > 80 * float(minutes)


@pytest.mark.slow
def test_only_rank_0_reads_the_input(trainbox: Trainbox) -> None:
    code = """
import os, pathlib, sys, time
rank, other = os.environ["RANK"], pathlib.Path(os.environ["TRAINBOX_RUN"], "other")
while rank == "0" and not other.exists():
    time.sleep(0.02)
os.write(1, f"{rank} {sys.stdin.read()!r}\\n".encode())
other.touch()
"""
    inside = ("sh", "-c", 'echo text | "$@"', "sh")
    process = trainbox.start("run", "--processes", "2", script(trainbox, code), inside=inside)
    ended = finish(process)
    assert sorted(ended.out.splitlines()) == ["0 'text\\n'", "1 ''"], ended.err


def test_a_script_sees_a_terminal_if_the_output_is_one(trainbox: Trainbox) -> None:
    code = "import os, sys; print(sys.stderr.isatty(), os.get_terminal_size(1).columns)"
    terminal = """
import os, pty, sys, termios
pid, master = pty.fork()
if pid == 0:
    termios.tcsetwinsize(0, (7, 41))
    os.execvp(sys.argv[1], sys.argv[1:])
shown = b""
try:
    while part := os.read(master, 1000):
        shown += part
except OSError:
    pass
print(shown.decode())
"""
    inside = (sys.executable, "-c", terminal)
    ended = finish(trainbox.start(*ONE, script(trainbox, code), inside=inside))
    assert "True 41" in ended.out, ended.out
    assert (only_run(trainbox) / "logs/rank-0.log").read_text().rstrip() == "True 41"


def test_what_a_script_leaves_behind_is_killed(forked: Trainbox) -> None:
    code = """
import os, time
daemon = os.environ["TRAINBOX_RUN"] + "/daemon"
child = os.fork()
if child == 0:
    os.setsid()
    if os.fork() == 0:
        open(daemon + ".new", "w").write(str(os.getpid()))
        os.rename(daemon + ".new", daemon)  # as soon as this file exists, it may be killed
        time.sleep(600)
    os._exit(0)
os.waitpid(child, 0)
while not os.path.exists(daemon):
    time.sleep(0.01)
"""
    ended = forked(*ONE, script(forked, code))
    assert (ended.code, "the script left 1 process(es) behind: killed" in ended.err) == (0, True)
    pid = int((only_run(forked) / "daemon").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_option_after_the_script_is_reported(forked: Trainbox) -> None:
    """Without `--`, a script that ignores unknown arguments would hide the mistake."""
    file = script(forked, "ignored = ['--device']")
    for words, shown in (
        (("--gpus", "2", "--", "--lr", "1"), "--gpus 2"),
        (("--gpus=2",), "--gpus=2"),
        (("--lr", "1", "--prefix", "--gpus", "2"), "--prefix"),
        (("--lr", "1"), None),
        (("--device", "cuda"), None),  # the script has a word of it
        (("--", "--gpus", "2"), None),
    ):
        ended = forked("run", "--gpus", "0", file, *words)
        text = f"trainbox: {shown} after {file} is for the script: for Trainbox, write it before "
        assert (ended.code, text in ended.err) == (0, shown is not None), words
        assert (" is for the script" in ended.err) == (shown is not None), words


def test_workers_of_a_killed_script_are_no_message(forked: Trainbox) -> None:
    code = "import os, time\nif os.fork() == 0:\n    time.sleep(600)\nos.kill(os.getpid(), 9)\n"
    ended = forked(*ONE, script(forked, code))
    assert (ended.code, "left" in ended.err) == (137, False)


def test_a_script_that_removes_its_folder_does_not_succeed(forked: Trainbox) -> None:
    removing = "import os, shutil; shutil.rmtree(os.environ['TRAINBOX_RUN'])"
    ended = forked(*ONE, "--run", "r", script(forked, removing))
    assert ended.code == 4
    assert "(its folder is missing): make it, and keep it while a program writes" in ended.err


def test_a_program_that_is_not_python(forked: Trainbox) -> None:
    (forked.folder / "go").write_text('#!/bin/sh\necho "$TRAINBOX_RUN" "$@"\nexit 9\n')
    (forked.folder / "go").chmod(0o755)
    ended = forked(*ONE, "--run", "r", "go", "{run}", "a b")
    run = str(forked.folder / "runs/r")
    assert (ended.code, ended.out) == (9, f"{run} {run} a b\n")


def test_a_pipe_of_a_program_ends_as_in_a_shell(forked: Trainbox) -> None:
    program = forked.folder / "train.sh"
    program.write_text("#!/bin/sh\n(yes; echo $? >&2) | head -n 1\n")
    program.chmod(0o755)
    ended = forked(*ONE, "./train.sh")
    assert (ended.code, ended.out) == (0, "y\n")
    assert f"{128 + signal.SIGPIPE}\n" in ended.err


def test_a_program_whose_interpreter_is_missing(forked: Trainbox) -> None:
    (forked.folder / "go").write_text("#!/no/such\n")
    (forked.folder / "go").chmod(0o755)
    ended = forked(*ONE, "--run", "r", "go")
    assert ended.code == 2
    assert "go cannot be executed (No such file or directory): check its first line" in ended.err


def test_a_drill_on_more_processes_than_gpus_trains_nothing(
    forked: Trainbox, library: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "gpus.conf", "h100", count=2)
    words = ("--compare", "a.pt", "--processes", "1,3", script(forked, ""))
    ended = forked("drill", "run", *words, env=stub_env(library.parent, config))
    assert (ended.code, ended.out) == (2, "")
    assert "--processes 3 needs as many GPUs, and 2 are used: use fewer, or" in ended.err


REFUSALS = [
    (("run",), "no script is named: name it, as in `trainbox run train.py -- --epochs 3`"),
    (("run", "no.py"), "the script no.py cannot be read"),
    (("run", "--run", "a/b", "train.py"), "--run 'a/b' must be a folder name of at most 255"),
    (("run", "--gpu", "2", "train.py"), "no such option --gpu (did you mean --gpus?)"),
    # The hidden option --trial is not proposed.
    (("run", "--tria", "train.py"), "no such option --tria: the arguments of the script follow --"),
    (
        ("run", "--epochs", "3", "train.py"),
        "no such option --epochs: the arguments of the script follow --, as in",
    ),
    (("run", "-m", "pkg/train"), "-m takes the name of a module: write -m pkg.train"),
    (("run", "-m", "train.py"), "-m takes the name of a module: leave out -m for a file"),
    (("run", "--restart-on", "any", "train.py"), "add --restarts N"),
    (("run", "--run", "task", "train.py"), "is a run of a task, not of a script"),
    (("run", "--run", "other", "train.py"), "is a run of other.py, not of train.py"),
    (
        ("run", "--trial", "--run", "files", "train.py"),
        "metrics.jsonl would be changed: choose another --name of the sweep, or move the files",
    ),
    (("run", "--run", "files", "train.py"), "changed: choose another --run name, or move the fil"),
    (
        ("run", "--trial", "--run", "other", "train.py"),
        "is a run of other.py, not of train.py: choose another --name of the sweep",
    ),
    (("run", "--no-torchrun", "--processes", "2", "train.py"), "contradict each other"),
    (
        (
            *("run", "--restarts", "3", "--nnodes", "2", "--node-rank", "0", "--device", "cpu"),
            *("--rdzv-endpoint", "localhost:29400", "--rdzv-timeout-s", "1", "train.py"),
        ),
        "--restarts 3 and 2 nodes: a node cannot know whether the others start again",
    ),
]


@pytest.mark.parametrize(("words", "text"), REFUSALS, ids=lambda value: str(value)[:40])
def test_a_refused_run(forked: Trainbox, words: tuple[str, ...], text: str) -> None:
    script(forked, "open('ran', 'w').close()")
    for name, file, content in (
        ("task", "config.json", '{"task": "digits"}'),
        ("other", "config.json", '{"kind": "script", "script": "other.py", "is_module": false}'),
        ("files", "metrics.jsonl", ""),
    ):
        (forked.folder / "runs" / name).mkdir(parents=True)
        (forked.folder / "runs" / name / file).write_text(content)
    ended = forked(*words)
    assert ended.code == 2
    assert text in ended.err
    assert "Traceback" not in ended.err
    assert not (forked.folder / "ran").exists()


TASKS = """
import os
from trainbox import Classification, Task
SEED = int("7")
class Base(Task):
    epochs = 1
class Rings(Base):
    \"\"\"A task.\"\"\"
def helper():
    open(os.environ["TRAINBOX_RUN"] + "/weights.pt", "w").close()
"""
LINE = "only defines a task, and trained nothing: `trainbox train train.py:"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TASKS, f"{LINE}Rings` trains it"),
        (
            "import trainbox\nW = int('7')\nclass Spots(trainbox.Classification): pass",
            f"{LINE}Spots` trains it",
        ),
        (f"{TASKS}\nhelper()", ""),
        (f"{TASKS}\nresult = helper()", ""),
        (f"{TASKS}\nif __name__ == '__main__':\n    helper()", ""),
        (f"{TASKS}\nprint('trained')", ""),
        ("import trainbox\nW = int('7')\nclass Net(object): pass", ""),
        ("W = int('7')\nclass Task: pass\nclass Rings(Task): pass", ""),
    ],
)
def test_a_file_that_only_defines_a_task_names_the_command_for_it(
    forked: Trainbox, text: str, line: str
) -> None:
    ended = forked(*ONE, "--run", "r", "--device", "cpu", script(forked, text))
    assert ended.code == 0, ended.err
    assert ("only defines a task" in ended.err) is bool(line)
    assert line in ended.err


def test_a_task_file_that_prints_is_a_script(forked: Trainbox) -> None:
    (forked.folder / "other.py").write_text("print('trained')")
    ended = forked(*ONE, "--run", "r", "--device", "cpu", script(forked, f"import other\n{TASKS}"))
    assert (ended.code, ended.out) == (0, "trained\n")
    assert "only defines" not in ended.err


def test_commands_that_a_script_starts_have_folders_of_their_own(forked: Trainbox) -> None:
    script(forked, "import os; print(os.environ['TRAINBOX_RUN'])", "inner.py")
    outer = """
import os, subprocess, sys
trainbox = [sys.executable, "-P", "-m", "entrypoint"]
subprocess.run([*trainbox, "plan", "--device", "cpu"], check=True, stdout=subprocess.DEVNULL)
subprocess.run([*trainbox, "run", "--run", "inner", "inner.py"], check=True)
print(sorted(name for name in os.environ if name.startswith("TRAINBOX_")))
"""
    ended = forked(*ONE, "--run", "outer", script(forked, outer), env={"PROCESSES": "1"})
    assert ended.code == 0, ended.err
    assert ended.out == f"{forked.folder}/runs/inner\n['TRAINBOX_DEVICE', 'TRAINBOX_RUN']\n"
    assert ended.err.count("TRAINBOX_RUN is a path, and so not a setting: --run NAME sets") == 1


def test_the_run_of_a_script_is_not_one_of_a_task(forked: Trainbox) -> None:
    (forked.folder / "runs/r").mkdir(parents=True)
    config = '{"kind": "script", "script": "train.py", "is_module": false, "arguments": []}'
    (forked.folder / "runs/r/config.json").write_text(config)
    ended = forked("verify", "runs/other", "runs/r")
    assert (ended.code, ended.err) == (
        2,
        "trainbox: verify runs/r: this is a run of a script, which only the drill can repeat: "
        "use `trainbox drill run train.py --compare FILE`\n",
    )
    with pytest.raises(WrongUse, match="^runs/r is a run of a script, not of a task: use another"):
        config_in(json.loads(config), Path("runs/r/config.json"))
    for verb in ("evaluate", "export"):
        ended = forked(verb, "runs/r")
        assert (ended.code, ended.err) == (
            2,
            f"trainbox: {verb} runs/r: this is a run of a script, whose model only the script can "
            "build: write the evaluation into the script, or train a task\n",
        )


def test_two_runs_in_one_folder_are_refused(trainbox: Trainbox) -> None:
    name = script(trainbox, STOPPABLE.format(handler=""))
    first = trainbox.start(*ONE, "--run", "r", name)
    wait_until((trainbox.folder / "runs/r/ready").exists, first)
    second = trainbox(*ONE, "--run", "r", name)
    assert second.code == 2
    assert "another process uses" in second.err
    first.send_signal(signal.SIGTERM)
    assert finish(first).code == 75


def test_plan_run_starts_nothing(forked: Trainbox) -> None:
    name = script(forked, "open('ran', 'w').close()")
    ended = forked("plan", "run", "--processes", "2", "--run", "r", name, "--", "a")
    plan = json.loads(ended.out)
    assert (plan["strategy"], plan["nproc_per_node"]) == ("torchrun", 2)
    assert plan["argv"][-3:] == ["-u", "train.py", "a"]
    assert plan["env"]["TRAINBOX_RUN"] == str(forked.folder / "runs/r")
    assert not (forked.folder / "runs").exists()
    assert not (forked.folder / "ran").exists()
