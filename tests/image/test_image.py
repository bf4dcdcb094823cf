"""The contents of the image, and its behaviour under `docker run`."""

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .conftest import IMAGE, Docker, copy_tree, make_build, unique_name

pytestmark = pytest.mark.image

CONFINED = [
    "--read-only",
    "--tmpfs",
    "/tmp",
    "--cap-drop",
    "ALL",
    "--security-opt",
    "no-new-privileges",
]
KERNEL = Path(__file__).parents[1] / "support/triton_kernel.py"
SHORT = ["train", "--max-steps", "30", "--run", "r"]
LONG = ["train", "--epochs", "12", "--run", "r"]


def inspect(docker: Docker) -> dict[str, Any]:
    (found,) = json.loads(docker("image", "inspect", IMAGE).stdout)
    assert isinstance(found, dict)
    return found


def folder(path: Path, mode: int) -> Path:
    path.mkdir()
    path.chmod(mode)
    return path


def mount(path: Path) -> list[str]:
    return ["--volume", f"{path}:/workspace/runs"]


def assert_whole(run: Path) -> int:
    """Check the digest of each checkpoint against its sidecar; return the newest step."""
    sidecars = [
        json.loads(path.read_text()) for path in sorted(run.glob("checkpoints/step-*.json"))
    ]
    assert sidecars
    for sidecar in sidecars:
        weights = run / "checkpoints" / f"step-{sidecar['step']:08}.pt"
        assert hashlib.sha256(weights.read_bytes()).hexdigest() == sidecar["sha256"]
    return max(int(sidecar["step"]) for sidecar in sidecars)


def steps_of(run: Path) -> list[int]:
    """Return the steps of the `train` entries.

    A training that is stopped at the end of an epoch validates after the resume, at the same step.
    """
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [entry["step"] for entry in map(json.loads, lines) if entry["kind"] == "train"]


def test_the_configuration_of_the_image(docker: Docker) -> None:
    found = inspect(docker)
    config = found["Config"]
    print(f"\nsize: {found['Size'] / 1e9:.2f} GB, {len(found['RootFS']['Layers'])} layers")
    uid, gid = config["User"].split(":")
    assert int(uid) > 0 and gid == "0"
    assert config["Entrypoint"] == ["tini", "-s", "--", "trainbox"]
    entry = docker("run", "--rm", "--entrypoint", "getent", IMAGE, "passwd", uid)
    assert entry.stdout.split(":")[2] == uid
    assert config["StopSignal"] == "SIGTERM"
    assert not {"python", "python3"} & set(config["Healthcheck"]["Test"])
    assert config["WorkingDir"] == "/workspace"


def test_labels_and_build_info(docker: Docker) -> None:
    labels = {
        k.removeprefix("org.opencontainers.image."): v
        for k, v in inspect(docker)["Config"]["Labels"].items()
    }
    assert labels["title"] == "trainbox" and labels["licenses"] == "Apache-2.0"
    assert all(labels[name] for name in ("description", "authors", "vendor", "documentation"))
    assert labels["source"] == labels["url"] == "https://github.com/trainbox/trainbox"
    # The date of the commit, by SOURCE_DATE_EPOCH.
    assert labels["created"] == inspect(docker)["Created"] == "2000-01-01T00:00:00Z"
    base = os.environ.get("BASE_IMAGE", "")
    if base:
        name, _, digest = base.partition("@")
        assert (labels["base.name"], labels["base.digest"]) == (name, digest)
    else:
        assert labels["base.digest"].startswith("sha256:")
    info = json.loads(docker("run", "--rm", IMAGE, "sh", "-c", 'cat "$TRAINBOX_BUILD_INFO"').stdout)
    lock = Path(__file__).parents[2] / "requirements.lock"
    assert info["lock_sha256"] == hashlib.sha256(lock.read_bytes()).hexdigest()
    assert re.fullmatch("[0-9a-f]{40}", labels["revision"])
    assert (info["revision"], info["version"]) == (labels["revision"], labels["version"])
    assert docker("run", "--rm", IMAGE, "--version").stdout.strip() == f"trainbox {info['version']}"


def test_all_modules_have_current_bytecode(docker: Docker) -> None:
    program = """
import importlib.util, pathlib, struct, sys
import entrypoint, torch, trainbox, trainer
for package in (entrypoint, torch.nn, trainbox, trainer):
    for source in pathlib.Path(package.__file__).parent.rglob("*.py"):
        head = pathlib.Path(importlib.util.cache_from_source(source)).read_bytes()[:16]
        flags, mtime, size = struct.unpack("<3I", head[4:])
        stat = source.stat()
        assert (flags, mtime, size) == (0, int(stat.st_mtime), stat.st_size), source
"""
    done = docker("run", "--rm", IMAGE, "python", "-c", program)
    assert done.returncode == 0, done.stderr


def test_no_program_has_a_setuid_or_setgid_bit(docker: Docker) -> None:
    found = docker("run", "--rm", "--user", "0", IMAGE, "find", "/", "-xdev", "-perm", "/6000")
    assert [line for line in found.stdout.splitlines() if not line.startswith("/var/")] == []


def test_no_file_can_be_written_by_all_users_and_no_package_of_apt_is_left(docker: Docker) -> None:
    found = docker(
        *("run", "--rm", "--user", "0", IMAGE, "find", "/", "-xdev", "-type", "f"),
        *("(", "-perm", "-002", "-o", "-path", "/var/cache/apt/*", "-size", "+0", ")"),
    )
    assert found.stdout.splitlines() == []


def test_every_library_of_torch_finds_the_libraries_that_it_is_linked_with(docker: Docker) -> None:
    """torch loads some of them only when they are used, such as the library of linear algebra.

    nvrtc's library is linked with the driver, which is not in the image. NCCL loads InfiniBand's
    libraries itself, and uses TCP without them.
    """
    program = """
import ctypes, pathlib, torch
folder = pathlib.Path(torch.__file__).parent / "lib"
paths = [path for path in folder.glob("lib*.so") if path.name != "libcaffe2_nvrtc.so"]
loaded = [ctypes.CDLL(str(path)) for path in paths]
assert len(loaded) > 8, loaded
ctypes.CDLL("libibverbs.so.1")
assert list(pathlib.Path("/usr/lib").glob("*/libibverbs/libmlx5-*.so"))
import torch.distributed.fsdp, torch.profiler
assert torch.distributed.is_nccl_available()
"""
    done = docker("run", "--rm", IMAGE, "python", "-c", program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train(docker: Docker, tmp_path: Path, strategy: str) -> None:
    runs = folder(tmp_path / "runs", 0o777)
    settings = ["--env", "PROCESSES=2", "--env", f"STRATEGY={strategy}"]
    done = docker("run", "--rm", "--shm-size", "1g", *settings, *mount(runs), IMAGE, *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert assert_whole(runs / "r") == 30


def test_compile_is_refused_with_its_remedy(docker: Docker) -> None:
    done = docker("run", "--rm", IMAGE, *SHORT, "--compile")
    assert (done.returncode, done.stdout) == (2, "")
    assert "build the image with `make build COMPILE=1`, or drop --compile" in done.stderr
    assert docker("run", "--rm", IMAGE, "python", "-c", "import triton").returncode == 1


def test_compile_works_in_the_image_for_it(docker: Docker, tree: Path, tmp_path: Path) -> None:
    """Compile a training for the CPU, and a kernel of triton for an H100."""
    image = "trainbox-test-compile"
    try:
        print(f"\nmake build COMPILE=1: {make_build(tree, image, COMPILE='1'):.1f} s")
        size = docker("image", "inspect", "--format", "{{.Size}}", image).stdout
        print(f"size with COMPILE=1: {int(size) / 1e9:.2f} GB")
        confined = ["--read-only", "--tmpfs", "/tmp:exec", *mount(folder(tmp_path / "runs", 0o777))]
        done = docker("run", "--rm", *confined, image, *SHORT, "--compile")
        assert done.returncode == 0, done.stdout + done.stderr
        mounted = ["--volume", f"{KERNEL.parent}:/mnt/kernel:ro"]
        done = docker("run", "--rm", *mounted, image, "python", f"/mnt/kernel/{KERNEL.name}")
        assert done.stdout.endswith("/triton/__init__.py True\n"), done.stderr
    finally:
        docker("image", "rm", image)


def test_the_image_has_no_build_tools(docker: Docker) -> None:
    found = docker(
        "run", "--rm", IMAGE, "sh", "-c", "for tool in cc gcc git pip uv; do command -v $tool; done"
    )
    assert found.stdout + found.stderr == ""


def test_a_source_change_rebuilds_only_the_source(docker: Docker, tmp_path: Path) -> None:
    tree = copy_tree(tmp_path)
    (tree / "trainer" / "__init__.py").write_text(f"# {unique_name()}\n")
    changed = "trainbox-test-changed"
    try:
        print(f"\nrebuilt after a source change: {make_build(tree, changed):.1f} s")
        before, after = (
            json.loads(
                docker("image", "inspect", name, "--format", "{{json .RootFS.Layers}}").stdout
            )
            for name in (IMAGE, changed)
        )
        assert len(before) == len(after)
        same = [a == b for a, b in zip(before, after, strict=True)]
        assert all(same[:-2]), "only the trainer's layer and the bytecode's may differ"
    finally:
        docker("image", "rm", changed)


@pytest.mark.parametrize(
    "command", [["bash", "-c", "exit 42"], ["python", "-c", "raise SystemExit(42)"]]
)
def test_another_command_replaces_trainbox(docker: Docker, command: list[str]) -> None:
    assert docker("run", "--rm", IMAGE, *command).returncode == 42


@pytest.mark.parametrize("user", ["12345", "0:0"])
def test_a_confined_container_trains_as_any_user(docker: Docker, tmp_path: Path, user: str) -> None:
    runs = folder(tmp_path / "runs", 0o777)
    done = docker("run", "--rm", "--user", user, *CONFINED, *mount(runs), IMAGE, *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert assert_whole(runs / "r") == 30
    uid, gid = (*map(int, user.split(":")), 0)[:2]
    assert {(p.stat().st_uid, p.stat().st_gid) for p in (runs / "r").rglob("*")} == {(uid, gid)}


def test_a_training_does_not_need_a_mount(docker: Docker) -> None:
    done = docker("run", "--rm", "--user", "12345:23456", IMAGE, *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_any_user_has_a_name_a_home_and_caches(docker: Docker) -> None:
    program = """
import getpass, os, pathlib, tempfile
assert getpass.getuser() and pathlib.Path.home() == pathlib.Path("/tmp")
from torch._inductor.runtime.cache_dir_utils import cache_dir
names = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "MPLCONFIGDIR", "TORCH_HOME", "CUDA_CACHE_PATH")
for name in [cache_dir(), *(os.environ[n] for n in names)]:
    assert name.startswith("/tmp/"), name
    pathlib.Path(name).mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=name).close()
"""
    done = docker("run", "--rm", "--user", "12345:23456", *CONFINED, IMAGE, "python", "-c", program)
    assert done.returncode == 0, done.stderr


def test_exit_codes(docker: Docker, tmp_path: Path) -> None:
    assert docker("run", "--rm", IMAGE, "train", "digitz").returncode == 2
    # 1 is the verdict of the health check: the gate is closed.
    assert docker("run", "--rm", "--env", "GPUS=1", IMAGE, "health").returncode == 1
    assert docker("run", "--rm", "--env", "GPUS=1", IMAGE, "train").returncode == 3
    mine = folder(tmp_path / "runs", 0o755)
    mine.chmod(0o555)
    done = docker("run", "--rm", "--user", "12345:12345", *mount(mine), IMAGE, *SHORT)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "12345" in done.stderr and "runs/r" in done.stderr


@pytest.mark.parametrize("processes", ["1", "2"])
def test_docker_stop_saves_a_checkpoint_and_the_same_command_resumes(
    docker: Docker, tmp_path: Path, processes: str
) -> None:
    run = folder(tmp_path / "runs", 0o777) / "r"
    name = unique_name()
    train = [
        "--user",
        "12345",
        "--env",
        f"PROCESSES={processes}",
        *CONFINED,
        *mount(run.parent),
        IMAGE,
        *LONG,
    ]
    assert docker("run", "--detach", "--name", name, *train).returncode == 0
    follow = ["docker", "logs", "--follow", name]
    with subprocess.Popen(follow, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as logs:
        assert logs.stdout
        assert any(b"epoch 2:" in line for line in logs.stdout), "it ended before its second epoch"
        assert docker("stop", "--time", "60", name).returncode == 0
    logged = docker("logs", name)
    assert docker("inspect", "--format", "{{.State.ExitCode}}", name).stdout.strip() == "75", (
        logged.stdout + logged.stderr
    )
    assert "Traceback" not in logged.stdout + logged.stderr
    stopped_at = assert_whole(run)
    assert 44 <= stopped_at < 12 * 22
    before = len(steps_of(run))

    again = docker("run", "--rm", *train)
    assert again.returncode == 0, again.stdout + again.stderr
    steps = steps_of(run)
    assert min(steps[before:]) > stopped_at, "no step is repeated"
    assert steps == sorted(steps) and steps[-1] == 12 * 22


def test_the_health_check_depends_on_the_age_of_the_heartbeat(docker: Docker) -> None:
    kind, *check = inspect(docker)["Config"]["Healthcheck"]["Test"]
    assert kind == "CMD"
    name = unique_name()
    docker("run", "--detach", "--name", name, *CONFINED, IMAGE, "sleep", "600")
    for before, code in (
        ("true", 0),  # nothing trains
        ('touch "$TRAINBOX_HEARTBEAT"', 0),
        ('touch --date "10 minutes ago" "$TRAINBOX_HEARTBEAT"', 1),
    ):
        assert docker("exec", name, "sh", "-c", before).returncode == 0
        assert docker("exec", name, *check).returncode == code, before


def test_a_training_touches_the_heartbeat(docker: Docker, tmp_path: Path) -> None:
    program = f'trainbox {" ".join(SHORT)} >&2 && find "$TRAINBOX_HEARTBEAT" -mmin -1'
    done = docker(
        "run",
        "--rm",
        *CONFINED,
        *mount(folder(tmp_path / "runs", 0o777)),
        IMAGE,
        "sh",
        "-c",
        program,
    )
    assert done.returncode == 0 and done.stdout, done.stderr
