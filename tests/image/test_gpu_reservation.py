"""Who gets how many GPUs, by the unmodified docker-compose.yml on an engine that has the NVIDIA runtime.

TRAINBOX_TEST_NVIDIA_DOCKER_HOST names that engine (default: DOCKER_HOST's), TRAINBOX_TEST_NVIDIA_IMAGE an image on it
that has a shell (default: the one that the other tests build). A make-believe runtime is enough.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import IMAGE, Checkout, copy_tree, engine_answers, name_of_its_own

pytestmark = [pytest.mark.image, pytest.mark.timeout(300)]


@pytest.fixture
def gpu_host(tmp_path: Path) -> Iterator[Checkout]:
    engine = os.environ.get("TRAINBOX_TEST_NVIDIA_DOCKER_HOST", os.environ.get("DOCKER_HOST", ""))
    env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    env |= {"UID": str(os.getuid()), "GID": str(os.getgid())}
    env |= {"COMPOSE_PROJECT_NAME": name_of_its_own(), "IMAGE": os.environ.get("TRAINBOX_TEST_NVIDIA_IMAGE", IMAGE)}
    env |= {"DOCKER_HOST": engine} if engine else {}
    host = Checkout(copy_tree(tmp_path), env)
    if not engine_answers(**env) or "nvidia" not in host.run("docker", "info", "--format", "{{json .Runtimes}}").stdout:
        pytest.skip("no Docker engine with the NVIDIA runtime; TRAINBOX_TEST_NVIDIA_DOCKER_HOST names none")
    yield host
    host.run("docker", "compose", "down", "--volumes", "--timeout", "1")


def gpus_inside(host: Checkout, service: str = "train", **settings: str) -> list[str]:
    """What nvidia-smi lists in the container."""
    words = ("docker", "compose", "run", "--rm", "--entrypoint", "nvidia-smi", service, "-L")
    done = host.run(*words, **settings)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("GPU ")]


@pytest.fixture
def all_gpus(gpu_host: Checkout) -> int:
    """How many that engine has to give."""
    words = ("docker", "run", "--rm", "--gpus", "all", "--entrypoint", "nvidia-smi", gpu_host.env["IMAGE"], "-L")
    done = gpu_host.run(*words)
    assert done.returncode == 0, done.stderr
    return len(done.stdout.splitlines())


@pytest.mark.parametrize("service", ["train", "gpu-health"])
def test_all_gpus_by_default(gpu_host: Checkout, all_gpus: int, service: str) -> None:
    assert len(gpus_inside(gpu_host, service)) == all_gpus
    assert len(gpus_inside(gpu_host, service, GPUS="")) == all_gpus


def test_up_alone_gets_them_all(gpu_host: Checkout, all_gpus: int, tmp_path: Path) -> None:
    """`docker compose up train` and nothing else, by an image that lists its GPUs where ours would train."""
    listing = gpu_host.env["COMPOSE_PROJECT_NAME"]
    (tmp_path / "listing").write_text(f'FROM {gpu_host.env["IMAGE"]}\nENTRYPOINT ["sh", "-c", "nvidia-smi -L"]\n')
    built = gpu_host.run("docker", "build", "--file", "listing", "--tag", listing, ".")
    assert built.returncode == 0, built.stderr
    try:
        done = gpu_host.run("docker", "compose", "up", "train", IMAGE=listing)
        assert done.returncode == 0, done.stderr
        assert len([line for line in done.stdout.splitlines() if "| GPU " in line]) == all_gpus
    finally:
        gpu_host.run("docker", "compose", "rm", "--force", "--stop", IMAGE=listing)
        gpu_host.run("docker", "image", "rm", listing)


def test_gpus_hands_out_that_many(gpu_host: Checkout, all_gpus: int) -> None:
    if all_gpus < 3:
        pytest.skip(f"the engine has {all_gpus} GPUs; 2 of 3 are to be handed out")
    assert len(gpus_inside(gpu_host, GPUS="2")) == 2
    visible = ("docker", "compose", "run", "--rm", "--entrypoint", "printenv", "train", "NVIDIA_VISIBLE_DEVICES")
    assert gpu_host.run(*visible, GPUS="2").stdout.strip() == "0,1"


def test_gpu_ids_are_picked_from_all(gpu_host: Checkout, all_gpus: int) -> None:
    assert len(gpus_inside(gpu_host, GPU_IDS="0")) == all_gpus


def test_more_than_there_are_is_refused(gpu_host: Checkout, all_gpus: int) -> None:
    done = gpu_host.run("docker", "compose", "run", "--rm", "train", GPUS=str(all_gpus + 1))
    assert done.returncode != 0 and "unknown device" in done.stderr


def test_make_finds_the_runtime(gpu_host: Checkout) -> None:
    shown = gpu_host.run("make", "-n", "train", "GPUS=2").stdout.splitlines()[-1]
    assert "docker-compose" in shown and "docker-compose.cpu.yml" not in shown


def test_without_the_runtime_the_gpu_file_is_refused_and_the_cpu_file_runs(checkout: Checkout) -> None:
    words = ("docker", "compose", "run", "--rm", "--entrypoint", "true", "train")
    if "nvidia" in checkout.run("docker", "info", "--format", "{{json .Runtimes}}").stdout:
        pytest.skip("this engine has the NVIDIA runtime")
    refused = checkout.run(*words)
    assert refused.returncode != 0 and "nvidia" in refused.stderr
    assert checkout.compose(*words[2:]).returncode == 0
