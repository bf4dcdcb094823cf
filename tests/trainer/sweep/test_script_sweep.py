"""`trainbox sweep run`: its command line, and real sweeps whose processes are killed."""

import csv
import io
import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import Trainbox, finish, wait_until
from tests.support.here import Here
from tests.support.kinds import slow_but
from tests.support.nvml_stub.build import stub_env, write_config
from tests.support.paths import ROOT
from tests.support.processes import Processes
from trainbox.processes.process_tree import parent
from trainer.sweep.grid import Record
from trainer.sweep.study import open_study

# Writes its process id at each start. While `gate` exists, it waits, and saves after a SIGTERM.
_SCRIPT = """
import json, os, pathlib, signal, sys, time
seed, run = int(sys.argv[1]), pathlib.Path(os.environ["TRAINBOX_RUN"])
def save(*_):
    (run / "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
with (run / "starts").open("a") as starts:
    print(os.getpid(), file=starts)
while run.parents[2].joinpath("gate").exists():
    time.sleep(0.01)
print(json.dumps({"step": 10, "accuracy": (seed + 1) / 10}))
with (run / "ends").open("a") as ends:
    print("end", file=ends)
"""
# The seed 1 always fails, after binary output.
_BRITTLE = """
import json, os, sys
seed = int(sys.argv[1])
print(json.dumps({"step": 1, "accuracy": 0.9}), flush=True)
if seed == 1:
    os.write(1, b"\\x00\\xff no data here\\n")
    sys.exit(9)
print(json.dumps({"step": 2, "accuracy": (seed + 1) / 10}))
"""
_COMMAND = ("sweep", "run", "train.py", "--device", "cpu", "--name", "s")


def records(folder: Path) -> list[Record]:
    return open_study(folder / "runs/s", None).records()


def results(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((folder / "runs/s/results.csv").read_text())))


def starts(folder: Path, seed: int) -> list[int]:
    """Return the processes that have started the trial with this seed, oldest first."""
    path = folder / f"runs/s/trial-{seed:05d}/starts"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_sweep_of_a_script_records_each_trial(trainbox: Trainbox) -> None:
    """The one real start: options on both sides of the script, retries, records and results."""
    (trainbox.folder / "train.py").write_text(_BRITTLE)
    ended = trainbox(
        *("sweep", "run", "--seeds", "3", "train.py", "--name", "s", "--device", "cpu"),
        *("--metric", "min:accuracy", "--processes", "2", "--", "{seed}", "--out={run}"),
    )
    assert ended.code == 1, ended.out + ended.err
    assert ended.out.count("trial 1 failed on CPU slot ") == 2  # one retry
    failure = r"the script exited with code 9; its last lines: .*no data here"
    assert re.search(rf"1 of 3 trials failed: .* --retry-failed; trial 1: {failure}\n", ended.err)
    assert "Traceback" not in ended.out + ended.err
    lines = results(trainbox.folder)
    assert [(line["trial"], line["state"], line["seed"], line["accuracy"]) for line in lines] == [
        ("0", "done", "0", "0.1"),
        ("1", "failed", "1", ""),
        ("2", "done", "2", "0.3"),
    ]
    assert re.fullmatch(failure, lines[1]["message"])
    assert (trainbox.folder / "runs/s/results.png").read_bytes().startswith(b"\x89PNG")
    again = "trainbox run --device cpu --run s-best train.py -- 0 '--out={run}'"
    assert f"\nagain:     {again}\n" in ended.out
    assert "tensorboard" not in ended.out  # trials of a script have no files of it
    run = trainbox.folder / "runs/s/trial-00002"
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["arguments"] == ["2", "--out={run}"]
    assert [start["exit_code"] for start in manifest["starts"]] == [0]
    assert [entry["accuracy"] for entry in trainbox.entries("s/trial-00002", "train")] == [0.9, 0.3]
    assert not (run / "tensorboard").exists()


# Writes for TensorBoard to a folder that all trials share, as SummaryWriter does by default.
_BOARD = f"""
import pathlib, sys
sys.path.append({str(ROOT)!r})
from trainer.records.event_file import EventFile
file = EventFile(pathlib.Path("logs/shared"))
file.scalars({{"val/acc": float(sys.argv[1])}}, 1)
file.close()
"""


@pytest.mark.slow
@pytest.mark.rare
def test_scalars_that_a_trial_writes_to_a_shared_folder_are_its_own(trainbox: Trainbox) -> None:
    (trainbox.folder / "train.py").write_text(_BOARD)
    grid = ("--grid", "x=0.25,0.5", "--metric", "max:val/acc", "--processes", "2")
    ended = trainbox(*_COMMAND, *grid, "--", "{x}")
    assert ended.code == 0, ended.out + ended.err
    assert [(line["x"], line["val/acc"]) for line in results(trainbox.folder)] == [
        ("0.25", "0.25"),
        ("0.5", "0.5"),
    ]


# fmt: off
_ARGUMENTS = [
    (["train.py", "--grid", "lr=1,2", "--", "{seed}"], "{lr} is missing in the arguments"),
    (["train.py", "--", "{lr}"], "{lr} in the arguments after -- has no values"),
    (["train.py", "--seeds", "2"], "--seeds 2 would repeat the same command"),
    (["train.py", "--lr", "{lr}"], "no such option --lr"),
    (["train.py", "--lr", "{lr}"], ": the arguments of the script follow --, as in train.py"),
    (["train.py", "--ceck"], "no such option --ceck: the arguments of the script follow --"),
    (["train.py", "x"], "extra argument (x): the arguments of the script follow --"),
    (["--", "{seed}"], "sweep run needs one script, or -m MODULE: name it before --"),
    (["train.py", "-m", "my.train"], "sweep run needs one script, or -m MODULE"),
    (["trian.py", "--device", "cpu"], "the script trian.py cannot be read (No such file or "
     "directory): did you mean train.py?"),
    (["train.py", "--on-resume", "--resume last.pt", "--", "{seed}"],
     "--on-resume '--resume last.pt' names no file that shows whether there is something to "),
    (["train.py", "--sampler", "tpe", "--range", f"n=1:{'1' * 401}", "--", "{n}"],
     "1: a whole number is more than 9223372036854775807: give a smaller one"),
]
# fmt: on


@pytest.mark.parametrize(("arguments", "text"), _ARGUMENTS)
def test_wrong_use_is_reported_before_anything_starts(
    here: Here, arguments: list[str], text: str
) -> None:
    Path("train.py").touch()
    err = here.refused("sweep", "run", *arguments)
    assert text in err
    assert not (here.folder / "runs").exists()


@pytest.mark.slow
def test_the_first_script_of_the_page_is_a_trial_that_can_be_repeated(trainbox: Trainbox) -> None:
    """It calls init_process_group, so it needs torchrun's variables."""
    page = (ROOT / "docs/guides/own-script.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    (trainbox.folder / "train.py").write_text(f'{code}\nprint(\'{{"step": 1, "loss": 2}}\')\n')
    ended = trainbox(*_COMMAND, "--metric", "min:loss", "--torchrun")
    assert ended.code == 0, ended.out + ended.err
    logs = [trainbox.folder / f"runs/{run}/logs/rank-0.log" for run in ("s/trial-00000", "s-best")]
    again = re.findall(r"^again: +trainbox (.+)$", ended.out, re.MULTILINE)[0]
    assert trainbox(*shlex.split(again)).code == 0
    for log in logs:
        assert log.read_text().startswith(f"rank 0 of 1 writes to {log.parents[1]}\n")


# As most scripts of a course: it saves its best weights beside itself, and tests them at the end.
_FIXED_PATHS = """
import json, os, pathlib, sys, time
seed, run = sys.argv[1], pathlib.Path(os.environ["TRAINBOX_RUN"])
factor = float(pathlib.Path("config.txt").read_text())
saved = ["best.pt", "checkpoint/last.pt", str(pathlib.Path(__file__).parent / "out/model.pt")]
for name in saved:
    pathlib.Path(name).parent.mkdir(exist_ok=True)
    pathlib.Path(name).write_text(seed)
(run / "saved").touch()
while len([*run.parent.glob("trial-*/saved")]) < 2:
    time.sleep(0.01)
tested = [factor * int(pathlib.Path(name).read_text()) for name in saved]
print(json.dumps({"step": 1, "best": tested[0], "last": tested[1], "beside": tested[2]}))
"""


@pytest.mark.parametrize(
    "script", slow_but(["sub/train.py"], ["train.py", "sub/train.py", "{folder}/train.py"])
)
def test_each_trial_tests_the_model_that_it_has_saved(trainbox: Trainbox, script: str) -> None:
    folder = trainbox.folder
    script = script.format(folder=folder)
    (folder / "sub").mkdir()
    (folder / script).write_text(_FIXED_PATHS)
    (folder / "config.txt").write_text("0.5")
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint/last.pt").write_text("999")  # of an earlier training
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True
        )
    command = (*_COMMAND[:2], script, *_COMMAND[3:], "--processes", "2", "--seeds", "2")
    ended = trainbox(*command, "--metric", "max:best", "--", "{seed}")
    assert ended.code == 0, ended.out + ended.err
    tested = [[line[name] for name in ("best", "last", "beside")] for line in results(folder)]
    assert tested == [["0.0"] * 3, ["0.5"] * 3]
    assert (folder / "checkpoint/last.pt").read_text() == "999"
    assert not (folder / "best.pt").exists()
    for seed in (0, 1):
        # What a trial has written stays in its folder, without the copies of what it has read.
        run = folder / f"runs/s/trial-{seed:05d}"
        work = {path.relative_to(run / "work") for path in (run / "work").rglob("*.*")}
        beside = Path(script).parent if not Path(script).is_absolute() else Path()
        names = {Path("best.pt"), Path("checkpoint/last.pt"), beside / "out/model.pt"}
        assert work == names
        manifest = json.loads((run / "manifest.json").read_text())
        assert set(manifest["sources"]) == {str(beside / "train.py")}
        assert re.fullmatch("[0-9a-f]{40}", manifest["revision"])  # the commit has all of them


@pytest.mark.slow
def test_each_trial_is_recorded_once_although_processes_are_killed(trainbox: Trainbox) -> None:
    """A script, a worker and the whole sweep get SIGKILL, while their trials wait."""
    folder = trainbox.folder
    (folder / "train.py").write_text(_SCRIPT)
    (folder / "gate").touch()
    command = (*_COMMAND, "--seeds", "2", "--processes", "2", "--retries", "3", "--", "{seed}")
    sweep = trainbox.start(*command)
    wait_until(lambda: len(starts(folder, 0)) == len(starts(folder, 1)) == 1, sweep)
    (script,) = starts(folder, 0)
    os.kill(script, signal.SIGKILL)
    wait_until(lambda: len(starts(folder, 0)) == 2, sweep)
    (script,) = starts(folder, 1)
    worker = _ancestor(script, "trainer.sweep.script_worker")
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: len(starts(folder, 1)) == 2, sweep)
    Processes([script]).wait_until_gone()
    left = Processes([starts(folder, 0)[-1], starts(folder, 1)[-1]])
    assert len(left.living()) == 2
    sweep.send_signal(signal.SIGKILL)
    sweep.wait()
    left.wait_until_gone()
    assert [record.state for record in records(folder)] == ["running"] * 2
    (folder / "gate").unlink()
    ended = trainbox(*command)
    assert ended.code == 0, ended.out + ended.err
    assert [(line["trial"], line["state"], line["accuracy"]) for line in results(folder)] == [
        ("0", "done", "0.1"),
        ("1", "done", "0.2"),
    ]
    ends = [(folder / f"runs/s/trial-{seed:05d}/ends").read_text() for seed in (0, 1)]
    assert ends == ["end\n"] * 2
    assert [len(starts(folder, seed)) for seed in (0, 1)] == [3, 3]


def _ancestor(pid: int, module: str) -> int:
    """Return the nearest ancestor of a process that runs this module."""
    owner = parent(pid)
    while owner and module not in Path(f"/proc/{owner}/cmdline").read_text().split("\0"):
        owner = parent(owner)
    assert owner, f"no ancestor of {pid} runs {module}"
    return owner


@pytest.mark.slow
def test_a_stopped_sweep_lets_its_scripts_save_and_gives_their_trials_back(
    trainbox: Trainbox,
) -> None:
    folder = trainbox.folder
    (folder / "train.py").write_text(_SCRIPT)
    (folder / "gate").touch()
    command = (*_COMMAND, "--seeds", "3", "--processes", "2", "--", "{seed}")
    sweep = trainbox.start(*command)
    wait_until(lambda: len(starts(folder, 0)) == len(starts(folder, 1)) == 1, sweep)
    sweep.send_signal(signal.SIGTERM)
    ended = finish(sweep)
    assert ended.code == 75, ended.out + ended.err
    assert "SIGTERM received: the running scripts get SIGTERM" in ended.err
    assert "checkpoint" not in ended.err
    assert (folder / "runs/s/trial-00000/saved").exists()
    assert (folder / "runs/s/trial-00001/saved").exists()
    assert [record.state for record in records(folder)] == ["pending"] * 3
    (folder / "gate").unlink()
    assert trainbox(*command).code == 0
    assert [line["state"] for line in results(folder)] == ["done"] * 3


# Saves to a fixed path of its working folder, and fails once after that.
_NEEDS_THE_FILE = """
import argparse, json, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--resume")
given = parser.parse_args()
step = json.load(open(given.resume)) if given.resume else 0
os.makedirs("checkpoint", exist_ok=True)
json.dump(step + 1, open("checkpoint/last.pt", "w"))
if not given.resume:
    sys.exit(9)
print(json.dumps({"step": 1, "accuracy": step}))
"""


def test_a_trial_that_is_tried_again_resumes_from_its_own_working_folder(
    trainbox: Trainbox,
) -> None:
    (trainbox.folder / "train.py").write_text(_NEEDS_THE_FILE)
    words = ("--on-resume", "--resume ./checkpoint/last.pt", "--metric", "max:accuracy")
    ended = trainbox(*_COMMAND, *words, "--processes", "1")
    assert ended.code == 0, ended.err
    (row,) = results(trainbox.folder)
    assert float(row["accuracy"]) == 1


@pytest.mark.slow
@pytest.mark.rare
def test_a_script_that_takes_too_long_can_save_and_has_failed(trainbox: Trainbox) -> None:
    folder = trainbox.folder
    (folder / "train.py").write_text(_SCRIPT)
    (folder / "gate").touch()
    limits = ("--retries", "0", "--trial-minutes", "0.1")
    ended = trainbox(*_COMMAND, *limits, "--processes", "1", "--", "0")
    assert ended.code == 1
    assert "; trial 0: it took longer than --trial-minutes 0.1" in ended.err
    assert (folder / "runs/s/trial-00000/saved").exists()


@pytest.mark.slow
def test_trials_that_share_a_gpu_see_only_that_gpu(trainbox: Trainbox, library: Path) -> None:
    """A variable of the sweep's own launch, such as GPU_IDS, does not reach the trials."""
    (trainbox.folder / "train.py").write_text(
        "import json, os\n"
        "print(json.dumps({'step': 1, 'gpus': len(os.environ['CUDA_VISIBLE_DEVICES'].split(','))}))"
    )
    config = write_config(trainbox.folder / "gpus.conf", "h100", count=4)
    env = {**stub_env(library.parent, config), "GPU_IDS": "1,3", "SLURM_JOB_NUM_NODES": "2"}
    command = ("sweep", "run", "train.py", "--name", "s", "--per-gpu", "2", "--no-health")
    ended = trainbox(*command, "--seeds", "6", "--", "{seed}", env=env)
    assert ended.code == 0, ended.out + ended.err
    assert [(line["state"], line["gpus"]) for line in results(trainbox.folder)] == [
        ("done", "1")
    ] * 6
    manifests = [
        json.loads((trainbox.folder / f"runs/s/trial-{seed:05d}/manifest.json").read_text())
        for seed in range(6)
    ]
    used = {start["gpus"][0]["uuid"] for manifest in manifests for start in manifest["starts"]}
    assert 1 <= len(used) <= 2


def test_the_help_of_a_sweep_of_a_script_has_its_own_options(here: Here) -> None:
    page = here.command("sweep", "run", "--help")[1]
    assert re.findall(r"^(\w.+):$", page, re.MULTILINE) == ["Launch options", "Sweep options"]
    for option in ("--grid", "--seed", "--pruner", "--trial-minutes"):
        assert f"  {option} " in page
    assert "Values of {NAME} in ARGS" in page
