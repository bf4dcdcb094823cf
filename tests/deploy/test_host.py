"""Where make runs a verb and by which command, decided from settings and a machine."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from deploy import host
from deploy.host import Machine, Refusal
from tests.support.paths import ROOT

_CPU = Machine(folder="/here", compose="compose", uid=7, gid=8)
_NVIDIA = Machine(folder="/here", compose="compose", uid=7, gid=8, has_nvidia=True, gpus=2)
_GPU_WITHOUT_RUNTIME = Machine(folder="/here", compose="compose", uid=7, gid=8, gpu="/dev/x")


def command(verb: str, env: dict[str, str], machine: Machine) -> host.Command:
    kind = host.place(env, machine)
    host.check_settings(verb, env)
    if kind == "venv":
        return host.in_venv(verb, env)
    return host.in_docker(verb, env, machine, kind)


_HERE = "env TRAINBOX_COMMAND=make .venv/bin/trainbox"
_IN = "env UID=7 GID=8 PWD=/here IMAGE=trainbox TRAINBOX_COMMAND=make"
_RUN, _CPU_FILES = "run --rm --no-deps", "-f docker-compose.yml -f docker-compose.cpu.yml"
_SCRIPT = f"{_RUN} --entrypoint 'tini -s -- trainbox'"
_ROOT = Path.cwd()
_OF = f"env TRAINBOX_COMMAND=make TRAINBOX_RUNS_DIR={_ROOT}/runs {_ROOT}/.venv/bin/trainbox"

# fmt: off
_COMMANDS = [
    # verb, settings | in the virtual environment
    ("drill", {"ARGS": "--steps 200"}, Machine(), f"{_HERE} drill --steps 200"),
    ("export", {"RUN": "runs/x", "ARGS": "--to onnx"}, Machine(),
     f"{_HERE} export runs/x --to onnx"),
    ("predict", {"RUN": "runs/x", "FILES": "no/a.jpg no", "ARGS": "--format jsonl"}, Machine(),
     f"{_HERE} predict --format jsonl -- runs/x no/a.jpg no"),
    ("tensorboard", {"TENSORBOARD_PORT": "7007", "RUNS_DIR": "/r", "VENV": "v"}, Machine(),
     "v/bin/tensorboard --logdir /r --host 127.0.0.1 --port 7007"),
    ("shell", {"PATH": "/bin"}, Machine(), f"env PATH={_ROOT}/.venv/bin:/bin sh"),
    ("plan", {}, Machine(gpu="/dev/x"), f"{_HERE} plan"),
    ("train", {"RUNS_DIR": "/r", "TRAINBOX_DATA_DIR": "/d"}, Machine(),
     "env TRAINBOX_COMMAND=make TRAINBOX_RUNS_DIR=/r TRAINBOX_DATA_DIR=/d "
     ".venv/bin/trainbox train"),
    ("train", {"TASK": "a.py:A", "SET": """a=1  b='x "y" $HOME'"""}, Machine(),
     """env TRAINBOX_COMMAND=make TASK=a.py:A SET='a=1  b='"'"'x "y" $HOME'"'" """
     ".venv/bin/trainbox train"),
    ("train", {"ARGS": """--set 'name=it is "a" $HOME' --set b=`ls` *"""}, Machine(),
     f"""{_HERE} train --set 'name=it is "a" $HOME' --set 'b=`ls`' '*'"""),
    ("run", {"SCRIPT": "a.py", "ARGS": "--lr 1"}, Machine(), f"{_HERE} run a.py -- --lr 1"),
    ("run", {"MODULE": "a.b", "ARGS": "--lr 1"}, Machine(), f"{_HERE} run -m a.b -- --lr 1"),
    ("run", {"SCRIPT": "a.py", "PROJECT_DIR": "/p"}, Machine(), f"cd /p && exec {_OF} run a.py"),
    ("run", {"SCRIPT": "/p/q/a.py"}, Machine(), f"cd /p/q && exec {_OF} run a.py"),
    ("run", {"SCRIPT": "/p/q/a.py", "PROJECT_DIR": "/p"}, Machine(),
     f"cd /p && exec {_OF} run q/a.py"),
    ("run", {"SCRIPT": "/r/a.py", "PROJECT_DIR": "/p"}, Machine(),
     f"cd /p && exec {_OF} run /r/a.py"),
    ("run", {"SCRIPT": "../a.py"}, Machine(), f"cd {_ROOT.parent} && exec {_OF} run a.py"),
    ("run", {"SCRIPT": "a.py", "RUN_OPTIONS": "--restarts 2"}, Machine(),
     f"{_HERE} run --restarts 2 a.py"),
    ("drill", {"SCRIPT": "a.py", "RUN_OPTIONS": "--compare b.pt"}, Machine(),
     f"{_HERE} drill run --compare b.pt a.py"),
    ("sweep", {"SCRIPT": "a.py", "RUN_OPTIONS": "--grid lr=1,2", "ARGS": "--lr {lr}"}, Machine(),
     f"{_HERE} sweep run --grid lr=1,2 a.py -- --lr '{{lr}}'"),
    # in a container
    ("train", {"GPUS": "0"}, _NVIDIA,
     f"{_IN} GPU_COUNT=all GPUS=0 compose {_CPU_FILES} {_RUN} train train"),
    ("drill", {"ARGS": "--steps 200"}, _NVIDIA, f"{_IN} compose {_RUN} train drill --steps 200"),
    ("plan", {"RUN_IN": "docker-gpu"}, Machine("/here", uid=7, gid=8),
     f"{_IN} docker compose {_RUN} train plan"),
    ("plan", {"RUN_IN": "docker-cpu"}, _GPU_WITHOUT_RUNTIME,
     f"{_IN} compose {_CPU_FILES} {_RUN} train plan"),
    ("plan", {"GPUS": "0"}, _GPU_WITHOUT_RUNTIME,
     f"{_IN} GPU_COUNT=all GPUS=0 compose {_CPU_FILES} {_RUN} train plan"),
    ("plan", {"RUN_IN": "docker-gpu", "GPUS": "0"}, Machine("/here", uid=7, gid=8),
     f"{_IN} GPU_COUNT=all GPUS=0 docker compose {_CPU_FILES} {_RUN} train plan"),
    ("health", {"HEALTH": "0"}, _NVIDIA, f"{_IN} HEALTH=0 compose {_RUN} gpu-health health"),
    ("shell", {}, _CPU, f"{_IN} compose {_CPU_FILES} {_RUN} train bash"),
    ("tensorboard", {"TENSORBOARD_PORT": "7007"}, _NVIDIA,
     f"{_IN} TENSORBOARD_PORT=7007 compose up --no-deps tensorboard"),
    ("train", {"TASK": "examples/a.py:A"}, _NVIDIA,
     f"{_IN} TASKS_DIR=examples TASK=examples/a.py:A compose {_RUN} train train"),
    ("train", {"ARGS": "./examples/a.py:A --lr 1"}, _NVIDIA,
     f"{_IN} TASKS_DIR=examples compose {_RUN} train train ./examples/a.py:A --lr 1"),
    ("train", {"TASK": "/t/a.py:A"}, _NVIDIA,
     f"{_IN} TASKS_AT=/t TASKS_DIR=/t TASK=/t/a.py:A compose {_RUN} train train"),
    ("train", {"TASK": "a.b:C"}, _NVIDIA, f"{_IN} TASK=a.b:C compose {_RUN} train train"),
    # The container does not have the paths of the host.
    ("train", {"TRAINBOX_RUNS_DIR": "/r", "DATA_DIR": "/d", "TORCH_HOME": "/t"}, _NVIDIA,
     f"{_IN} RUNS_DIR=/r DATA_DIR=/d compose {_RUN} train train"),
    ("run", {"SCRIPT": "a.py", "ARGS": "--lr 1"}, _CPU,
     f"{_IN} compose {_CPU_FILES} {_RUN} run a.py -- --lr 1"),
    ("run", {"SCRIPT": "/p/a.py", "GPUS": "4", "NCCL_DEBUG": "INFO"}, _NVIDIA,
     f"{_IN} GPU_COUNT=all PROJECT_DIR=/p GPUS=4 compose {_RUN} -e NCCL_DEBUG run a.py"),
    ("drill", {"SCRIPT": "/p/a.py", "NCCL_DEBUG": "INFO"}, _NVIDIA,
     f"{_IN} PROJECT_DIR=/p compose {_SCRIPT} -e NCCL_DEBUG run drill run a.py"),
    ("plan", {"MODULE": "a.b"}, _NVIDIA,
     f"{_IN} compose {_SCRIPT} run plan run --runs-dir /workspace/runs -m a.b"),
]
# fmt: on


@pytest.mark.parametrize(("verb", "env", "machine", "expected"), _COMMANDS)
def test_the_command_of_a_verb(
    verb: str, env: dict[str, str], machine: Machine, expected: str
) -> None:
    assert shlex.split(str(command(verb, env, machine))) == shlex.split(expected)


# fmt: off
_REFUSED: list[tuple[str, dict[str, str], Machine, str]] = [
    ("train", {}, _GPU_WITHOUT_RUNTIME,
     "this host has an NVIDIA GPU (/dev/x), and Docker has no NVIDIA runtime: install "
     "nvidia-container-toolkit, or set RUN_IN=docker-gpu (CDI, Docker Desktop), RUN_IN=venv, or "
     "GPUS=0 for the CPU"),
    ("plan", {"RUN_IN": "docker"}, Machine(),
     "RUN_IN=docker is unknown: set RUN_IN=docker-gpu, docker-cpu or venv"),
    ("train", {"ARGS": "--set 'a"}, Machine(),
     '"--set \'a": No closing quotation: close the quotes'),
    ("verify", {}, Machine(), "RUN is not set: name a run, as in make verify RUN=runs/NAME"),
    ("predict", {"RUN": "runs/x"}, Machine(),
     "FILES is not set: name files or folders, as in make predict RUN=runs/NAME FILES=data/new"),
    ("run", {}, Machine(), "SCRIPT is not set: name a script, as in make run SCRIPT=train.py"),
    ("run", {"SCRIPT": "a.py", "MODULE": "a"}, Machine(),
     "SCRIPT and MODULE are set: name only one of them"),
    # Docker would create a folder with this name.
    ("train", {"CONFIG": "none.toml"}, _CPU,
     "CONFIG=none.toml does not exist: name the file of an experiment"),
    *((verb, {"CONFIG": "e.toml", "MAKEFLAGS": "n -- CONFIG=e.toml"} | script, Machine(),
       f"make {verb}{' of a script' * bool(script)} does not use CONFIG: drop it")
      for verbs, script in (("bench verify", {}), ("run plan sweep drill", {"SCRIPT": "a.py"}))
      for verb in verbs.split()),
    ("train", {"MAKEFLAGS": "n -- ARGS=--x\\ Y=1 GPUS=0 TRAINBOX_LR=1 EPOCHS=1"}, Machine(),
     "make train does not use EPOCHS: write options of trainbox in ARGS, as in ARGS='--epochs 5' "
     "(`make help` lists the settings)"),
    ("train", {"MAKEFLAGS": "n -- TASKS=foo"}, Machine(),
     "make train does not use TASKS: write TASK"),
    ("train", {"MAKEFLAGS": "n -- GPU=2"}, Machine(), "make train does not use GPU: write GPUS"),
    # The mount would hide other files of the container.
    *(("train", {"TASK": f"{folder}a.py:A"}, _CPU,
       f"{folder}a.py:A: the container cannot mount the folder of this file: move the file into a "
       "folder of its own, such as my_tasks/a.py:A")
      for folder in ("", "./", "/", "/tmp/", "runs/", "./data/", "/workspace/", "/usr/lib/x/")),
]
# fmt: on


@pytest.mark.parametrize(("verb", "env", "machine", "message"), _REFUSED)
def test_a_machine_or_setting_that_is_refused(
    verb: str, env: dict[str, str], machine: Machine, message: str
) -> None:
    with pytest.raises(Refusal, match=f"^{re.escape(message)}$"):
        command(verb, env, machine)


@pytest.mark.parametrize("env", [{"CONFIG": "model.yaml"}, {"CONFIG": "", "MAKEFLAGS": " CONFIG="}])
def test_an_exported_or_empty_config_is_not_refused(env: dict[str, str]) -> None:
    settings = {"SCRIPT": "train.py", **env}
    host.check_settings("run", settings)
    assert str(host.in_venv("run", settings)) == f"{_HERE} run train.py"


def test_each_variable_of_the_compose_file_is_a_setting() -> None:
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    of_the_machine = {"UID", "GID", "PWD", "USER", "LOGNAME", "TASKS_AT", "REQUIREMENTS_DIR"}
    names = {*re.findall(r"\$\{([A-Z_]+)", compose)} - of_the_machine
    assert len(names) > 10
    host.check_settings("train", {"MAKEFLAGS": " -- " + " ".join(f"{n}=1" for n in sorted(names))})


_SETTINGS = "GPUS=2 GPU_IDS=0,2 STRATEGY=dp PROCESSES=2 DEVICE=cpu NNODES=1 NODE_RANK=0"
_SETTINGS += " RDZV_ENDPOINT=a:29500 RDZV_ID=7 RDZV_TIMEOUT_S=60 TASK=mnist SET=a=1 HEALTH=0"


@pytest.mark.parametrize("machine", [Machine(), _NVIDIA])
def test_every_setting_reaches_the_program(machine: Machine) -> None:
    env = dict(setting.split("=", 1) for setting in _SETTINGS.split())
    assert env.items() <= dict(command("train", env, machine).variables).items()
    assert env.keys() | {"HEALTH_LIMITS"} == set(host.SETTINGS)


def test_the_variables_of_torch_nccl_and_trainbox_reach_the_container() -> None:
    given = "CUDA_LAUNCH_BLOCKING GLOO_SOCKET_IFNAME NCCL_DEBUG OMP_NUM_THREADS PYTORCH_ALLOC_CONF"
    given += " TORCH_DISTRIBUTED_DEBUG TRAINBOX_EPOCHS"
    paths = "TORCH_HOME TORCH_EXTENSIONS_DIR NOT_NCCL_DEBUG TRAINBOX_HEARTBEAT TRAINBOX_BUILD_INFO"
    argv = command("sweep", dict.fromkeys([*given.split(), *paths.split()], "1"), _CPU).argv
    found = [name for before, name in zip(argv, argv[1:], strict=False) if before == "-e"]
    assert found == given.split()


# If more GPUs are requested than the host has, the container gets all, and trainbox reports it.
# fmt: off
_MACHINE_DEPENDENT = [
    ({"GPUS": "1"}, {}), ({"GPUS": "2"}, {}), ({"GPUS": "3"}, {"GPU_COUNT": "all"}),
    ({"GPUS": "all"}, {"GPU_COUNT": "all"}), ({"GPUS": "two"}, {"GPU_COUNT": "all"}),
    ({"GPUS": "2", "GPU_IDS": "0,2"}, {"GPU_COUNT": "all"}),
    ({"NNODES": "1"}, {}), ({"NNODES": "2"}, {"NETWORK_MODE": "host"}),
]
# fmt: on


@pytest.mark.parametrize(("env", "expected"), _MACHINE_DEPENDENT)
def test_the_gpus_and_the_network_of_the_container(
    env: dict[str, str], expected: dict[str, str]
) -> None:
    variables = command("train", env, _NVIDIA).variables
    assert {n: variables[n] for n in ("GPU_COUNT", "NETWORK_MODE") if n in variables} == expected


def test_infiniband_is_used_on_several_nodes() -> None:
    file = ["-f", "docker-compose.infiniband.yml"]

    def files(machine: Machine, **env: str) -> Any:
        argv = command("train", env, machine).argv
        return argv[1 : argv.index("run")]

    with_ports = Machine(compose="compose", has_nvidia=True, has_infiniband=True)
    assert files(with_ports, NNODES="2") == ["-f", "docker-compose.yml", *file]
    assert files(with_ports, NNODES="2", GPUS="0") == [*_CPU_FILES.split(), *file]
    assert files(with_ports, NNODES="1") == files(with_ports) == files(_NVIDIA, NNODES="2") == []


def test_the_file_of_an_experiment_is_mounted(tmp_path: Path) -> None:
    far, inside = tmp_path / "exp.toml", "tests/__init__.py"
    far.touch()
    env = {"CONFIG": str(far), "ARGS": "--lr 1"}
    for verb in ("train", "plan", "sweep"):
        assert str(host.in_venv(verb, env)) == f"{_HERE} {verb} --config {far} --lr 1"
        mounted = f"-v {far}:/workspace/exp.toml:ro train {verb} --config exp.toml --lr 1"
        assert str(command(verb, env, _NVIDIA)) == f"{_IN} compose {_RUN} {mounted}"
    mounted = f"-v {Path(inside).resolve()}:/workspace/{inside}:ro train train --config {inside}"
    assert str(command("train", {"CONFIG": inside}, _NVIDIA)).endswith(mounted)


def test_a_pattern_of_files_is_replaced_by_the_files(tmp_path: Path) -> None:
    for name in ("b.png", "a.png"):
        (tmp_path / name).touch()
    env = {"RUN": "runs/x", "FILES": f"{tmp_path}/*.png none*"}
    *_, a, b, missing = host.in_venv("predict", env).argv
    assert (a, b, missing) == (f"{tmp_path}/a.png", f"{tmp_path}/b.png", "none*")


def test_the_folders_that_are_made_before_docker_needs_them() -> None:
    assert host.made_folders("train", {}) == ["runs", "data", "my_tasks"]
    assert host.made_folders("train", {"TASK": "examples/a.py:A"})[2] == "examples"
    assert host.made_folders("run", {"SCRIPT": "/p/a.py"})[3] == "/p/data"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("n", True), ("kn --no-print-directory", True), (" --no-print-directory -- N=n", False)],
)
def test_a_dry_run_is_recognised(flags: str, expected: bool) -> None:
    assert host.is_dry({"MAKEFLAGS": flags}) is expected


@pytest.mark.waits
@pytest.mark.parametrize(
    ("program", "code", "shown"),
    [("", 0, ""), ("exit 3", 3, "log\n"), ("sleep 2.5", 0, "log\n")],
    ids=["fast", "failed", "slow"],
)
def test_the_log_of_a_build_is_shown_if_it_takes_time_or_fails(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, program: str, code: int, shown: str
) -> None:
    make = tmp_path / "make"
    make.write_text(f"#!/bin/sh\necho log\n{program}\n")
    make.chmod(0o755)
    if code:
        with pytest.raises(SystemExit) as ended:
            host.make({"MAKE": str(make)}, "build")
        assert ended.value.code == code
        shown += "trainbox: the image was not built: correct the error above, or do without: "
        shown += "RUN_IN=venv\n"
    else:
        host.make({"MAKE": str(make)}, "build")
        shown += "trainbox: the image trainbox is ready\n"
    assert capfd.readouterr() == ("", shown)
