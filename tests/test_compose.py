"""What Compose makes of the files, by `docker compose config`: no engine is needed."""

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


pytestmark = pytest.mark.skipif(
    not shutil.which("docker")
    or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode != 0,
    reason="no `docker compose` on PATH",
)


def services(*files: str, **settings: str) -> dict[str, Any]:
    """The services as Compose resolves them; settings are the only environment."""
    done = config(*files, PWD=str(ROOT), **settings)
    assert done.returncode == 0, done.stderr
    resolved: dict[str, Any] = json.loads(done.stdout)["services"]
    return resolved


@cache
def config(*files: str, **settings: str) -> subprocess.CompletedProcess[str]:
    chosen = [word for file in files or ("docker-compose.yml",) for word in ("-f", file)]
    compose = ["docker", "compose", "--env-file", "/dev/null", *chosen, "--profile", "*"]
    return subprocess.run(
        [*compose, "config", "--format", "json"],
        cwd=ROOT,
        env={
            **{k: os.environ[k] for k in ("PATH", "HOME", "DOCKER_CONFIG") if k in os.environ},
            **settings,
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"USER": "ada", "PWD": "/home/ada/trainbox"}, "trainbox-ada-homeadatrainbox"),
        ({"USER": "bob", "PWD": "/home/ada/trainbox"}, "trainbox-bob-homeadatrainbox"),
        ({"USER": "ada", "PWD": "/home/ada/second clone"}, "trainbox-ada-homeadasecondclone"),
        ({"LOGNAME": "Ada.Lovelace", "PWD": "/work"}, "trainbox-adalovelace-work"),
        ({"PWD": "/work", "COMPOSE_PROJECT_NAME": "mine"}, "mine"),
    ],
)
def test_a_project_belongs_to_a_user_and_a_checkout(settings: dict[str, str], name: str) -> None:
    assert json.loads(config(**settings).stdout)["name"] == name


def test_the_project_needs_the_path_of_the_checkout() -> None:
    """Without the path, the project could belong to another user."""
    done = config(USER="ada")
    assert done.returncode != 0
    assert "PWD is missing a value: is not set. Set it to the path of this checkout" in done.stderr


def gpus(service: dict[str, Any]) -> Any:
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
    return device["count"]


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, -1),
        ({"GPUS": ""}, -1),
        ({"GPUS": "2"}, 2),
        ({"GPU_IDS": "0,2"}, -1),
        ({"GPUS": "2", "GPU_IDS": "0,2", "GPU_COUNT": "all"}, -1),
    ],
)
def test_gpus_reserves_that_many(settings: dict[str, str], count: int) -> None:
    resolved = services(**settings)
    assert gpus(resolved["train"]) == gpus(resolved["gpu-health"]) == count


def test_the_cpu_file_drops_every_reservation_and_the_watch_over_gpus_and_nothing_else() -> None:
    plain, on_cpu = services(), services("docker-compose.yml", "docker-compose.cpu.yml")
    command = on_cpu["train"]["environment"].pop("TRAINBOX_COMMAND")
    assert (
        command
        == "docker compose -f docker-compose.yml -f docker-compose.cpu.yml run --rm --no-deps train"
    )
    del plain["train"]["environment"]["TRAINBOX_COMMAND"]
    assert on_cpu["run"]["environment"].pop("TRAINBOX_COMMAND") == command
    del plain["run"]["environment"]["TRAINBOX_COMMAND"]
    for name in ("train", "run", "gpu-health"):
        assert "deploy" not in on_cpu[name]
        del plain[name]["deploy"]
        # Only a host with GPUs must have one.
        assert plain[name]["environment"].pop("DEVICE") == "cuda"
        assert on_cpu[name]["environment"].pop("DEVICE") is None
    del plain["train"]["depends_on"]["gpu-health"]
    assert on_cpu["gpu-health"].pop("profiles") == ["health"], "a bare `up` does not start it"
    assert plain == on_cpu


@pytest.mark.parametrize("name", ["train", "run", "tensorboard", "gpu-health", "folders"])
def test_every_service_is_confined(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp:exec,mode=1777,size=4g"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"] == 8192
    assert service.get("cap_add") == (["CHOWN"] if name == "folders" else None)
    assert "privileged" not in service


def test_the_caller_trains() -> None:
    resolved = services(UID="12345", GID="678")
    callers = ("train", "run", "tensorboard", "gpu-health")
    assert {resolved[name]["user"] for name in callers} == {"12345:678"}
    assert resolved["folders"]["user"] == "0:0"
    assert "12345:678" in resolved["folders"]["command"]
    shared = {mount["target"] for mount in resolved["folders"]["volumes"]}
    made = {"/workspace/runs", "/workspace/data", "/workspace/my_tasks", "/workspace/project/data"}
    words = {*resolved["folders"]["entrypoint"], *resolved["folders"]["command"]}
    assert shared == made <= words
    for name in callers:
        assert (
            resolved[name]["depends_on"]["folders"]["condition"] == "service_completed_successfully"
        )


def test_train() -> None:
    train = services(ARGS="--epochs 3 --set 'name=a b'")["train"]
    assert train["command"] == ["train", "--epochs", "3", "--set", "name=a b"]
    assert train["stop_grace_period"] == "1m0s"
    assert int(train["shm_size"]) == 8 << 30
    assert train["network_mode"] == "bridge"
    assert services(NETWORK_MODE="host")["train"]["network_mode"] == "host"


def test_run() -> None:
    resolved = services(RUNS_DIR="/big/runs", PROJECT_DIR="/mine", DATA_DIR="/big/data")
    run = resolved["run"]
    assert run["entrypoint"] == [
        "tini",
        "-s",
        "--",
        "trainbox",
        "run",
        "--runs-dir",
        "/workspace/runs",
    ]
    assert run["working_dir"] == "/workspace/project"
    assert mounts(run) == {
        "/workspace/runs": ("/big/runs", False),
        "/workspace/project": ("/mine", True),
        "/workspace/project/data": ("/mine/data", False),
        "/workspace/data": ("/big/data", False),
    }
    assert mounts(services()["run"])["/workspace/project"] == (str(ROOT), True)
    assert run["profiles"] == ["run"], "a bare `up` does not start it"
    assert run["depends_on"].keys() == {"folders"}
    alike = ("deploy", "environment", "network_mode", "shm_size", "stop_grace_period")
    assert {name: run[name] for name in alike} == {name: resolved["train"][name] for name in alike}


@pytest.mark.parametrize("name", ["train", "run", "gpu-health"])
def test_sizes_of_tmp_and_memory(name: str) -> None:
    assert "mem_limit" not in services()[name], "no limit"
    service = services(TMP_SIZE="20g", MEMORY="64g")[name]
    assert service["tmpfs"] == ["/tmp:exec,mode=1777,size=20g"]
    assert int(service["mem_limit"]) == 64 << 30


def test_infiniband_gets_its_devices_and_locked_memory() -> None:
    plain = services()
    network = services("docker-compose.yml", "docker-compose.infiniband.yml")
    for name in ("train", "run"):
        (device,) = network[name].pop("devices")
        assert (device["source"], device["target"]) == ("/dev/infiniband", "/dev/infiniband")
        assert network[name].pop("ulimits") == {"memlock": -1}
    assert network == plain


def test_no_key_of_the_training_reaches_the_monitor(tmp_path: Path) -> None:
    shutil.copy(ROOT / "docker-compose.yml", tmp_path)
    (tmp_path / ".env").write_text("WANDB_API_KEY=secret\n")
    done = subprocess.run(
        ["docker", "compose", "--profile", "*", "config", "--format", "json"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PWD": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)["services"]
    with_key = {name for name, service in found.items() if "secret" in json.dumps(service)}
    assert with_key == {"train", "run"}


def mounts(service: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    return {
        m["target"]: (m["source"], m.get("read_only", False))
        for m in service["volumes"]
        if "limits" not in m["target"]
    }


@pytest.mark.parametrize(
    ("given", "source"), [("", "/dev/null"), ("limits.toml", f"{ROOT}/limits.toml")]
)
def test_other_limits_are_mounted_where_both_look(given: str, source: str) -> None:
    resolved = services(HEALTH_LIMITS=given)
    for name in ("train", "gpu-health"):
        (mount,) = (
            m
            for m in resolved[name]["volumes"]
            if m["target"] == resolved[name]["environment"]["HEALTH_LIMITS"]
        )
        assert (mount["source"], mount["read_only"]) == (source, True)


def test_mounts() -> None:
    here = services()
    assert mounts(here["train"])["/workspace/my_tasks"] == (f"{ROOT}/my_tasks", True)
    assert mounts(here["folders"])["/workspace/my_tasks"] == (f"{ROOT}/my_tasks", False)
    assert mounts(here["gpu-health"]) == {"/workspace/runs": (f"{ROOT}/runs", False)}
    resolved = services(RUNS_DIR="/big/runs", DATA_DIR="/big/data", TASKS_DIR="examples")
    assert mounts(resolved["train"]) == {
        "/workspace/runs": ("/big/runs", False),
        "/workspace/data": ("/big/data", False),
        "/workspace/examples": (f"{ROOT}/examples", True),
    }
    assert mounts(resolved["tensorboard"])["/workspace/runs"] == ("/big/runs", True)
    assert mounts(resolved["folders"])["/workspace/my_tasks"] == (f"{ROOT}/examples", False)
    absolute = mounts(services(TASKS_DIR="/big/tasks", TASKS_AT="/big/tasks")["train"])
    assert absolute["/big/tasks"] == ("/big/tasks", True)


def test_tensorboard_is_for_this_host_only_and_takes_no_gpu() -> None:
    tensorboard = services(TENSORBOARD_PORT="7007")["tensorboard"]
    (port,) = tensorboard["ports"]
    assert (port["host_ip"], port["published"], port["target"]) == ("127.0.0.1", "7007", 6006)
    assert tensorboard["environment"]["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert "deploy" not in tensorboard


def test_settings_reach_trainbox_only_when_given() -> None:
    given = {"GPUS": "2", "TASK": "mnist", "SET": "width=64 depth=2", "RDZV_ENDPOINT": "a:29500"}
    given |= {"NCCL_DEBUG": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "OMP_NUM_THREADS": "2"}
    given |= {"CUDA_LAUNCH_BLOCKING": "1"}
    environment = services(**given)["train"]["environment"]
    always = {
        "DEVICE": "cuda",
        "HEALTH_LIMITS": "/workspace/limits.toml",
        "TRAINBOX_COMMAND": "docker compose run --rm --no-deps train",
    }
    assert {
        name: value for name, value in environment.items() if value is not None
    } == given | always


def test_training_waits_for_the_watch_over_its_gpus() -> None:
    resolved = services(HEALTH_PORT="9401")
    assert resolved["train"]["depends_on"]["gpu-health"]["condition"] == "service_healthy"
    watch = resolved["gpu-health"]
    command = ["health", "--monitor", "--listen", "0.0.0.0:9400", "--gpus"]
    for settings, count in (({}, "all"), ({"GPUS": "2"}, "2"), ({"GPU_COUNT": "3"}, "3")):
        assert services(**settings)["gpu-health"]["command"] == [*command, count]
    assert watch["shm_size"] == resolved["train"]["shm_size"]
    (port,) = watch["ports"]
    assert (port["host_ip"], port["published"], port["target"]) == ("127.0.0.1", "9401", 9400)
    (port,) = services()["gpu-health"]["ports"]
    assert port["host_ip"] == "127.0.0.1" and port.get("published", "") in ("", "0"), (
        "any that is free"
    )


def test_the_monitor_does_not_get_the_file_with_the_keys_of_a_training(tmp_path: Path) -> None:
    # In a folder of its own, because the checkout may have a file .env.
    shutil.copy(ROOT / "docker-compose.yml", tmp_path)
    (tmp_path / ".env").write_text("WANDB_API_KEY=secret\n")
    done = subprocess.run(
        ["docker", "compose", "config", "--format", "json"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PWD": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)["services"]
    assert found["train"]["environment"]["WANDB_API_KEY"] == "secret"
    assert "WANDB_API_KEY" not in found["gpu-health"]["environment"]


def test_the_files_with_packages_are_in_a_build_context_of_their_own() -> None:
    build = services(REQUIREMENTS="my.txt", REQUIREMENTS_DIR="/project")["train"]["build"]
    assert build["args"]["REQUIREMENTS"] == "my.txt"
    assert build["additional_contexts"] == {"requirements": "/project"}
    assert services()["train"]["build"]["additional_contexts"] == {"requirements": str(ROOT)}
