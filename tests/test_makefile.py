"""The commands of make: `make -n` prints them, with a fake docker on PATH. Some of them run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest

from deploy import host

ROOT = Path(__file__).parents[1]
PLUGIN = "/plugins/docker-compose"
CPU_FILES = "-f docker-compose.yml -f docker-compose.cpu.yml"
NO_DOCKER, STOPPED, NO_COMPOSE = "none", "exit 1", "echo ' runc'"
DOCKER, NVIDIA = (
    f"echo '{PLUGIN} io.containerd.runc.v2 runc'",
    f"echo '{PLUGIN} io.containerd.runc.v2 nvidia runc'",
)

Make = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that runs make with only the tools that it needs on PATH.

    `docker info` runs the shell command `docker`, and `docker image` runs `inspect`.
    """

    def run(
        *arguments: str, docker: str = NO_DOCKER, inspect: str = "true", **env: str
    ) -> subprocess.CompletedProcess[str]:
        tools = tmp_path / "bin"
        tools.mkdir(exist_ok=True)
        for name in (
            "make",
            "sh",
            "env",
            "id",
            "git",
            "sed",
            "awk",
            "mkdir",
            "touch",
            "true",
            "cat",
        ):
            if not (tools / name).exists():
                (tools / name).symlink_to(shutil.which(name) or pytest.skip(f"no {name} on PATH"))
        if not (tools / "python3").exists():
            (tools / "python3").symlink_to(sys.executable)
        (tools / "docker").unlink(missing_ok=True)
        if docker != NO_DOCKER:
            (tools / "docker").write_text(
                f"#!/bin/sh\ncase $1 in image) {inspect} ;; info) {docker} ;; esac\n"
            )
            (tools / "docker").chmod(0o755)
        return subprocess.run(
            ["make", "-C", str(ROOT), "--no-print-directory", *arguments],
            env={"PATH": str(tools), "HOME": str(tmp_path), "NVIDIA_DEVICE": "", **env},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Return settings with which `make train` creates no folders in this checkout."""
    return [f"{name}={tmp_path / name}" for name in ("RUNS_DIR", "DATA_DIR", "TASKS_DIR")]


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """Return a Compose plugin that does nothing."""
    made = tmp_path / "docker-compose"
    made.write_text("#!/bin/sh\n")
    made.chmod(0o755)
    return made


def last(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last command, which follows the preparations."""
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].strip()


def plainly(command: str) -> str:
    """Return the command without quotes."""
    return " ".join(shlex.split(command))


def in_docker(files: str, settings: str, command: str) -> str:
    before = (
        f"env UID={os.getuid()} GID={os.getgid()} PWD={ROOT} IMAGE=trainbox TRAINBOX_COMMAND=make"
    )
    return " ".join(part for part in (before, settings, PLUGIN, files, command) if part)


IN_VENV = "env TRAINBOX_COMMAND=make .venv/bin/trainbox"


def test_help_is_the_default_and_lists_every_public_target(make: Make) -> None:
    targets = [
        "help",
        "train",
        "run",
        "plan",
        "sweep",
        "drill",
        "bench",
        "verify",
        "evaluate",
        "predict",
        "export",
        "health",
        "doctor",
        "tensorboard",
        "shell",
    ]
    targets += ["build", "sif", "test", "test-all", "test-faults", "test-slow", "test-load"]
    targets += ["test-gpu", "gpu-checks", "test-image", "benchmark", "wheel", "lint", "docs"]
    targets += ["lock", "clean"]
    shown = [line.split()[0] for line in make().stdout.splitlines() if line.startswith("  ")]
    assert shown == targets


@pytest.mark.parametrize(
    ("where", "before"),
    [
        ("venv", "env TRAINBOX_COMMAND=make .venv/bin/trainbox"),
        ("docker-gpu", in_docker("", "", "run --rm --no-deps train")),
    ],
)
def test_drill_and_verify(make: Make, where: str, before: str) -> None:
    assert (
        plainly(last(make("-n", "drill", f"RUN_IN={where}", "ARGS=--steps 200", docker=NVIDIA)))
        == f"{before} drill --steps 200"
    )
    done = make("-n", "verify", f"RUN_IN={where}", "RUN=runs/digits-7d2c1a90", docker=NVIDIA)
    assert plainly(last(done)) == f"{before} verify runs/digits-7d2c1a90"
    assert (
        "RUN is not set: name a run, as in make verify RUN=runs/NAME"
        in make("-n", "verify", f"RUN_IN={where}", docker=NVIDIA).stderr
    )


@pytest.mark.parametrize(
    ("where", "before"),
    [("venv", IN_VENV), ("docker-cpu", in_docker(CPU_FILES, "", "run --rm --no-deps train"))],
)
def test_evaluate_predict_and_export(make: Make, where: str, before: str) -> None:
    done = make("-n", "export", f"RUN_IN={where}", "RUN=runs/x", "ARGS=--to onnx", docker=NVIDIA)
    assert plainly(last(done)) == f"{before} export runs/x --to onnx"
    assert (
        "RUN is not set: name a run, as in make export RUN=runs/NAME"
        in make("-n", "export", f"RUN_IN={where}", docker=NVIDIA).stderr
    )
    done = make("-n", "evaluate", f"RUN_IN={where}", "RUN=runs/x", "ARGS=--data test")
    assert plainly(last(done)).endswith(" evaluate runs/x --data test")
    settings = ("RUN=runs/x", "FILES=data/a.jpg data/new", "ARGS=--format jsonl")
    done = make("-n", "predict", f"RUN_IN={where}", *settings, docker=NVIDIA)
    assert plainly(last(done)) == f"{before} predict --format jsonl -- runs/x data/a.jpg data/new"
    assert (
        "FILES is not set: name files or folders, as in make predict RUN=runs/NAME FILES=data/new"
        in make("-n", "predict", f"RUN_IN={where}", "RUN=runs/x", docker=NVIDIA).stderr
    )


@pytest.mark.parametrize(
    ("docker", "expected"),
    [
        (
            NVIDIA,
            in_docker("", "GPU_COUNT=all GPUS=3", "run --rm --no-deps train train --epochs 5"),
        ),
        (
            DOCKER,
            in_docker(
                CPU_FILES, "GPU_COUNT=all GPUS=3", "run --rm --no-deps train train --epochs 5"
            ),
        ),
        (NO_COMPOSE, "env TRAINBOX_COMMAND=make GPUS=3 .venv/bin/trainbox train --epochs 5"),
        (STOPPED, "env TRAINBOX_COMMAND=make GPUS=3 .venv/bin/trainbox train --epochs 5"),
        (NO_DOCKER, "env TRAINBOX_COMMAND=make GPUS=3 .venv/bin/trainbox train --epochs 5"),
    ],
    ids=["nvidia", "docker alone", "docker without compose", "engine stopped", "no docker"],
)
def test_train_runs_in_docker_with_gpus_or_docker_or_the_venv(
    make: Make, docker: str, expected: str
) -> None:
    assert (
        plainly(last(make("-n", "train", "GPUS=3", "ARGS=--epochs 5", docker=docker))) == expected
    )


@pytest.mark.parametrize(
    ("docker", "setting", "reported"),
    [(STOPPED, "V=0", 1), (STOPPED, "RUN_IN=venv", 0), (NO_DOCKER, "V=0", 0), (DOCKER, "V=0", 0)],
)
def test_an_engine_that_is_not_reached_is_reported_once(
    make: Make, docker: str, setting: str, reported: int
) -> None:
    message = (
        "trainbox: Docker does not reach an engine: the virtual environment .venv is used; start "
        "Docker, or set RUN_IN=venv\n"
    )
    assert make("-n", "train", setting, docker=docker).stderr == message * reported


@pytest.mark.parametrize("device", ["dev/nvidiactl", "usr/lib/wsl/lib/libcuda.so.1"])
def test_docker_without_the_runtime_is_refused_on_a_host_with_a_gpu(
    make: Make, tmp_path: Path, device: str
) -> None:
    """WSL2 has /dev/dxg, also for GPUs of other vendors, and the library only for NVIDIA's."""
    (tmp_path / device).parent.mkdir(parents=True)
    (tmp_path / device).touch()
    devices = (
        f"NVIDIA_DEVICE={' '.join(f'{tmp_path}{path}' for path in host.NVIDIA_DEVICE.split())}"
    )
    done = make("-n", "train", devices, docker=DOCKER)
    assert done.returncode == 2
    assert (
        f"this host has an NVIDIA GPU ({tmp_path}/{device}), and Docker has no NVIDIA runtime: "
        "install nvidia-container-toolkit, or set RUN_IN=docker-gpu (CDI, Docker Desktop), "
        "RUN_IN=venv, or GPUS=0 for the CPU" in done.stderr
    )
    for setting in ("GPUS=0", "RUN_IN=docker-cpu"):
        assert CPU_FILES in plainly(last(make("-n", "train", devices, setting, docker=DOCKER)))
    assert CPU_FILES not in plainly(last(make("-n", "train", devices, docker=NVIDIA)))


ELSEWHERE = f"env TRAINBOX_COMMAND=make TRAINBOX_RUNS_DIR={ROOT}/runs {ROOT}/.venv/bin/trainbox"


@pytest.mark.parametrize(
    ("settings", "where", "expected"),
    [
        (["SCRIPT=a.py", "ARGS=--lr 1"], "venv", f"{IN_VENV} run a.py -- --lr 1"),
        (["SCRIPT=it's.py"], "venv", f"""{IN_VENV} run "it's.py" """),
        (["MODULE=a.b", "ARGS=--lr 1"], "venv", f"{IN_VENV} run -m a.b -- --lr 1"),
        (["SCRIPT=a.py", "PROJECT_DIR=/p"], "venv", f"cd /p && exec {ELSEWHERE} run a.py"),
        (["SCRIPT=/p/q/a.py"], "venv", f"cd /p/q && exec {ELSEWHERE} run a.py"),
        (["SCRIPT=/p/q/a.py", "PROJECT_DIR=/p"], "venv", f"cd /p && exec {ELSEWHERE} run q/a.py"),
        (["SCRIPT=/my p/a.py"], "venv", f"cd '/my p' && exec {ELSEWHERE} run a.py"),
        (["SCRIPT=../a.py"], "venv", f"cd {ROOT.parent} && exec {ELSEWHERE} run a.py"),
        (
            ["SCRIPT=a.py", "RUN_OPTIONS=--restarts 2"],
            "venv",
            f"{IN_VENV} run --restarts 2 a.py",
        ),
        (
            ["SCRIPT=a.py", "ARGS=--lr 1"],
            "docker-cpu",
            in_docker(CPU_FILES, "", "run --rm --no-deps run a.py -- --lr 1"),
        ),
        (
            ["SCRIPT=/p/a.py", "GPUS=4"],
            "docker-gpu",
            in_docker("", "GPU_COUNT=all PROJECT_DIR=/p GPUS=4", "run --rm --no-deps run a.py"),
        ),
    ],
)
def test_run(make: Make, settings: list[str], where: str, expected: str) -> None:
    done = make("-n", "run", f"RUN_IN={where}", *settings, docker=NVIDIA)
    assert shlex.split(last(done)) == shlex.split(expected)


@pytest.mark.parametrize(
    ("verb", "settings", "where", "expected"),
    [
        ("plan", ["SCRIPT=a.py", "ARGS=--lr 1"], "venv", f"{IN_VENV} plan run a.py -- --lr 1"),
        (
            "drill",
            ["SCRIPT=a.py", "RUN_OPTIONS=--compare b.pt"],
            "venv",
            f"{IN_VENV} drill run --compare b.pt a.py",
        ),
        (
            "drill",
            ["SCRIPT=/p/a.py"],
            "docker-gpu",
            in_docker(
                "",
                "PROJECT_DIR=/p",
                "run --rm --no-deps --entrypoint 'tini -- trainbox' run drill run a.py",
            ),
        ),
        (
            "sweep",
            ["SCRIPT=a.py", "RUN_OPTIONS=--grid lr=1,2", "ARGS=--lr {lr}"],
            "venv",
            f"{IN_VENV} sweep run --grid lr=1,2 a.py -- --lr {{lr}}",
        ),
        (
            "plan",
            ["MODULE=a.b"],
            "docker-cpu",
            in_docker(
                CPU_FILES,
                "",
                "run --rm --no-deps --entrypoint 'tini -- trainbox' run "
                "plan run --runs-dir /workspace/runs -m a.b",
            ),
        ),
    ],
)
def test_the_plan_the_sweep_and_the_drill_of_a_script(
    make: Make, verb: str, settings: list[str], where: str, expected: str
) -> None:
    done = make("-n", verb, f"RUN_IN={where}", *settings, docker=NVIDIA)
    assert shlex.split(last(done)) == shlex.split(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "SCRIPT is not set: name a script, as in make run SCRIPT=train.py"),
        (["SCRIPT=a.py", "MODULE=a"], "SCRIPT and MODULE are set: name only one of them"),
    ],
)
def test_run_needs_one_program(make: Make, settings: list[str], message: str) -> None:
    done = make("-n", "run", "RUN_IN=venv", *settings)
    assert done.returncode == 2 and message in done.stderr


def test_the_data_folder_of_a_project_is_made_before_docker_needs_it(make: Make) -> None:
    done = make("-n", "run", "SCRIPT=/p/a.py", docker=DOCKER)
    assert "mkdir -p runs data my_tasks /p/data" in done.stdout
    assert "/p/data" not in make("-n", "train", docker=DOCKER).stdout


@pytest.mark.parametrize("docker", [NVIDIA, DOCKER])
def test_gpus_0_uses_the_compose_file_for_the_cpu(make: Make, docker: str) -> None:
    expected = in_docker(CPU_FILES, "GPU_COUNT=all GPUS=0", "run --rm --no-deps train train")
    assert plainly(last(make("-n", "train", "GPUS=0", docker=docker))) == expected


@pytest.mark.parametrize(
    ("where", "command"),
    [
        ("docker-gpu", in_docker("", "", "run --rm --no-deps train plan")),
        ("docker-cpu", in_docker(CPU_FILES, "", "run --rm --no-deps train plan")),
        ("venv", "env TRAINBOX_COMMAND=make .venv/bin/trainbox plan"),
    ],
)
def test_run_in_overrides_the_detection(make: Make, where: str, command: str) -> None:
    assert plainly(last(make("-n", "plan", f"RUN_IN={where}", docker=NVIDIA))) == command


def test_an_unknown_run_in_is_refused(make: Make) -> None:
    ended = make("-n", "plan", "RUN_IN=docker")
    assert ended.returncode == 2
    assert "RUN_IN=docker is unknown: set RUN_IN=docker-gpu, docker-cpu or venv" in ended.stderr


@pytest.mark.parametrize(
    ("target", "docker", "command"),
    [
        ("health", NVIDIA, in_docker("", "", "run --rm --no-deps gpu-health health")),
        ("health", NO_DOCKER, "env TRAINBOX_COMMAND=make .venv/bin/trainbox health"),
        ("doctor", NVIDIA, in_docker("", "", "run --rm --no-deps train doctor")),
        ("doctor", NO_DOCKER, "env TRAINBOX_COMMAND=make .venv/bin/trainbox doctor"),
        ("shell", DOCKER, in_docker(CPU_FILES, "", "run --rm --no-deps train bash")),
        ("tensorboard", NVIDIA, in_docker("", "", "up --no-deps tensorboard")),
        (
            "tensorboard",
            NO_DOCKER,
            ".venv/bin/tensorboard --logdir runs --host 127.0.0.1 --port 6006",
        ),
        ("benchmark", NVIDIA, ".venv/bin/python -P -m benchmarks"),
    ],
)
def test_other_targets(make: Make, target: str, docker: str, command: str) -> None:
    assert plainly(last(make("-n", target, docker=docker))) == command


@pytest.mark.parametrize("docker", [NVIDIA, NO_DOCKER])
@pytest.mark.parametrize(
    "setting",
    [
        "GPUS=2",
        "GPU_IDS=0,2",
        "STRATEGY=dp",
        "PROCESSES=2",
        "DEVICE=cpu",
        "NNODES=1",
        "NODE_RANK=0",
        "RDZV_ENDPOINT=a:29500",
        "RDZV_ID=7",
        "RDZV_TIMEOUT_S=60",
        "TASK=mnist",
    ],
)
def test_settings_pass_through(make: Make, setting: str, docker: str) -> None:
    assert setting in shlex.split(last(make("-n", "train", setting, docker=docker)))
    name, value = setting.split("=")
    assert setting in shlex.split(last(make("-n", "train", docker=docker, **{name: value})))


@pytest.mark.parametrize("docker", [NVIDIA, NO_DOCKER])
def test_values_survive_the_shell(make: Make, docker: str) -> None:
    value = """SET=width=64  name=it's "a" $HOME"""
    assert value in shlex.split(last(make("-n", "train", value.replace("$", "$$"), docker=docker)))


def test_gpu_ids_are_selected_from_all_gpus(make: Make) -> None:
    arguments = shlex.split(last(make("-n", "train", "GPUS=2", "GPU_IDS=0,2", docker=NVIDIA)))
    assert {"GPU_COUNT=all", "GPUS=2", "GPU_IDS=0,2"} <= set(arguments)


@pytest.mark.parametrize(
    ("gpus", "count"),
    [("1", ""), ("2", ""), ("3", "all"), ("9", "all"), ("all", "all"), ("two", "all")],
)
def test_docker_counts_no_more_gpus_than_the_host_has(make: Make, gpus: str, count: str) -> None:
    """If more are requested, the container gets all GPUs, and trainbox reports the error."""
    done = make("-n", "train", f"GPUS={gpus}", "HOST_GPUS=0000:18:00.0 0000:3b:00.0", docker=NVIDIA)
    arguments = shlex.split(last(done))
    assert f"GPUS={gpus}" in arguments
    assert [text for text in arguments if text.startswith("GPU_COUNT=")] == (
        [f"GPU_COUNT={count}"] if count else []
    )


def test_the_port_of_tensorboard(make: Make, plugin: Path, folders: list[str]) -> None:
    assert "TENSORBOARD_PORT=7007" in last(
        make("-n", "tensorboard", "TENSORBOARD_PORT=7007", docker=DOCKER)
    )
    assert last(make("-n", "tensorboard", "TENSORBOARD_PORT=7007")).endswith("--port 7007")
    done = make("tensorboard", "TENSORBOARD_PORT=7007", *folders, docker=f"echo '{plugin} runc'")
    assert "http://localhost:7007 (if the port is taken: make tensorboard" in done.stderr


def test_several_nodes_share_the_hosts_network(make: Make) -> None:
    assert "NETWORK_MODE=host" in last(make("-n", "train", "NNODES=2", docker=NVIDIA))
    assert "NETWORK_MODE" not in last(make("-n", "train", "NNODES=1", docker=NVIDIA))


@pytest.mark.parametrize(
    ("settings", "files"),
    [
        (["NNODES=2"], "-f docker-compose.yml -f docker-compose.infiniband.yml run"),
        (["NNODES=2", "GPUS=0"], f"{CPU_FILES} -f docker-compose.infiniband.yml run"),
        (["NNODES=1"], f"{PLUGIN} run"),
        ([], f"{PLUGIN} run"),
    ],
)
def test_infiniband_is_used_on_several_nodes(make: Make, settings: list[str], files: str) -> None:
    command = plainly(
        last(make("-n", "train", "INFINIBAND=/dev/infiniband", *settings, docker=NVIDIA))
    )
    assert files in command
    without = plainly(last(make("-n", "train", "INFINIBAND=", *settings, docker=NVIDIA)))
    assert "docker-compose.infiniband.yml" not in without


def test_the_folder_of_a_task_is_mounted(make: Make) -> None:
    done = make("-n", "train", "TASK=examples/gestures.py:Gestures", docker=DOCKER)
    assert "TASKS_DIR=examples" in last(done)
    assert "mkdir -p runs data examples" in done.stdout
    assert "TASKS_DIR=examples" in last(
        make("-n", "train", "ARGS=./examples/gestures.py:Gestures --epochs 5", docker=DOCKER)
    )
    for task in ("digits", "package.module:Class"):
        assert "TASKS_DIR" not in last(make("-n", "train", f"TASK={task}", docker=DOCKER))


def test_the_file_of_an_experiment_is_mounted(make: Make, tmp_path: Path) -> None:
    (tmp_path / "exp.toml").touch()
    (tmp_path / "far").mkdir()
    config, arguments = f"CONFIG={tmp_path}/exp.toml", "ARGS=--lr 1"
    for target in ("train", "plan", "sweep"):
        command = plainly(last(make("-n", target, config, arguments)))
        assert command.endswith(f"trainbox {target} --config {tmp_path}/exp.toml --lr 1")
        command = plainly(last(make("-n", target, config, arguments, docker=DOCKER)))
        assert f" -v {tmp_path}/exp.toml:/workspace/exp.toml:ro " in command
        assert command.endswith(f" train {target} --config exp.toml --lr 1")
    inside = plainly(last(make("-n", "train", "CONFIG=tests/__init__.py", docker=DOCKER)))
    assert f" -v {ROOT}/tests/__init__.py:/workspace/tests/__init__.py:ro " in inside
    assert inside.endswith(" train train --config tests/__init__.py")


def test_a_missing_file_of_an_experiment_is_refused(make: Make) -> None:
    """Docker would create a folder with this name."""
    done = make("-n", "train", "CONFIG=none.toml", docker=DOCKER)
    assert done.returncode == 2
    assert "CONFIG=none.toml does not exist: name the file of an experiment" in done.stderr


@pytest.mark.parametrize("target", ["run", "plan", "sweep", "drill", "bench", "verify", "export"])
def test_a_file_of_an_experiment_that_has_no_effect_is_refused(make: Make, target: str) -> None:
    of_script = [] if target in ("bench", "verify", "export") else ["SCRIPT=train.py"]
    done = make("-n", target, "CONFIG=exp.toml", *of_script)
    assert done.returncode == 2
    what = f"{target} of a script" if of_script else target
    assert f"make {what} does not use CONFIG: drop it" in done.stderr


def test_an_exported_config_can_be_that_of_a_script(make: Make) -> None:
    assert last(make("-n", "run", "SCRIPT=train.py", CONFIG="model.yaml")).endswith(" train.py")


def test_a_task_with_an_absolute_path_is_mounted_at_that_path(make: Make, tmp_path: Path) -> None:
    arguments = shlex.split(
        last(make("-n", "train", f"TASK={tmp_path}/shapes.py:Shapes", docker=DOCKER))
    )
    assert {
        f"TASKS_DIR={tmp_path}",
        f"TASKS_AT={tmp_path}",
        f"TASK={tmp_path}/shapes.py:Shapes",
    } <= set(arguments)


@pytest.mark.parametrize(
    "folder", ["", "./", "/", "/tmp/", "runs/", "./data/", "/workspace/", "/usr/lib/python3/"]
)
def test_a_task_whose_folder_would_hide_others_is_refused_before_the_build(
    make: Make, folder: str
) -> None:
    done = make("train", f"TASK={folder}shapes.py:Shapes", docker=DOCKER)
    assert done.returncode == 2 and done.stdout == ""
    assert (
        f"{folder}shapes.py:Shapes: the container cannot mount the folder of this file"
        in done.stderr
    )
    assert "such as my_tasks/shapes.py:Shapes" in done.stderr
    assert f"{folder}shapes.py" in last(make("-n", "train", f"TASK={folder}shapes.py:Shapes"))


def test_other_folders_for_runs_and_data(make: Make) -> None:
    settings = {"TRAINBOX_RUNS_DIR": "/big/runs", "TRAINBOX_DATA_DIR": "/big/data"}
    arguments = shlex.split(last(make("-n", "train", docker=DOCKER, **settings)))
    assert {"RUNS_DIR=/big/runs", "DATA_DIR=/big/data"} <= set(arguments)
    assert "TRAINBOX_RUNS_DIR" not in arguments, "the container does not have the host's paths"
    arguments = shlex.split(last(make("-n", "train", "RUNS_DIR=/big/runs", "DATA_DIR=/big/data")))
    assert {"TRAINBOX_RUNS_DIR=/big/runs", "TRAINBOX_DATA_DIR=/big/data"} <= set(arguments)


def test_training_options_of_the_environment_reach_the_container(make: Make) -> None:
    settings = {
        "TRAINBOX_EPOCHS": "3",
        "TRAINBOX_HEARTBEAT": "/here",
        "TRAINBOX_BUILD_INFO": "/here",
    }
    arguments = shlex.split(last(make("-n", "train", docker=DOCKER, **settings)))
    assert arguments[arguments.index("TRAINBOX_EPOCHS") - 1] == "-e"
    assert not {"TRAINBOX_HEARTBEAT", "TRAINBOX_BUILD_INFO"} & set(arguments)


def test_the_image_is_built_first_with_its_revision(make: Make) -> None:
    done = make("-n", "train", "BASE_IMAGE=debian:12", "DOCKER_BUILD_FLAGS=--pull", docker=DOCKER)
    _, report, commands = done.stdout.split("\n", 2)
    assert report.startswith('echo "trainbox: building the image trainbox (5 GB;')
    arguments = shlex.split(commands.replace("\\\n", ""))
    assert arguments[:3] == ["docker", "build", "--pull"]
    assert {"BASE_IMAGE=debian:12", "VERSION=0.1.0"} <= set(arguments)
    assert any(text.startswith("REVISION=") for text in arguments)
    assert arguments[arguments.index("--tag") + 1] == "trainbox"
    assert not any(text.startswith("COMPILE=") for text in arguments)
    (seconds,) = (text for text in arguments if text.startswith("SOURCE_DATE_EPOCH="))
    date = datetime.fromtimestamp(int(seconds.partition("=")[2]), UTC)
    assert f"CREATED={date:%Y-%m-%dT%H:%M:%SZ}" in arguments, "the date of the commit"
    with_compiler = make("-n", "build", "COMPILE=1", docker=DOCKER).stdout
    assert "--build-arg COMPILE=1 --build-arg REVISION=" in " ".join(with_compiler.split())


@pytest.mark.parametrize(
    ("settings", "built"),
    [
        ([], True),
        (["IMAGE=trainbox:latest"], True),
        (["IMAGE=mine"], False),
        (["IMAGE=trainbox:1.2"], False),
        (["BUILD=0"], False),
        (["IMAGE=mine", "BUILD=1"], True),
    ],
)
def test_only_the_tag_trainbox_is_built(make: Make, settings: list[str], built: bool) -> None:
    done = make("-n", "train", *settings, docker=DOCKER)
    assert ("docker build" in done.stdout.replace("(docker build", "")) is built
    assert ("docker image inspect" in done.stdout) is not built


def test_an_image_of_another_revision_is_used_with_a_warning(
    make: Make, plugin: Path, folders: list[str]
) -> None:
    """`docker image inspect` prints the revision label of the image, or fails."""
    at = subprocess.run(
        ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.strip()
    for revision, warns in ((at, False), ("0123abc", True), ("", True)):
        done = make(
            "plan",
            "IMAGE=mine",
            *folders,
            docker=f"echo '{plugin} runc'",
            inspect=f"echo {revision}",
        )
        assert done.returncode == 0, done.stderr
        warning = (
            f"the image mine contains trainbox of revision {revision or 'unknown'}, this "
            f"checkout is at {at}: build"
        )
        assert (warning in done.stderr) is warns
    done = make("plan", "IMAGE=mine", *folders, docker=f"echo '{plugin} runc'", inspect="exit 1")
    assert done.returncode == 2
    assert "Docker has no image mine: load it, build it" in done.stderr


def test_v_1_prints_the_docker_command_before_it_runs(
    make: Make, plugin: Path, folders: list[str]
) -> None:
    plugin.write_text('#!/bin/sh\necho "ran $*"\n')
    arguments = ["train", "IMAGE=mine", "TASK=mnist", "GPUS=0", *folders]
    silent, printed = (
        make(*arguments, *more, docker=f"echo '{plugin} runc'") for more in ([], ["V=1"])
    )
    ran = f"ran {CPU_FILES} run --rm --no-deps train train"
    assert (silent.returncode, silent.stdout.splitlines()) == (0, [ran]), silent.stderr
    command, ran_again = map(plainly, printed.stdout.splitlines())
    assert ran_again == ran
    assert command.startswith(f"env UID={os.getuid()} GID={os.getgid()} PWD={ROOT} IMAGE=mine ")
    assert {"GPUS=0", "TASK=mnist"} <= set(command.split())
    assert command.endswith(f" {plugin} {ran.removeprefix('ran ')}")


def test_plan_health_and_doctor_print_only_the_programs_output(
    make: Make, plugin: Path, folders: list[str]
) -> None:
    plugin.write_text("#!/bin/sh\necho '{}'\n")
    for verb in ("plan", "health", "doctor"):
        done = make(verb, *folders, docker=f"echo '{plugin} runc'")
        assert (done.returncode, done.stdout) == (0, "{}\n"), done.stderr


def test_each_user_and_checkout_has_its_own_project(make: Make, tmp_path: Path) -> None:
    """Compose names the project by USER and PWD. make sets PWD to the checkout, from any folder."""
    link = tmp_path / "link"
    link.symlink_to(ROOT)
    for pwd, seen in ((str(tmp_path), ROOT), ("", ROOT), (str(ROOT), ROOT), (str(link), link)):
        assert f"PWD={seen}" in shlex.split(last(make("-n", "train", docker=DOCKER, PWD=pwd)))


@pytest.mark.parametrize("target", ["train", "sweep", "health", "doctor"])
def test_the_variables_of_torch_and_nccl_reach_the_container(make: Make, target: str) -> None:
    given = [
        "NCCL_DEBUG",
        "TORCH_DISTRIBUTED_DEBUG",
        "GLOO_SOCKET_IFNAME",
        "PYTORCH_ALLOC_CONF",
        "OMP_NUM_THREADS",
    ]
    given += ["CUDA_LAUNCH_BLOCKING", "NCCL_IB_HCA"]
    paths = ["TORCH_HOME", "TORCH_EXTENSIONS_DIR", "NOT_NCCL_DEBUG"]
    arguments = shlex.split(
        last(make("-n", target, docker=NVIDIA, **dict.fromkeys([*given, *paths], "1")))
    )
    assert [name for before, name in pairwise(arguments) if before == "-e"] == sorted(given)
    assert "NCCL_DEBUG" in shlex.split(last(make("-n", target, "NCCL_DEBUG=INFO", docker=NVIDIA)))


REQUIREMENTS = "REQUIREMENTS=../it's mine/my.txt"
LOCK = "deploy/extra/requirements.py lock --copy-to build/requirements -- ../it's mine/my.txt"
LOCK_IN_DOCKER = "build/requirements -- ../it's mine/my.txt"


def commands(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the commands that a dry run prints, without quotes."""
    assert done.returncode == 0, done.stderr
    lines = done.stdout.replace("\\\n", " ").splitlines()
    skipped = ("echo ", "python3 -I ")
    return [
        " ".join(" ".join(shlex.split(line)).split())
        for line in lines
        if not line.startswith(skipped)
    ]


def test_packages_are_locked_by_docker_before_the_image_is_built(make: Make) -> None:
    lock, build = commands(make("-n", "build", REQUIREMENTS, "BASE_IMAGE=b", docker=DOCKER))
    stage = "$(docker build --quiet --build-arg BASE_IMAGE=b --target uv .)"
    assert lock == f"sh deploy/extra/lock-in-docker.sh {stage} {LOCK_IN_DOCKER}"
    assert build.startswith("docker build --build-arg BASE_IMAGE=b ")
    assert build.endswith(
        " --build-arg REQUIREMENTS=requirements.txt "
        "--build-context requirements=build/requirements --tag trainbox ."
    )
    (build,) = commands(make("-n", "build", docker=DOCKER))
    assert "REQUIREMENTS" not in build and "--build-context" not in build
    trained = commands(make("-n", "train", REQUIREMENTS, docker=DOCKER))
    assert trained[0].endswith(LOCK_IN_DOCKER) and trained[1].startswith("docker build ")


def test_packages_are_added_to_the_virtual_environment(make: Make) -> None:
    done = commands(make("-n", "train", REQUIREMENTS))
    lock = done.index(f".venv/bin/python -P {LOCK}")
    install = "deploy/extra/requirements.py install -- ../it's mine/my.txt"
    assert done[lock + 1 :] == [
        f".venv/bin/python -P {install}",
        "env TRAINBOX_COMMAND=make .venv/bin/trainbox train",
    ]


def test_packages_of_apptainers_image_are_locked_without_docker(make: Make) -> None:
    *_, lock, build, _ = commands(make("-n", "sif", REQUIREMENTS, docker=DOCKER))
    assert lock == f".venv/bin/python -P {LOCK}"
    assert build.endswith(
        " --build-arg REQUIREMENTS=requirements.txt "
        "--build-arg REQUIREMENTS_DIR=build/requirements trainbox.sif deploy/apptainer/trainbox.def"
    )


def test_make_lock_writes_only_the_lock_of_the_added_packages(make: Make) -> None:
    (lock,) = commands(make("-n", "lock", REQUIREMENTS, "ARGS=--upgrade", docker=DOCKER))
    assert lock.endswith("build/requirements --upgrade -- ../it's mine/my.txt")
    *_, lock = commands(make("-n", "lock", REQUIREMENTS))
    assert lock == f".venv/bin/python -P {LOCK}"
    *_, lock = commands(make("-n", "lock"))
    assert lock.endswith("-o requirements-dev.lock")


@pytest.mark.parametrize(
    ("settings", "source"),
    [
        (
            [],
            "--build-arg REVISION=R --build-arg VERSION=0.1.0 --build-arg CREATED=D "
            "x.sif deploy/apptainer/trainbox.def",
        ),
        (
            ["BASE_IMAGE=b", "COMPILE=1"],
            "--build-arg BASE_IMAGE=b --build-arg COMPILE=1 --build-arg REVISION=R "
            "--build-arg VERSION=0.1.0 --build-arg CREATED=D x.sif deploy/apptainer/trainbox.def",
        ),
    ],
    ids=["from the definition", "another base"],
)
def test_the_image_of_apptainer(make: Make, settings: list[str], source: str) -> None:
    done = make("-n", "sif", "SIF=x.sif", "APPTAINER_BUILD_FLAGS=--force", *settings)
    commands = done.stdout.replace("\\\n", " ").partition("\n")[2]
    build, digest = plainly(commands).split(" sha256sum ")
    build = re.sub("CREATED=[^ ]+", "CREATED=D", re.sub("REVISION=[^ ]+", "REVISION=R", build))
    assert build == f"apptainer build --force {source}"
    assert digest == "x.sif > x.sif.sha256"


@pytest.mark.parametrize("code", [0, 3, 75])
def test_the_exit_code_is_shown(
    make: Make, plugin: Path, folders: list[str], tmp_path: Path, code: int
) -> None:
    plugin.write_text(f"#!/bin/sh\nexit {code}\n")
    done = make("train", *folders, docker=f"echo '{plugin} runc'")
    assert done.returncode == (2 if code else 0)
    assert (f"Error {code}" in done.stderr) is (code != 0)
    assert (tmp_path / "RUNS_DIR").is_dir(), (
        "make did not create the folder, so the daemon would create it as root"
    )


def test_an_old_python_is_refused_with_its_path(make: Make, tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = make(f"{tmp_path}/venv/bin/uv", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode == 2
    assert "Python 3.11 or newer" in done.stderr and str(old) in done.stderr


def test_the_environment_is_installed_from_the_locks_with_hashes(
    make: Make, tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    lines = make("-n", "train", f"VENV={venv}").stdout.splitlines()
    installs = [line for line in lines if " install " in line]
    assert len(installs) == 3
    assert f"--require-hashes -r {venv}/uv.lock" in installs[0]
    assert installs[1].endswith("--require-hashes -r requirements.lock")
    assert installs[2].endswith("--no-build-isolation --no-deps --editable .")


@pytest.fixture
def fresh_venv(tmp_path: Path) -> Path:
    """Return a virtual environment without packages, whose pip installs a fake uv."""
    folder = tmp_path / "venv/bin"
    folder.mkdir(parents=True)
    scripts = {
        tmp_path / "python3": f'[ "$1" != -I ] || exec {sys.executable} "$@"\n',
        tmp_path / "uv": "",
        folder / "python": f"{shutil.which('cp')} {tmp_path}/uv {folder}/uv\n",
        folder / "trainbox": "echo trained\n",
    }
    for path, script in scripts.items():
        path.write_text(f"#!/bin/sh\n{script}")
        path.chmod(0o755)
    return tmp_path / "venv"


def test_make_reports_the_installation_instead_of_its_commands(
    make: Make, fresh_venv: Path
) -> None:
    settings = (f"VENV={fresh_venv}", f"PYTHON={fresh_venv.parent}/python3")
    done = make("train", *settings)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert done.stderr == (
        f"trainbox: creating the virtual environment {fresh_venv} ...\n"
        f"trainbox: installing 6 GB of packages in {fresh_venv} (usually 1 to 10 minutes) ...\n"
    )
    done = make("train", *settings)
    assert (done.stdout, done.stderr) == ("trained\n", "")
    done = make("train", *settings, "V=1")
    command = f"env TRAINBOX_COMMAND=make {fresh_venv}/bin/trainbox train"
    assert [plainly(line) for line in done.stdout.splitlines()] == [command, "trained"]


def test_an_error_of_the_installation_is_shown(make: Make, fresh_venv: Path) -> None:
    (fresh_venv.parent / "uv").write_text("#!/bin/sh\necho 'error: no network' >&2\nexit 2\n")
    done = make("train", f"VENV={fresh_venv}", f"PYTHON={fresh_venv.parent}/python3")
    assert (done.returncode, done.stdout) == (2, "")
    assert "\nerror: no network\n" in done.stderr
    assert not (fresh_venv / ".train").exists()


def test_clean_keeps_runs_data_and_tasks(make: Make) -> None:
    arguments = shlex.split(make("-n", "clean").stdout)
    assert not {"runs", "data", "my_tasks", "."} & set(arguments[: arguments.index("find")])
