"""The command line: verbs, other programs, options, their environment variables, and errors."""

import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import entrypoint.cli.commands
import entrypoint.cli.health
import entrypoint.cli.planning
import entrypoint.cli.stored
import trainer.cli.commands
from entrypoint.driver.gpus import Detection, Gpu
from tests.support.commands import Ended, Trainbox, clean_environment
from trainbox.errors import Failure, OutOfMemory
from trainbox.options import table, types
from trainbox.options.optimizers import OPTIMIZERS
from trainbox.task_names.task_spec import built_in_tasks

_TASKS = f"use {', '.join(built_in_tasks())} (a task of your own is file.py:Class or module:Class)"
FOUR = tuple(Gpu(index, f"GPU-{letter}", "H100", 81559) for index, letter in enumerate("abcd"))

Command = Callable[..., Ended]


class FourGpus:
    """A driver that answers without a process of its own."""

    def detect(self) -> Detection:
        return Detection(FOUR)

    def close(self) -> None:
        pass


@pytest.fixture
def in_this_process(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[[Any, list[str], dict[str, str]], Ended]:
    """Call a package's `main` in an empty folder with these arguments and this environment."""

    def call(
        main: Callable[[], Any], arguments: list[str], env: dict[str, str], without: str = ""
    ) -> Ended:
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            wanted = clean_environment()
            wanted.pop(without, None)
            wanted |= env
            for name in os.environ.keys() - wanted.keys():
                patch.delenv(name)
            for name, value in wanted.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["trainbox", *arguments])
            with pytest.raises(SystemExit) as ended:
                main()
        streams = capfd.readouterr()
        return Ended(int(ended.value.code or 0), streams.out, streams.err)

    return call


@pytest.fixture
def plan(in_this_process: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run `trainbox plan` in this process, as on a host with four GPUs."""
    monkeypatch.setattr(entrypoint.cli.planning, "Driver", FourGpus)
    return lambda *arguments, **env: in_this_process(
        entrypoint.cli.commands.main, ["plan", *arguments], env, without="CUDA_VISIBLE_DEVICES"
    )


@pytest.fixture
def check(in_this_process: Callable[..., Ended]) -> Command:
    """Run `trainbox plan` in this process, on the CPU unless the test chooses another device.

    It checks what `trainbox train` checks before it launches anything.
    """
    return lambda *arguments, **env: in_this_process(
        entrypoint.cli.commands.main, ["plan", *arguments], {"DEVICE": "cpu", **env}
    )


def accepted(ended: Ended) -> str:
    """Return the settings from the environment, beside the device of `check`."""
    assert (ended.code, ended.err) == (0, ""), ended
    shown = json.loads(ended.out)["settings"]
    return str(shown).removeprefix("device cpu (from DEVICE)").removeprefix(", ")


def refused(ended: Ended) -> str:
    """Return the one line with the reason, without `trainbox: `."""
    assert ended.code == 2, ended
    assert ended.out == ""
    (line,) = ended.err.splitlines()
    assert line.startswith("trainbox: ")
    return line.removeprefix("trainbox: ")


# In the image, a first word that is not a verb is run as a program.

VERBS = (
    "the verbs are bench, clean, compare, config, doctor, drill, evaluate, export, health, new, "
    "plan, predict, run, runs, sweep, tasks, train, verify"
)
PROGRAM = "import os, sys; print(os.getpid(), sys.argv[1:], sys.stdin.read()); sys.exit(41)"


def test_a_program_replaces_the_launcher_with_its_arguments_and_streams(trainbox: Trainbox) -> None:
    arguments = ["--help", "-h", "--gpus", "two parts", "", "*", "$HOME", "\u00e9"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "entrypoint", sys.executable, "-c", PROGRAM, *arguments],
        env=clean_environment(GPUS="nonsense", TRAINBOX_BUILD_INFO="/no"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate("a line")
    assert (process.returncode, err) == (41, "")
    assert out == f"{process.pid} {arguments} a line\n"


def test_a_drill_or_bench_of_a_wrong_name_trains_nothing(
    in_this_process: Callable[..., Ended],
) -> None:
    for arguments, text in (
        (
            ["drill", "run", "--compare", "a.pt", "--gpus", "0", "nosuch"],
            "the script nosuch cannot be",
        ),
        (["drill", "--gpus", "0", "digts"], "no task 'digts': did you mean digits?"),
        (["bench", "digts"], "no task 'digts': did you mean digits?"),
        (["drill", "--processes", "2", "--gpus", "2"], "--processes is for CPU runs, and GPUs are"),
        (
            ["bench", "digits", "extra"],
            "Got unexpected extra argument (extra): the usage is `trainbox bench ",
        ),
        (
            ["health", "--monitor", "0.0.0.0:9400"],
            "Got unexpected extra argument (0.0.0.0:9400): did you mean --listen 0.0.0.0:9400?",
        ),
        (
            ["health", "--monitor", "9400"],
            "Got unexpected extra argument (9400): did you mean --listen 127.0.0.1:9400?",
        ),
    ):
        ended = in_this_process(entrypoint.cli.commands.main, arguments, {})
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.startswith(f"trainbox: {text}")


def test_the_plan_of_a_pbs_job_reads_the_hosts_from_its_file(
    check: Command, tmp_path: Path
) -> None:
    (tmp_path / "nodes").write_text("n1\nn1\nn2\n")
    for name, is_named in (("nodes", True), ("missing", False)):
        ended = check("digits", PBS_JOBID="7.server", PBS_NODEFILE=str(tmp_path / name))
        reason = json.loads(ended.out)["reason"]
        assert ("; the job of PBS has 2 hosts, and only this one trains" in reason) is is_named


@pytest.mark.parametrize(
    "command", [["drill", "--gpus", "0"], ["bench", "--processes", "1", "digits"]]
)
def test_a_drill_or_bench_refuses_a_batch_per_gpu(
    in_this_process: Callable[..., Ended], tmp_path: Path, command: list[str]
) -> None:
    """A drill would report the larger batch of more processes as different bits."""
    (file := tmp_path / "e.toml").write_text("[train]\nbatch-size-per-gpu = 8\n")
    for variable in ({"TRAINBOX_BATCH_SIZE_PER_GPU": "8"}, {"TRAINBOX_CONFIG": str(file)}):
        ended = in_this_process(entrypoint.cli.commands.main, command, variable)
        assert (ended.code, ended.out) == (2, "")
        assert ended.err == (
            f"trainbox: batch-size-per-gpu 8 contradicts the {command[0]}, which decides the batch "
            "on each number of GPUs: set batch-size instead\n"
        )


@pytest.mark.parametrize(
    ("env", "seen"),
    [
        ({}, "abcd"),
        ({"GPUS": "2"}, "ab"),
        ({"GPU_IDS": "3,1"}, "db"),
        ({"GPUS": "0"}, ""),
        ({"DEVICE": "cpu"}, ""),
    ],
)
@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("drill", "digits"),
        ("drill run", "--compare a.pt train.py"),
        ("bench", "digits --rounds 1"),
    ],
)
def test_a_drill_or_bench_trains_on_the_chosen_gpus(
    in_this_process: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    verb: str,
    words: str,
    env: dict[str, str],
    seen: str,
) -> None:
    started = []

    def start_child(argv: list[str], env: dict[str, str], **_: object) -> None:
        started.append((" ".join(argv), env["CUDA_VISIBLE_DEVICES"]))
        raise Failure("not started")

    monkeypatch.setattr("entrypoint.launch.inner_trainings.start_child", start_child)
    monkeypatch.setattr(entrypoint.cli.planning, "Driver", FourGpus)
    (tmp_path / "train.py").touch()
    arguments = f"{verb} {words}".split()
    main = entrypoint.cli.commands.main
    ended = in_this_process(main, arguments, env, without="CUDA_VISIBLE_DEVICES")
    assert "not started" in ended.err
    assert {visible for _, visible in started} == {",".join(f"GPU-{name}" for name in seen)}
    # A drill of a task begins with one process, and a bench ends with the most.
    line = f"{started[-1][0]} "
    most = 1 if verb == "drill" else len(seen)
    assert (f" --gpus {most} " if seen else " --device cpu ") in line


@pytest.mark.parametrize(
    ("words", "opens"),
    [
        ("plan digits", "entrypoint.cli.planning.Driver"),
        ("run train.py", "entrypoint.script.script_run.supervise"),
        ("health --gate", "entrypoint.cli.health.Driver"),
    ],
)
def test_too_many_open_files_are_one_line_with_the_limit(
    in_this_process: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: str,
    opens: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(opens, fail)
    (tmp_path / "train.py").touch()
    ended = in_this_process(entrypoint.cli.commands.main, words.split(), {})
    assert (ended.code, "Traceback" in ended.err) == (2, False)
    last = ended.err.splitlines()[-1]
    assert re.match(r"trainbox: this process needs more than \d+ open files, .*`ulimit -n", last)


def test_another_python_may_use_gpus_that_our_torch_does_not_support(
    in_this_process: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class OldGpus(FourGpus):
        def detect(self) -> Detection:
            return Detection(tuple(dataclasses.replace(gpu, capability=(3, 5)) for gpu in FOUR))

    def start_child(*_: object, **__: object) -> None:
        raise Failure("not started")

    monkeypatch.setattr("entrypoint.launch.inner_trainings.start_child", start_child)
    monkeypatch.setattr(entrypoint.cli.planning, "Driver", OldGpus)
    monkeypatch.setattr(entrypoint.cli.planning, "torch_architectures", lambda: ("sm_90",))
    (tmp_path / "ours.py").touch()
    (tmp_path / "other.sh").write_text("#!/bin/sh\n")
    (tmp_path / "other.sh").chmod(0o755)
    main = entrypoint.cli.commands.main
    for script, text in (("ours.py", "torch has no code for GPU 0"), ("./other.sh", "not started")):
        arguments = ["drill", "run", "--compare", "a.pt", script]
        ended = in_this_process(main, arguments, {}, without="CUDA_VISIBLE_DEVICES")
        assert text in ended.err
    for script, code in (("ours.py", 3), ("./other.sh", 0)):
        arguments = ["plan", "run", script]
        assert in_this_process(main, arguments, {}, without="CUDA_VISIBLE_DEVICES").code == code


def test_a_current_folder_that_was_removed(
    in_this_process: Callable[..., Ended], tmp_path: Path
) -> None:
    def main_without_folder() -> None:
        gone = tmp_path / "gone"
        gone.mkdir()
        os.chdir(gone)
        gone.rmdir()
        entrypoint.cli.commands.main()

    ended = in_this_process(main_without_folder, ["health"], {})
    assert (ended.code, ended.err) == (
        2,
        "trainbox: the current folder was removed: change to another one\n",
    )


@pytest.mark.parametrize(
    ("arguments", "no_program", "hint"),
    [
        (["trian"], "No such file or directory", "did you mean train?"),
        (["digits"], "No such file or directory", "did you mean `trainbox train digits`?"),
        (["nosuch", "--gpus", "1"], "No such file or directory", VERBS),
        (["./folder"], "Permission denied", VERBS),
        (["./file"], "Permission denied", VERBS),
    ],
)
def test_neither_a_verb_nor_a_program(
    in_this_process: Callable[..., Ended],
    tmp_path: Path,
    arguments: list[str],
    no_program: str,
    hint: str,
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch(mode=0o600)
    begin = f"'{arguments[0]}' is no verb of trainbox"
    ended = in_this_process(entrypoint.cli.commands.main, arguments, {})
    assert refused(ended) == f"{begin}: {hint}"
    of_image = {"TRAINBOX_BUILD_INFO": "/opt/trainbox/build-info.json"}
    ended = in_this_process(entrypoint.cli.commands.main, arguments, of_image)
    assert refused(ended) == f"{begin}, and no program that can be run ({no_program}): {hint}"


def test_a_program_as_a_verb_is_run_in_the_image_only(forked: Any, tmp_path: Path) -> None:
    """`trainbox rm runs/d1` must not remove a run, and `trainbox test` must not exit with 0."""
    made = tmp_path / "made"
    assert forked("touch", str(made)).code == 2
    assert not made.exists()
    code = forked("touch", str(made), env={"TRAINBOX_BUILD_INFO": "/no"}).code
    assert (code, made.exists()) == (0, True)


_OF_MONITOR = "--listen 1 --interval-s 1"


@pytest.mark.parametrize(
    ("invocation", "typed"),
    [
        (
            "verify a b",
            "--gpus 1 --gpu-ids 0 --processes 1 --device cpu --health --health-limits 1 "
            "--strategy dp --nnodes 1 --node-rank 1 --rdzv-endpoint 1 --rdzv-id 1 "
            "--rdzv-timeout-s 1 --steps 1 --data-dir 1",
        ),
        ("health", f"--deadline-s 1 {_OF_MONITOR}"),
        ("health --gate", f"--deadline-s 1 {_OF_MONITOR}"),
        (
            "health --live",
            f"--health-limits 1 --processes 1 --runs-dir 1 --deadline-s 1 {_OF_MONITOR}",
        ),
        ("health --monitor", "--json --deadline-s 1"),
        ("health --deep", _OF_MONITOR),
        (
            "health --list",
            "--gpus 1 --gpu-ids 0 --require 1 --health-limits 1 --health --processes 1 "
            f"--runs-dir 1 --deadline-s 1 {_OF_MONITOR}",
        ),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    in_this_process: Callable[..., Ended], invocation: str, typed: str
) -> None:
    ended = in_this_process(entrypoint.cli.commands.main, f"{invocation} {typed}".split(), {})
    shown = ", ".join(re.findall(r"--\S+", typed)).replace("--health,", "--health/--no-health,")
    assert refused(ended) == f"{invocation} got options that it does not use ({shown}): drop them"


@pytest.mark.parametrize(
    ("given", "shown"),
    [("--list --deep", "--list and --deep"), ("--gate --live --gate --json", "--gate and --live")],
)
def test_several_modes_of_health_are_refused(
    in_this_process: Callable[..., Ended], given: str, shown: str
) -> None:
    ended = in_this_process(entrypoint.cli.commands.main, ["health", *given.split()], {})
    assert refused(ended) == f"{shown} are different modes of health: choose one"


def test_variables_of_make_and_compose_are_not_refused(forked: Trainbox) -> None:
    env = {"GPUS": "4", "STRATEGY": "fsdp", "PROCESSES": "2", "NNODES": "3", "HEALTH": "0"}
    env |= {"HEALTH_LIMITS": "/nope", "TRAINBOX_DATA_DIR": "/d", "TRAINBOX_RUNS_DIR": "/r"}
    assert refused(forked("verify", "a", "b", env=env)).startswith("verify a: ")
    # A mode may be repeated.
    assert forked("health", "--list", "--list", "--json", env=env) == Ended(0, "[]\n", "")


# Help pages.


def test_without_arguments_the_page_of_verbs_is_shown(forked: Trainbox) -> None:
    ended = forked()
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == forked("--help").out
    verbs = re.findall(r"^  (\w+)  +\S", ended.out.split("Commands:\n")[1], re.MULTILINE)
    assert verbs == sorted(entrypoint.cli.commands.VERBS)


def test_all_options_of_train_are_listed_in_sections(forked: Trainbox) -> None:
    ended = forked("train", "--help-all")
    assert (ended.code, ended.err) == (0, "")
    assert re.findall(r"^(\S.*) options:$", ended.out, re.MULTILINE) == [
        *("Launch", "Health", "Cluster"),
        *("Training", "Batch", "Same bits", "Validation", "Storage"),
    ]
    declared = {f"--{row.key}" for row in table.options("train") if not row.hidden}
    assert {*re.findall(r"^  (?:-h, )?(--[\w-]+)", ended.out, re.MULTILINE)} == declared
    of_plan, of_train = (
        text.partition("Launch options:")[2]
        for text in (forked("plan", "--help-all").out, ended.out)
    )
    assert of_plan == of_train


# The plan as JSON, and launch options from arguments and from the environment.

ALONE = ["-P", "-m", "trainer", "train"]
MEETING = {"NNODES": "2", "NODE_RANK": "1", "RDZV_ENDPOINT": "node0:29400", "RDZV_ID": "run7"}
MEETING["NCCL_NET"] = "Socket"  # the ports of InfiniBand of this machine do not count


def test_a_plan_has_the_documented_fields(plan: Command) -> None:
    ended = plan("mnist", "--gpus", "1", "--epochs", "3", "--set", "dropout=0.1")
    assert (ended.code, ended.err) == (0, "")
    shown = json.loads(ended.out)
    fields = "strategy device gpus nnodes nproc_per_node argv reason settings env node_rank"
    assert list(shown) == fields.split()
    reason = "1 of 4 visible GPUs requested -> 1 process on GPU 0"
    gpu = {"index": 0, "uuid": "GPU-a", "name": "H100", "memory_mib": 81559}
    absent = ("mig_index", "mig_parent", "fault", "capability")
    assert shown | {"env": {}} == {
        "strategy": "single",
        "device": "cuda",
        "gpus": [gpu | dict.fromkeys(absent)],
        "nnodes": 1,
        "nproc_per_node": 1,
        "argv": [sys.executable, *ALONE, "mnist", "--set", "dropout=0.1", "--epochs", "3"],
        "reason": reason,
        "settings": "",
        "env": {},
        "node_rank": 0,
    }
    assert shown["env"].keys() == {
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS", "TRAINBOX_LAUNCH"),
        *("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "OMP_WAIT_POLICY"),
    }


def test_a_plan_shows_what_came_from_the_environment(plan: Command) -> None:
    env = {"GPUS": "2", "HEALTH": "no", "STRATEGY": "dp", "TASK": "mnist"}
    env |= {"RDZV_ID": "hf_0123456789abcdef", "SET": "width=16 url=https://me:pw@host/x"}
    env |= {"TRAINBOX_EPOCHS": "3", "TRAINBOX_SEED": "7", "TRAINBOX_DEVICE": "cuda"}
    ended = plan(
        "tests.support.tiny:Tiny", "--strategy", "ddp", "--seed", "8", "--set", "noise=1", **env
    )
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["settings"] == (
        "gpus 2 (from GPUS), device cuda (from TRAINBOX_DEVICE), health no (from HEALTH), "
        "rdzv-id (from RDZV_ID), "
        "epochs 3 (from TRAINBOX_EPOCHS)"
    )
    ended = plan("digits", "--set", "width=8", SET="width=16 dropout=0.1")
    argv = json.loads(ended.out)["argv"]
    assert {"dropout=0.1", "width=8"} == {word for word in argv if "=" in word and word[0] != "-"}
    ended = plan(GPUS="2", SET="width=16 dropout=0.1")
    assert json.loads(ended.out)["settings"] == "gpus 2 (from GPUS), set (from SET)"


# fmt: off
_SETTINGS: list[tuple[dict[str, str], list[str], dict[str, Any]]] = [
    ({"GPUS": "3"}, ["--gpus", "2"], {"nproc_per_node": 2}),
    ({"GPU_IDS": "0,2"}, [],
     {"reason": "GPUs 0 2 named, of 4 visible -> torchrun DDP, 2 processes"}),
    ({"DEVICE": "cpu", "PROCESSES": "2"}, [], {"nproc_per_node": 2, "strategy": "ddp", "gpus": []}),
    (MEETING, [], {
        "nnodes": 2,
        "reason": "4 of 4 GPUs visible -> torchrun DDP, 8 processes on 2 nodes; this is node 1, "
                  "rendezvous at node0:29400; NCCL over TCP (NCCL_NET=Socket)"}),
    (MEETING, ["--node-rank", "0", "--rdzv-endpoint", "x:1", "--nnodes", "3"], {
        "nnodes": 3,
        "reason": "4 of 4 GPUs visible -> torchrun DDP, 12 processes on 3 nodes; this is node 0, "
                  "rendezvous at x:1; NCCL over TCP (NCCL_NET=Socket)"}),
]
# fmt: on


@pytest.mark.parametrize(("env", "arguments", "expected"), _SETTINGS)
def test_launch_options_come_from_arguments_and_the_environment(
    plan: Command, env: dict[str, str], arguments: list[str], expected: dict[str, Any]
) -> None:
    ended = plan(*arguments, **env)
    assert (ended.code, ended.err) == (0, "")
    shown = json.loads(ended.out)
    assert {name: shown[name] for name in expected} == expected


def test_omp_num_threads_of_the_environment_is_kept(plan: Command) -> None:
    assert json.loads(plan(OMP_NUM_THREADS="3").out)["env"]["OMP_NUM_THREADS"] == "3"
    assert (
        json.loads(plan("--gpus", "1", OMP_NUM_THREADS="many").out)["env"]["OMP_NUM_THREADS"]
        != "many"
    )


# fmt: off
_LAUNCHES = [
    (["--gpus", "2.0"],
     "Invalid value for '--gpus': '2.0' is neither a number of GPUs nor `all`: write 2"),
    (["--gpus", "two"],
     "Invalid value for '--gpus': 'two' is neither a number of GPUs nor `all`: write a number"),
    (["--gpus"], "--gpus needs a value: write --gpus N|all"),
    (["--strategy", "zero3"],
     "Invalid value for '--strategy': 'zero3' is not one of 'ddp', 'fsdp', 'dp': did you mean "
     "fsdp?"),
    (["--processes", "0"], "Invalid value for '--processes': 0 is less than 1"),
    (["--processes", "100000"], "Invalid value for '--processes': 100000 is more than 4096"),
    (["--node-rank=-1"], "Invalid value for '--node-rank': -1 is less than 0"),
]
# fmt: on


@pytest.mark.parametrize(("arguments", "text"), _LAUNCHES)
def test_wrong_launch_options_are_refused(plan: Command, arguments: list[str], text: str) -> None:
    assert refused(plan(*arguments)) == text


# The trainer's options, checked before anything is launched.


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_a_wrong_training_option_is_reported_once_and_starts_nothing(
    forked: Trainbox, verb: str
) -> None:
    text = "Invalid value for '--lr': nan is not a finite number above 0"
    assert refused(forked(verb, "--lr", "nan", "--processes", "2", "--device", "cpu")) == text
    assert list(forked.folder.iterdir()) == []


# The options by the lowest number that they take, or above which they take numbers.
FROM_1 = "epochs max-steps batch-size batch-size-per-gpu accumulation base-batch-size eval-every"
FROM_1 += " patience checkpoint-steps keep log-steps digest-steps shards threads"
FROM_0 = "skip-nonfinite workers seed warmup-epochs weight-decay"
ABOVE_0 = "lr clip-norm checkpoint-minutes measure-seconds profile hang-minutes"
TOO_LOW = dict.fromkeys(f"{FROM_1} {ABOVE_0}".split(), "0") | dict.fromkeys(FROM_0.split(), "-1")
WRONG_NUMBERS = [*TOO_LOW.items(), ("workers", "1025"), ("seed", f"{2**63}"), ("epochs", "1.5")]
WRONG_NUMBERS += [("epochs", f"{2**63}"), ("warmup-epochs", "1e308")]
WRONG_NUMBERS += [("epochs", ""), ("lr", "-nan"), ("lr", "1e400"), ("lr", "--epochs")]


@pytest.mark.parametrize(
    ("option", "value"), WRONG_NUMBERS, ids=[f"{o}={v[:20]}" for o, v in WRONG_NUMBERS]
)
def test_a_wrong_number_is_refused(check: Command, option: str, value: str) -> None:
    text = refused(check(f"--{option}={value}"))
    assert text.startswith(f"Invalid value for '--{option}': ")
    assert value[:20] in text


def test_every_number_is_in_the_table() -> None:
    kinds = (click.types.IntParamType, click.types.FloatParamType)
    kinds += (types.Whole, types.Number)
    params = trainer.cli.commands.train.params
    assert {p.opts[0] for p in params if isinstance(p.type, kinds)} == {f"--{o}" for o in TOO_LOW}


_LISTED = (
    "`trainbox plan --help-all` lists the options, and a field of this name in the task is set by "
    "--set"
)
# fmt: off
_MISTAKES = [
    ("--epochs 1 --max-steps 2",
     "--epochs 1 and --max-steps 2 both set the length of the run: drop one"),
    ("--device cpu --precision fp16",
     "--precision fp16 needs an NVIDIA GPU (the device is cpu): use fp32 or bf16"),
    ("digit",
     "no task 'digit': did you mean digits? (a task of your own is file.py:Class or module:Class)"),
    ("zebra", f"no task 'zebra': {_TASKS}"),
    ("exp.toml", "exp.toml is a file of settings, not a task: write --config exp.toml"),
    ("nb.ipynb", "nb.ipynb is a notebook: make a script of it with `jupyter nbconvert --to script "
     "nb.ipynb`"),
    ("my.py:1", "task my.py:1: '1' is not a class name: write file.py:Class or module:Class"),
    ("../my:Task", "task ../my:Task: '../my' is neither a .py file nor a module: write "
     "file.py:Class or module:Class"),
    ("digits mnist",
     "Got unexpected extra argument (mnist): the usage is `trainbox plan [OPTIONS] [TASK]`"),
    ("digits width=8",
     "Got unexpected extra argument (width=8): a field of the task is set by --set width=8"),
    ("digits epochs=8", "Got unexpected extra argument (epochs=8): did you mean --epochs 8?"),
    ("digits --set width 8", "Got unexpected extra argument (8): did you mean --set width=8?"),
    ("--optimizer lion",
     f"Invalid value for '--optimizer': 'lion' is not one of {', '.join(map(repr, OPTIMIZERS))}."),
    ("--epoch 1",
     "no such option --epoch (did you mean --epochs?)"),
    ("--learning-rate 0.1", "no such option --learning-rate (did you mean --lr?)"),
    ("-lr 0.1", "no such option -lr (did you mean --lr?)"),
    ("--no-rehersal", "no such option --no-rehersal (did you mean --no-rehearsal?)"),
    ("--task digits", "no such option --task (write its value alone)"),
    ("--width 8", f"no such option --width: {_LISTED} width=8"),
    ("--width=8", f"no such option --width: {_LISTED} width=8"),
    ("--chek", f"no such option --chek: {_LISTED} chek=VALUE"),
    ("--num_train_epochs 3", "no such option --num_train_epochs (here: --epochs)"),
    ("--trainer.max_epochs 3", "no such option --trainer.max_epochs (here: --epochs)"),
    ("--fp16", "no such option --fp16 (here: --precision fp16)"),
    ("--wd 0.1", "no such option --wd (here: --weight-decay)"),
    ("--optimizer.weight_decay 0.1",
     "no such option --optimizer.weight_decay (did you mean --weight-decay?)"),
    ("-e 3", "no such option -e (here: --epochs)"),
    ("-v", "no such option -v: `trainbox plan --help-all` lists the options"),
    ("-help", "no such option -help (did you mean --help?)"),
    ("--hepl", "no such option --hepl (did you mean --help?)"),
    ("--multirun", "no such option --multirun (here: `trainbox sweep`, as with --grid lr=0.1,1)"),
    ("digits optimizer.lr=1",
     "Got unexpected extra argument (optimizer.lr=1): did you mean --lr 1?"),
    ("digits +width=3",
     "Got unexpected extra argument (+width=3): a field of the task is set by --set width=3"),
    ("digits --set width = 3",
     "Got unexpected extra arguments (= 3): write no spaces, as in --set width=3"),
    ("digits lr=1 epochs=3", "Got unexpected extra arguments (lr=1 epochs=3): did you mean --lr 1 "
     "--epochs 3?"),
    ("digits width=3 batch_size 8", "Got unexpected extra arguments (width=3 batch_size 8): the "
     "usage is `trainbox plan [OPTIONS] [TASK]`"),
    ("digits lr 0.1 width 8", "Got unexpected extra arguments (lr 0.1 width 8): did you mean "
     "--lr 0.1 --set width=8?"),
    ("my.py:A my.py:A", "Got unexpected extra argument (my.py:A): write my.py:A once"),
    ("my.py:A my.py:B",
     "Got unexpected extra argument (my.py:B): one command is for one task: leave out my.py:B"),
    ("digits digits", "Got unexpected extra argument (digits): write digits once"),
    ("my.py Rings", "Got unexpected extra argument (Rings): did you mean my.py:Rings?"),
    ("help", "no task 'help': write --help"),
    ("list", "no task 'list': `trainbox runs` lists runs and sweeps, and `trainbox tasks` lists "
     "tasks"),
    ("--lr 0,1", "Invalid value for '--lr': '0,1' is not a number: write one number, with a point; "
     "several are for `trainbox sweep --grid`"),
    ("--epochs 1e2", "Invalid value for '--epochs': '1e2' is not a whole number: write 100"),
    ("--epochs 1,000", "Invalid value for '--epochs': '1,000' is not a whole number: write 1000"),
    ("--seed 1,2", "Invalid value for '--seed': '1,2' is not a whole number: write one number"),
    ("--devices 2", "no such option --devices (here: --gpus)"),
    ("--early-stopping-patience 2", "no such option --early-stopping-patience (here: --patience)"),
    ("--resume runs/a",
     "Invalid value for '--resume': 'runs/a' is neither auto, never nor anyway: leave out "
     "--resume, because the command that started a run resumes it; --init RUN starts a new run "
     "from the weights of another run"),
    ("--lr --epochs 3", "--lr needs a value: write --lr NUMBER"),
    ("--set --epochs 3", "--set needs a value: write --set NAME=VALUE"),
    ("digits --resume", "--resume needs a value: write --resume [auto|never|anyway]"),
    ("--resume --run r", "--resume needs a value: write --resume [auto|never|anyway]"),
    ("digits data/K", "Got unexpected extra argument (data/K): a folder of data is set by "
     "--set folder=K (`trainbox tasks digits` lists the fields)"),
    ("digits other/K", "Got unexpected extra argument (other/K): a folder of data is set by "
     "--data-dir other --set folder=K (`trainbox tasks digits` lists the fields)"),
    ("--config none.json",
     "--config none.json does not exist: give an experiment or a run's config.json"),
]
# fmt: on


@pytest.mark.parametrize(("arguments", "text"), _MISTAKES)
def test_contradictions_and_typing_errors_are_reported(
    check: Command, arguments: str, text: str
) -> None:
    assert refused(check(*arguments.split())) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--processes 2 train digits", "trainbox train --processes 2 digits"),
        ("--gpus 1 digits", "trainbox train --gpus 1 digits"),
        ("--gpus=1", "trainbox train --gpus=1"),
        ("--gpus 1 train.py -- --lr 1", "trainbox run --gpus 1 train.py -- --lr 1"),
        ("--device cpu run s.py -- --lr 1", "trainbox run --device cpu s.py -- --lr 1"),
        ("--nproc_per_node=2 train.py", "trainbox run --processes 2 train.py"),
        ("--standalone --nproc-per-node 2 a.py b", "trainbox run --processes 2 a.py -- b"),
        ("--master_port 3 run train.py", "trainbox run train.py"),
        ("--num_train_epochs 3 digits", "trainbox train --epochs 3 digits"),
    ],
)
def test_an_option_before_the_verb_is_moved(
    in_this_process: Callable[..., Ended], arguments: str, text: str
) -> None:
    ended = in_this_process(entrypoint.cli.commands.main, arguments.split(), {})
    assert refused(ended) == f"options come after the verb: `{text}`"


def test_an_option_that_no_verb_has_is_not_moved(in_this_process: Callable[..., Ended]) -> None:
    ended = in_this_process(entrypoint.cli.commands.main, ["--foo"], {})
    assert refused(ended) == "no such option --foo: `trainbox --help` lists the verbs"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("clean -n", "-n (clean removes nothing until you answer yes or add --yes)"),
        ("clean --dry-run", "--dry-run (clean removes nothing until you answer yes or add --yes)"),
        ("clean --force", "--force (here: --yes)"),
        ("clean --all", "--all (clean keeps each last way to resume; you can remove the folder"),
        ("train digits --ckpt_path a", "--ckpt_path (the command that started a run resumes it, "),
        ("evaluate runs/a --ckpt_path a", "--ckpt_path (here: --checkpoint)"),
        ("export runs/a --format onnx", "--format (here: --to)"),
        ("export runs/a --onnx", "--onnx (here: --to onnx)"),
        ("predict runs/a --input b", "--input (write the files after the run: predict RUN FILES)"),
        ("train --dry-run", "--dry-run (`trainbox plan` shows what would be launched)"),
        ("train digits --evaluate", "--evaluate (`trainbox evaluate RUN` computes the metrics of "),
        ("train digits --test", "--test (`trainbox evaluate RUN` computes the metrics of a run)"),
        ("train digits --no-deterministic", "--no-deterministic (here: --fast)"),
        ("sweep digits --no_deterministic", "--no_deterministic (here: --fast)"),
        ("train digits --grad-clip 1", "--grad-clip (here: --clip-norm)"),
        ("train digits --log-every 1", "--log-every (here: --log-steps)"),
        ("train digits --amp-dtype bf16", "--amp-dtype (here: --precision)"),
        ("train digits --output runs", "--output (here: --runs-dir)"),
        ("train digits --lr-scheduler step", "--lr-scheduler (here: schedule() of the task)"),
        ("train digits --label_smoothing 0.1", "--label_smoothing (here: losses() of the task"),
        ("plan digits --val-split 0.1", "--val-split (here: train_dataset() and validation_data"),
        ("sweep digits --random", "--random (here: --sampler random)"),
        ("evaluate runs/a --best", "--best (here: --checkpoint best)"),
        ("predict runs/a b --last", "--last (here: --checkpoint last)"),
        ("train --predict x", "--predict (`trainbox predict RUN FILES` predicts files with the "),
        (
            "train digits --resume_from_checkpoint runs/a",
            "--resume_from_checkpoint (the command that started a run resumes it, and --init RUN "
            "starts a new run from the weights of another run)",
        ),
    ],
)
def test_an_option_of_another_program_has_a_cure(
    in_this_process: Callable[..., Ended], arguments: str, text: str
) -> None:
    ended = in_this_process(entrypoint.cli.commands.main, arguments.split(), {})
    assert refused(ended).startswith(f"no such option {text}")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--standalone", "leave out --standalone: Trainbox sets up torchrun itself"),
        ("--rdzv_backend=c10d", "leave out --rdzv_backend: Trainbox sets up torchrun itself"),
        ("--master-port 3", "leave out --master-port: Trainbox sets up torchrun itself; several"),
    ],
)
def test_an_option_of_torchrun_is_left_out(
    in_this_process: Callable[..., Ended], words: str, text: str
) -> None:
    arguments = ["run", *words.split(), "train.py"]
    ended = in_this_process(entrypoint.cli.commands.main, arguments, {})
    assert refused(ended).startswith(text)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("digits --epochs 3", "train digits --epochs 3"),
        ("a.py:A --epochs 3", "train a.py:A --epochs 3"),
        ("a.py --lr 3", "run a.py -- --lr 3"),
        ("a.py", "run a.py"),
        ("fit digits", "train digits"),
        ("launch train.py", "run train.py"),
        ("launch --num_processes 2 train.py --lr 3", "run --processes 2 train.py -- --lr 3"),
        ("launch --num_processes 2 a.py:A", "train --processes 2 a.py:A"),
        ("eval runs/a", "evaluate runs/a"),
        ("tune digits --seeds 2", "sweep digits --seeds 2"),
        ("list runs", "runs"),
        ("ls", "runs"),
        ("test runs/a", "evaluate runs/a"),
        ("help", "--help"),
        ("help train", "train --help"),
        ("version", "--version"),
    ],
)
def test_the_verb_of_another_program_has_a_cure(
    in_this_process: Callable[..., Ended], words: str, meant: str
) -> None:
    ended = in_this_process(entrypoint.cli.commands.main, words.split(), {})
    assert refused(ended).endswith(f": did you mean `trainbox {meant}`?")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("python x.py --lr 3", "leave out python: `trainbox run x.py -- --lr 3`"),
        ("torchrun --standalone x.py", "leave out torchrun: `trainbox run x.py`"),
        ("accelerate launch x.py", "use `trainbox run x.py` instead"),
        ("tensorboard runs", "`tensorboard --logdir runs` shows the curves of the runs"),
        ("sbatch job.sh", "docs/guides/slurm.md shows the batch script"),
        (
            "test my.py:C",
            "did you mean `trainbox evaluate RUN`, with the folder of a run of my.py:C?",
        ),
        (
            "infer digits a.png",
            "did you mean `trainbox predict RUN a.png`, with the folder of a run of digits?",
        ),
    ],
)
def test_a_program_that_starts_scripts_has_a_cure(
    in_this_process: Callable[..., Ended], words: str, text: str
) -> None:
    ended = in_this_process(entrypoint.cli.commands.main, words.split(), {})
    assert refused(ended).endswith(f": {text}")


@pytest.mark.parametrize(
    ("option", "value", "cure"),
    [
        ("device", "gpu", "did you mean cuda?"),
        ("device", "cuda:1", "to name a GPU use --gpu-ids 1"),
        ("device", "2", "to name a GPU use --gpu-ids 2"),
        ("precision", "16-mixed", "did you mean fp16?"),
        ("precision", "BF16", "did you mean bf16?"),
        ("strategy", "deepspeed", "did you mean fsdp?"),
        ("optimizer", "adamm", "did you mean adam?"),
        ("gpus", "-1", "write all"),
        ("gpus", "cuda:0", "to name GPUs use --gpu-ids 0"),
        ("gpus", "two", "write a number"),
    ],
)
def test_the_value_of_another_program_has_a_cure(
    check: Command, option: str, value: str, cure: str
) -> None:
    assert refused(check(f"--{option}", value, DEVICE="")).endswith(f": {cure}")


def test_the_name_of_a_task_in_another_form_has_a_cure(check: Command, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    text = "class Base: pass\nclass Rings(Base): pass\nclass Waves(Base): pass\n"
    (tmp_path / "mine/rings.py").write_text(text)
    (tmp_path / "exp.toml").touch()
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/config.json").touch()
    for spec, cure in (
        ("Rings", "did you mean mine/rings.py:Rings?"),
        ("mine.rings.Rings", "did you mean mine.rings:Rings?"),
        ("mine/rings:Rings", "did you mean mine/rings.py:Rings?"),
        ("mine/rings.py::Rings", "did you mean mine/rings.py:Rings?"),
        ("mine/rings.py", "write mine/rings.py:Rings or mine/rings.py:Waves; a script is started"),
        ("exp", "exp.toml is a file of settings, not a task: write --config exp.toml"),
        ("runs/a", "the command that started a run resumes it, and --config runs/a starts another"),
    ):
        assert cure in refused(check(spec)), spec


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("sweep digits --grid lr 0.1 0.2", "write commas and no spaces, as in --grid lr=0.1,0.2"),
        ("sweep digits --grid lr=0.1, 0.2", "write commas and no spaces, as in --grid lr=0.1,0.2"),
        ("sweep digits lr=0.1,0.2", "(lr=0.1,0.2): did you mean --grid lr=0.1,0.2?"),
        ("sweep digits +width=[8]", "(+width=[8]): did you mean --grid width=8?"),
        ("sweep digits seeds=3", "(seeds=3): did you mean --seeds 3?"),
        ("runs mine", "the folder of all runs is set by --runs-dir mine"),
        (
            "runs d1",
            "`trainbox runs` lists all runs, and `trainbox config RUN` has the settings of a run",
        ),
        (
            "clean runs/d1",
            "`trainbox clean` is for all runs, and you can remove the folder of a run yourself",
        ),
        ("runs --limit 3", "no such option --limit: `trainbox runs --help` lists the options"),
        ("evaluate mine/a/logs", "this is a part of a run: did you mean mine/a?"),
        (
            "evaluate my.py:C",
            "evaluate my.py:C: the folder does not exist: give the folder of a run of this task, "
            "as `trainbox train my.py:C` prints it",
        ),
        (
            "export digits",
            "export digits: the folder does not exist: give the folder of a run of this task, as "
            "`trainbox train digits` prints it",
        ),
        ("predict mine/a/logs mine/a", "the run comes before the files: `trainbox predict mine/a "),
        ("run digits", "it is a task: `trainbox train digits`"),
        ("run mine/x.py:X", "it is a task: `trainbox train mine/x.py:X`"),
    ],
)
def test_words_in_the_wrong_place_have_a_cure(
    in_this_process: Callable[..., Ended], tmp_path: Path, words: str, text: str
) -> None:
    (tmp_path / "mine/a/logs").mkdir(parents=True)
    for name in ("config.json", "manifest.json"):
        (tmp_path / "mine/a" / name).touch()
    assert text in refused(in_this_process(entrypoint.cli.commands.main, words.split(), {}))


def test_what_follows_a_script_is_its_own_and_help_is_no_value(forked: Any) -> None:
    (forked.folder / "t.py").write_text("import sys; print(sys.argv[1:])")
    for words in (["lr=1", "-m"], ["--gpus"], ["--python"]):
        assert forked("run", "--gpus", "0", "t.py", *words).out == f"{words}\n"
    assert refused(forked("train", "--run", "--help")).startswith(
        "--run needs a value: write --run"
    )
    assert refused(forked("run", "--python", "--gpus", "0", "t.py")).startswith("--python needs a ")


def test_the_package_is_the_command_as_well(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "trainbox", "train", "digit"]
    ended = subprocess.run(
        argv, env=clean_environment(), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("trainbox: no task 'digit': did you mean digits?")


# Training options in the environment.


def test_arguments_override_training_options_of_the_environment(check: Command) -> None:
    assert refused(check(STRATEGY="ring")).startswith(
        "Invalid value for '--strategy' (from STRATEGY): 'ring'"
    )
    assert refused(check(TRAINBOX_EPOCHS="0")).startswith(
        "Invalid value for '--epochs' (from TRAINBOX_EPOCHS): 0 is less than 1"
    )
    assert accepted(check("--epochs", "1", TRAINBOX_EPOCHS="0")) == ""
    assert refused(check(TRAINBOX_COMPILE="offf")) == (
        "Invalid value for '--compile' (from TRAINBOX_COMPILE): 'offf' is neither true nor false"
    )
    assert refused(check(SET="width=64 x")) == "--set x: write NAME=VALUE, as in --set width=64"
    assert refused(check(TASK="mnits")).startswith("no task 'mnits': did you mean mnist?")


def test_an_empty_variable_counts_as_unset(check: Command) -> None:
    names = table.variables(table.COMMANDS["plan"])
    assert accepted(check("--device", "cpu", **dict.fromkeys(names, ""))) == ""


# Hostile values.


NO_NAMES = ["../x", "..", ".hidden", "/x", "a\nb", "\x1b[2J", "\u202eb", "x" * 300]


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_run_must_be_a_name_and_not_a_path(check: Command, name: str) -> None:
    text = refused(check("--run", name))
    assert text == (
        f"--run {name!r} must be a folder name of at most 255 bytes, not a path: set the "
        "parent folder with --runs-dir"
    )


def test_a_name_in_another_encoding_is_refused_as_such(check: Command) -> None:
    text = refused(check("--run", "L\udcc3\udca4ufe"))
    assert text == (
        "--run 'L\\udcc3\\udca4ufe' has bytes that are no characters in the encoding here (utf-8): "
        "use other characters, or set LC_ALL=C.UTF-8, and no PYTHONUTF8=0"
    )


@pytest.mark.parametrize(
    ("limit_gb", "cuda", "fails"),
    [(3, "13.0", True), (3, None, False), (4.4, "13.0", False), (-1, "13.0", False)],
)
def test_an_address_space_without_room_for_torch_is_refused(
    monkeypatch: pytest.MonkeyPatch, limit_gb: float, cuda: str | None, fails: bool
) -> None:
    """As by h_vmem of Grid Engine: each size fails in another way, with a traceback or an abort."""
    monkeypatch.setattr(entrypoint.cli.planning, "torch_cuda", lambda: cuda)
    monkeypatch.setattr("resource.getrlimit", lambda _: (int(limit_gb * 1e9), -1))
    ended = CliRunner().invoke(entrypoint.cli.commands.cli, ["plan", "digits", "--device", "cpu"])
    assert isinstance(ended.exception, OutOfMemory) is fails
    assert not fails or "limited to 3.0 GB, and torch needs more than 4.1 GB: raise" in str(
        ended.exception
    )


@pytest.mark.parametrize("task", ["$(touch x)", "a\nb", "/etc/passwd", "\udcff", "", "x" * 200])
def test_a_hostile_task_is_refused_as_an_unknown_name(
    check: Command, tmp_path: Path, task: str
) -> None:
    text = refused(check("--", task))
    assert text == f"no task {task!r}: {_TASKS}"
    assert list(tmp_path.iterdir()) == []


BIG = "x" * 1_000_000


# fmt: off
CONFIGS: list[tuple[str | bytes, str]] = [
    (b"\xff\xfe",
     "--config c.json is not JSON ('utf-8' codec can't decode byte 0xff in position 0"),
    ("[" * 100_000, "--config c.json is not JSON ("),
    (json.dumps({BIG: 1}), "--config c.json has an unknown setting (xxx"),
    (json.dumps({"task": BIG}), "no task 'xxx"),
    ('{"fields": null}', ""),
    ('{"epochs": 1, "max_steps": 2}',
     "--epochs 1 and --max-steps 2 both set the length of the run: drop one"),
    *((f'{{"epochs": {value}}}', "Invalid value for '--epochs' (from --config): ")
      for value in ("NaN", "[]", "true", f'"{BIG}"')),
    (f'{{"learning_rate": 1{"0" * 400}}}', "Invalid value for '--lr' (from --config): "),
    ('{"deterministic": 3}', "Invalid value for '--deterministic' (from --config): "),
]
# fmt: on


@pytest.mark.parametrize(("content", "text"), CONFIGS, ids=lambda value: repr(value[:30]))
def test_a_hostile_config_file_is_refused(
    check: Command, tmp_path: Path, content: str | bytes, text: str
) -> None:
    (tmp_path / "c.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    line = refused(check("--config", "c.json"))
    assert line.startswith(text) and len(line) <= 1000
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]


@pytest.mark.parametrize("verb", ["train", "verify", "tasks", "sweep show"])
def test_the_usage_of_a_verb_shows_the_typed_command(
    in_this_process: Callable[..., Ended], verb: str
) -> None:
    shown = in_this_process(entrypoint.cli.commands.main, [*verb.split(), "--help"], {}).out
    assert shown.startswith(f"Usage: trainbox {verb} [OPTIONS] ")


# The command line of the trainer, which the table makes of the settled values.


@pytest.mark.parametrize(
    ("command", "flag"),
    [(n, f"--{row.key}") for n in table.COMMANDS for row in table.options(n) if row.required],
)
def test_a_required_option_is_required(
    in_this_process: Callable[..., Ended], command: str, flag: str
) -> None:
    ended = in_this_process(entrypoint.cli.commands.main, [*command.split(), "a"], {})
    assert refused(ended).startswith(f"Missing option '{flag}'")
    assert "the usage is `trainbox " in ended.err


def test_a_missing_verb_is_reported_with_the_usage(in_this_process: Callable[..., Ended]) -> None:
    problem = refused(in_this_process(entrypoint.cli.commands.main, ["--"], {}))
    assert problem == "Missing command: the usage is `trainbox [OPTIONS] COMMAND [ARGS]...`"


_OF_THE_LAUNCHER = ("plan", "bench", "doctor", "drill", "drill run", "health", "plan run", "run")
_OF_THE_LAUNCHER += ("runs", "clean", "new")


@pytest.mark.parametrize("command", table.COMMANDS.keys() - {*_OF_THE_LAUNCHER})
def test_the_trainer_reads_each_option_as_the_launcher_has_parsed_it(command: str) -> None:
    of_trainer = trainer.cli.commands.cli.commands[command.replace(" ", "-")]
    given = {row.parameter: _example(row) for row in table.COMMANDS[command]} | {"script": "s.py"}
    name, *words = table.arguments(command, given)
    context = of_trainer.make_context(name, words)
    for parameter, value in context.params.items():
        if parameter != "device":
            assert value == given[parameter], parameter


def _example(row: table.Row) -> Any:
    """Return a value that is not the default."""
    if isinstance(row, table.Argument):
        return (Path("-a"), Path("b")) if row.count == -1 else Path("-r") if row.type else "-t"
    of_type: dict[Any, Any] = {
        bool: not row.default,
        click.Choice: next((c for c in getattr(row.type, "choices", ()) if c != row.default), None),
        types.Number: 0.1 + 0.2,
        types.ResumeMode: "never",
        types.NamedPath: Path("-a b"),
        types.Whole: 7,
        type(None): ("-a b=1", "--c") if row.repeats else "-a b",
    }
    return of_type.get(bool if row.type is bool else type(row.type))
