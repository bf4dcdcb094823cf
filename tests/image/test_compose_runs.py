"""Training, resume and TensorBoard by `make train` and `docker compose`, with the CPU files."""

import http.client
import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.support.commands import logged, wait_until

from .conftest import ROOT, Checkout, Docker, unique_name
from .test_image import assert_whole, steps_of

pytestmark = pytest.mark.image


def owners(run: Path) -> set[tuple[int, int]]:
    """Return the (uid, gid) of all files of a run."""
    return {(path.stat().st_uid, path.stat().st_gid) for path in [run, *run.rglob("*")]}


def test_make_train_is_stopped_resumed_and_verified(checkout: Checkout) -> None:
    """After SIGTERM, `make` without a terminal saves a checkpoint and reports code 75.

    The same command then finishes the run.
    """
    train = ["make", "train", "ARGS=--run r --epochs 12", "RUN_IN=docker-cpu"]
    printed = ""
    with checkout.start(*train) as making:
        assert making.stdout
        for line in making.stdout:
            printed += line
            if "epoch 2:" in line:
                making.send_signal(signal.SIGTERM)
    assert making.returncode != 0 and "Error 75" in printed, printed
    left = checkout.compose("ps", "--all", "--quiet", "train")
    assert left.stdout == "", "the container is gone"
    run = checkout.path / "runs" / "r"
    step = assert_whole(run)
    assert 44 <= step < 12 * 22

    again = checkout.run(*train)
    assert again.returncode == 0, again.stdout + again.stderr
    assert steps_of(run)[-1] == 12 * 22
    assert (run / "model.safetensors").exists()
    assert owners(checkout.path / "runs") == {(os.getuid(), os.getgid())}
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["image_digest"].startswith("sha256:") and manifest["build"]["lock_sha256"]

    same_image = f"IMAGE={manifest['image_digest']}"
    verified = checkout.run(
        *("make", "verify", "RUN=runs/r", "RUN_IN=docker-cpu", "ARGS=--steps 44", same_image)
    )
    assert "SAME BITS: runs/r" in verified.stdout, verified.stdout + verified.stderr
    assert "image_digest" not in verified.stdout


def test_make_reports_the_exit_code_and_mounts_the_folder_of_a_task(checkout: Checkout) -> None:
    mine = checkout.path / "examples"
    mine.mkdir()
    shutil.copy(ROOT / "trainer" / "tasks" / "digits.py", mine / "mine.py")
    done = checkout.run(
        "make", "train", "RUN_IN=docker-cpu", "TASK=examples/mine.py:Digits", "TRAINBOX_MAX_STEPS=5"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    done = checkout.run("make", "plan", "RUN_IN=docker-cpu", "TASK=digitz")
    assert done.returncode == 2 and "Error 2" in done.stderr, done.stderr
    done = checkout.run("make", "train", "RUN_IN=docker-cpu", "GPUS=2")
    assert "Error 3" in done.stderr, done.stderr


def test_compose_up_trains_as_any_uid(checkout: Checkout) -> None:
    """The folders do not exist, and the uid has no user; the outputs still belong to this uid."""
    settings = {"UID": "12345", "GID": "23456", "ARGS": "--run r --max-steps 30"}
    done = checkout.compose("up", "--exit-code-from", "train", "train", **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    run = checkout.path / "runs" / "r"
    assert assert_whole(run) == 30
    assert owners(run) == {(12345, 23456)}


def test_compose_up_does_not_take_over_a_folder_of_another_user(checkout: Checkout) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder to someone else")
    runs = checkout.path / "runs"
    runs.mkdir()
    os.chown(runs, 777, 777)
    settings = {"UID": "12345", "GID": "12345", "ARGS": "--run r --max-steps 5"}
    done = checkout.compose("up", "--exit-code-from", "train", "train", **settings)
    assert done.returncode == 4, done.stdout + done.stderr
    assert (runs.stat().st_uid, runs.stat().st_gid) == (777, 777)


def test_compose_stop_saves_a_checkpoint(checkout: Checkout, docker: Docker) -> None:
    settings = {"ARGS": "--run r --epochs 200"}
    assert checkout.compose("up", "--detach", "train", **settings).returncode == 0
    with checkout.start("docker", "compose", "logs", "--follow", "train") as logs:
        assert logs.stdout
        assert any("epoch 1:" in line for line in logs.stdout)
        start = time.monotonic()
        assert checkout.compose("stop", "train", **settings).returncode == 0
        print(f"\nstopped in {time.monotonic() - start:.1f} s")
    state = json.loads(docker("inspect", f"{checkout.env['COMPOSE_PROJECT_NAME']}-train-1").stdout)[
        0
    ]["State"]
    assert state["ExitCode"] == 75 and not state["OOMKilled"]
    assert assert_whole(checkout.path / "runs" / "r") >= 22


def test_a_script_of_another_folder_runs(checkout: Checkout) -> None:
    """The project is read-only. The script downloads to ./data and to ../data, as many do."""
    project = checkout.path.parent / "project"
    shutil.copytree(ROOT / "tests/support/own_project", project)
    settings = {"PROJECT_DIR": str(project), "UID": "12345", "GID": "23456"}
    run = ("run", "--rm", "run", "--run", "r", "mnist/main.py", "--", "--epochs", "3")
    done = checkout.compose(*run, **settings)
    assert done.returncode == 9, done.stderr
    assert json.loads(done.stdout) == {
        "step": 1,
        "epochs": 3,
        "uid": 12345,
        "cwd": "/workspace/project",
        "error": "Read-only file system",
    }
    folder = checkout.path / "runs/r"
    assert (folder / "model").exists() and "starts" in (folder / "manifest.json").read_text()
    assert owners(folder) == {(12345, 23456)}
    made = [project / "data/images", checkout.path / "data/images"]
    assert {path.stat().st_uid for path in made} == {12345}
    assert sorted(path.name for path in project.iterdir()) == ["data", "mnist"]
    here = [f"RUNS_DIR={checkout.path}/mine", f"DATA_DIR={checkout.path}/mine"]
    again = checkout.run(
        "make", "run", "RUN_IN=docker-cpu", f"SCRIPT={project}/mnist/main.py", *here
    )
    assert "Error 9" in again.stderr, again.stderr
    assert json.loads(again.stdout)["cwd"] == "/workspace/project"
    assert (project / "mnist/data/images").exists() and (checkout.path / "mine/images").exists()


def test_docker_stop_lets_a_script_save_and_the_same_command_resumes(
    checkout: Checkout, docker: Docker
) -> None:
    """Two ranks. `docker stop` waits for the 60 s of the service."""
    project = shutil.copytree(ROOT / "examples/ddp", checkout.path.parent / "project")
    settings = {"PROJECT_DIR": str(project), "PROCESSES": "2"}
    command = ("run", "--run", "r", "train.py", "--", "--epochs", "20")
    name, run = unique_name(), checkout.path / "runs/r"
    started = checkout.compose("run", "--detach", "--name", name, *command, **settings)
    assert started.returncode == 0, started.stderr
    with checkout.start("docker", "logs", "--follow", name) as logs:
        wait_until(lambda: bool(logged(run, "train")), logs)
        assert docker("stop", name).returncode == 0
        assert logs.stdout
        printed = logs.stdout.read()
    shown = docker("inspect", "--format", "{{.State.ExitCode}} {{.Config.StopTimeout}}", name)
    assert shown.stdout.split() == ["75", "60"], printed
    assert "SIGTERM received" in printed and "Traceback" not in printed
    stopped_at = assert_whole(run)

    again = checkout.compose("run", "--rm", *command, **settings)
    assert again.returncode == 0, again.stderr
    assert again.stdout == "finished 2000 steps in /workspace/runs/r\n"
    steps = steps_of(run)
    assert 20 <= stopped_at < 2000 and steps == list(range(20, 2001, 20))
    starts = json.loads((run / "manifest.json").read_text())["starts"]
    assert [start["exit_code"] for start in starts] == [75, 0]


def fetch(port: str, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


def test_tensorboard_shows_the_run(checkout: Checkout) -> None:
    done = checkout.compose("run", "--rm", "train", "train", "--run", "r", "--max-steps", "30")
    assert done.returncode == 0, done.stdout + done.stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = checkout.compose("up", "--detach", "tensorboard", TENSORBOARD_PORT=port)
    assert done.returncode == 0, done.stderr
    published = checkout.compose("port", "tensorboard", "6006", TENSORBOARD_PORT=port).stdout
    assert published.strip() == f"127.0.0.1:{port}"
    with checkout.start("docker", "compose", "logs", "--follow", "tensorboard") as logs:
        assert logs.stdout
        assert any("TensorBoard" in line and "http" in line for line in logs.stdout)
        logs.terminate()
    end = time.monotonic() + 60
    while not (runs := json.loads(fetch(port, "/data/runs"))):
        assert time.monotonic() < end, "TensorBoard found no run"
        time.sleep(0.2)
    assert any(run.startswith("r") for run in runs), runs
