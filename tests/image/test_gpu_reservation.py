"""The number of GPUs in a container, and the health gate, with the unmodified docker-compose.yml.

The engine has the NVIDIA runtime or a stand-in for it. BARE_TEST_DOCKER_HOST names an engine
without this runtime, and BARE_TEST_IMAGE an image of that engine with a shell.
"""

import json
import os
import re
import urllib.request
from pathlib import Path

import pytest

from tests.support.nvml_stub.build import build_stub, write_config

from .conftest import Checkout, Docker, copy_tree, unique_name

pytestmark = pytest.mark.image

_UP = ("docker", "compose", "up", "--exit-code-from", "train", "train")


@pytest.fixture
def gpu_host(checkout: Checkout) -> Checkout:
    if "nvidia" not in checkout.run("docker", "info", "--format", "{{json .Runtimes}}").stdout:
        pytest.skip("the Docker engine has no NVIDIA runtime")
    return checkout


def gpus_inside(host: Checkout, service: str = "train", **settings: str) -> list[str]:
    """Return the lines of `nvidia-smi -L` in a container of the service."""
    words = (
        "docker",
        "compose",
        "run",
        "--rm",
        "--no-deps",
        "--entrypoint",
        "nvidia-smi",
        service,
        "-L",
    )
    done = host.run(*words, **settings)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("GPU ")]


@pytest.fixture
def all_gpus(gpu_host: Checkout) -> int:
    """Return the number of GPUs of the engine."""
    words = (
        "docker",
        "run",
        "--rm",
        "--gpus",
        "all",
        "--entrypoint",
        "nvidia-smi",
        gpu_host.env["IMAGE"],
        "-L",
    )
    done = gpu_host.run(*words)
    assert done.returncode == 0, done.stderr
    return len(done.stdout.splitlines())


@pytest.mark.parametrize("service", ["train", "gpu-health"])
def test_a_container_gets_all_gpus_by_default(
    gpu_host: Checkout, all_gpus: int, service: str
) -> None:
    assert len(gpus_inside(gpu_host, service)) == all_gpus
    assert len(gpus_inside(gpu_host, service, GPUS="")) == all_gpus


def test_compose_up_gets_all_gpus(gpu_host: Checkout, all_gpus: int) -> None:
    """Replace the image: the new one lists its GPUs instead of training."""
    listing = gpu_host.env["COMPOSE_PROJECT_NAME"]
    (gpu_host.path / "listing").write_text(
        f'FROM {gpu_host.env["IMAGE"]}\nENTRYPOINT ["sh", "-c", "nvidia-smi -L"]\n'
    )
    built = gpu_host.run("docker", "build", "--file", "listing", "--tag", listing, ".")
    assert built.returncode == 0, built.stderr
    try:
        done = gpu_host.run("docker", "compose", "up", "--no-deps", "train", IMAGE=listing)
        assert done.returncode == 0, done.stderr
        assert len([line for line in done.stdout.splitlines() if "| GPU " in line]) == all_gpus
    finally:
        gpu_host.run("docker", "compose", "rm", "--force", "--stop", IMAGE=listing)
        gpu_host.run("docker", "image", "rm", listing)


def test_gpus_sets_the_number_of_gpus(gpu_host: Checkout, all_gpus: int) -> None:
    if all_gpus < 3:
        pytest.skip(f"the engine has {all_gpus} GPUs; 2 of 3 are to be handed out")
    assert len(gpus_inside(gpu_host, GPUS="2")) == 2
    visible = (
        "docker",
        "compose",
        "run",
        "--rm",
        "--no-deps",
        "--entrypoint",
        "printenv",
        "train",
        "NVIDIA_VISIBLE_DEVICES",
    )
    assert gpu_host.run(*visible, GPUS="2").stdout.strip() == "0,1"


def test_with_gpu_ids_the_container_gets_all_gpus(gpu_host: Checkout, all_gpus: int) -> None:
    assert len(gpus_inside(gpu_host, GPU_IDS="0")) == all_gpus


def test_more_gpus_than_the_engine_has_are_refused(gpu_host: Checkout, all_gpus: int) -> None:
    done = gpu_host.run(
        "docker", "compose", "run", "--rm", "--no-deps", "train", GPUS=str(all_gpus + 1)
    )
    assert done.returncode != 0 and "unknown device" in done.stderr
    done = gpu_host.run("make", "train", GPUS=str(all_gpus + 1))
    assert (
        f"--gpus {all_gpus + 1} requested, no GPU found" in done.stderr and "Error 3" in done.stderr
    )


def test_make_detects_the_nvidia_runtime(gpu_host: Checkout) -> None:
    shown = gpu_host.run("make", "-n", "train", "GPUS=2").stdout.splitlines()[-1]
    assert "docker-compose" in shown and "docker-compose.cpu.yml" not in shown


def test_without_the_runtime_the_gpu_file_is_refused_and_the_cpu_file_runs(tmp_path: Path) -> None:
    names = ("BARE_TEST_DOCKER_HOST", "BARE_TEST_IMAGE")
    if not all(os.environ.get(name) for name in names):
        pytest.skip(f"{' and '.join(names)} name no engine without the NVIDIA runtime")
    engine, image = (os.environ[name] for name in names)
    env = {
        name: os.environ[name] for name in ("PATH", "HOME", "DOCKER_CONFIG") if name in os.environ
    }
    env |= {
        "DOCKER_HOST": engine,
        "IMAGE": image,
        "UID": "1000",
        "GID": "1000",
        "COMPOSE_PROJECT_NAME": unique_name(),
    }
    env["PWD"] = str(tmp_path)
    bare = Checkout(copy_tree(tmp_path), env)
    words = ("docker", "compose", "run", "--rm", "--no-deps", "--entrypoint", "true", "train")
    try:
        refused = bare.run(*words)
        assert refused.returncode != 0 and "nvidia" in refused.stderr
        assert bare.compose(*words[2:]).returncode == 0
    finally:
        bare.compose("down", "--volumes", "--timeout", "1")


# Health.


@pytest.fixture
def stubbed(gpu_host: Checkout) -> Checkout:
    """Return a checkout whose containers have the NVML stub as driver, with two healthy H100."""
    stub = gpu_host.path / "stub"
    build_stub(stub)
    write_config(stub / "nvml.conf", "h100", count=2)
    services = {
        name: {
            "environment": {"LD_LIBRARY_PATH": "/stub", "NVML_STUB_CONFIG": "/stub/nvml.conf"},
            "volumes": [{"type": "bind", "source": "./stub", "target": "/stub", "read_only": True}],
        }
        for name in ("train", "gpu-health")
    }
    (gpu_host.path / "stub.json").write_text(json.dumps({"services": services}))
    return Checkout(gpu_host.path, gpu_host.env | {"COMPOSE_FILE": "docker-compose.yml:stub.json"})


def test_compose_up_trains_on_healthy_gpus(stubbed: Checkout) -> None:
    """The gates of the service and of the training open.

    Then torch reports that it cannot use the GPUs of the stub.
    """
    done = stubbed.run(*_UP, GPUS="2", ARGS="--max-steps 5")
    assert done.returncode == 3, done.stdout + done.stderr
    # `up` may lose the last lines of a container.
    logged = stubbed.run("docker", "compose", "logs", "train").stdout
    assert "health     OPEN, PASS: 2 GPUs" in logged
    assert re.search("process [01] was given a GPU, but torch", logged)
    done = stubbed.run(*_UP, DEVICE="cpu", ARGS="--max-steps 5")
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_up_does_not_train_on_a_gpu_with_an_uncorrected_error(
    stubbed: Checkout, docker: Docker
) -> None:
    write_config(
        stubbed.path / "stub" / "nvml.conf", "h100", {"gpu1.ecc.volatile.uncorrected": 2}, count=2
    )
    done = stubbed.run("docker", "compose", "up", "train", GPUS="2", ARGS="--run r --max-steps 5")
    assert done.returncode != 0
    assert "dependency failed to start: container" in done.stderr and "is unhealthy" in done.stderr
    assert not (stubbed.path / "runs" / "r").exists()
    logs = stubbed.run("docker", "compose", "logs", "--no-log-prefix", "gpu-health").stdout
    assert "ecc-uncorrected CRITICAL: 2 uncorrected memory errors" in logs
    assert "CLOSED, CRITICAL: 2 GPUs; ecc-uncorrected (GPU 1)" in logs
    assert (
        stubbed.run(*_UP, HEALTH="0", DEVICE="cpu", ARGS="--run r --max-steps 5").returncode == 0
    ), "HEALTH=0 trains nevertheless"
    (stubbed.path / "limits.toml").write_text("ecc_uncorrected = 5\n")
    done = stubbed.run(*_UP, GPUS="2", HEALTH_LIMITS="limits.toml", ARGS="--max-steps 5")
    assert "health     OPEN, PASS: 2 GPUs" in done.stdout, done.stdout + done.stderr
    # Without the service, the gate of the training is closed.
    done = stubbed.run("docker", "compose", "run", "--rm", "--no-deps", "train", GPUS="2")
    assert done.returncode == 3
    assert "the health gate is closed. GPU 1" in done.stderr


def test_the_monitor_listens_on_loopback_only(stubbed: Checkout) -> None:
    done = stubbed.run("docker", "compose", "up", "--detach", "--wait", "gpu-health")
    assert done.returncode == 0, done.stderr
    published = stubbed.run("docker", "compose", "port", "gpu-health", "9400").stdout.strip()
    assert published.startswith("127.0.0.1:")
    with urllib.request.urlopen(f"http://{published}/healthz", timeout=20) as answer:
        assert answer.read() == b"OPEN, PASS: 2 GPUs\n"
    assert stubbed.run("docker", "compose", "stop", "--timeout", "20", "gpu-health").returncode == 0
    state = stubbed.run("docker", "compose", "ps", "--all", "--format", "json", "gpu-health").stdout
    assert json.loads(state)["ExitCode"] == 0
