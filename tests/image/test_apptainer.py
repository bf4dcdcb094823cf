"""The image in the real Apptainer, started by deploy/apptainer/trainbox.sh, as an ordinary user.

The image is a sandbox, which is a folder that is mounted like an image file. To pack a file takes
minutes.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .conftest import IMAGE, ROOT, Done
from .test_image import assert_whole, steps_of

pytestmark = pytest.mark.image

# As root, the tests start the containers as uid 1000.
CALLER = (1000, 1000) if os.getuid() == 0 else (os.getuid(), os.getgid())
DROPPED: dict[str, Any] = (
    {"user": CALLER[0], "group": CALLER[1], "extra_groups": []} if os.getuid() == 0 else {}
)


@pytest.fixture(scope="module")
def built(image: str) -> Iterator[Path]:
    """Convert the Docker image for Apptainer, in a folder that every user can enter."""
    if not shutil.which("apptainer"):
        pytest.skip("no apptainer on PATH")
    with tempfile.TemporaryDirectory(prefix="trainbox-apptainer-") as folder:
        Path(folder).chmod(0o755)
        made = Path(folder) / "trainbox.sif"
        build = [
            "apptainer",
            "build",
            "--disable-cache",
            "--sandbox",
            str(made),
            f"docker-daemon:{image}:latest",
        ]
        done = subprocess.run(build, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        made.chmod(0o755)
        yield made


@dataclass(frozen=True)
class Wrapper:
    """deploy/apptainer/trainbox.sh in a folder that belongs to the caller."""

    folder: Path
    env: dict[str, str]

    def start(self, *words: str, **settings: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [ROOT / "deploy/apptainer/trainbox.sh", *words],
            cwd=self.folder,
            env=self.env | settings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **DROPPED,
        )

    def __call__(self, *words: str, **settings: str) -> Done:
        process = self.start(*words, **settings)
        out, err = process.communicate()
        return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.fixture
def wrapper(built: Path) -> Iterator[Wrapper]:
    with tempfile.TemporaryDirectory(prefix="trainbox-apptainer-") as folder:
        os.chown(folder, *CALLER)
        yield Wrapper(
            Path(folder),
            {"PATH": os.environ["PATH"], "HOME": folder, "TMPDIR": folder, "SIF": str(built)},
        )


def test_a_training_runs_as_the_caller_with_the_same_bits_as_in_docker(
    wrapper: Wrapper, tmp_path: Path
) -> None:
    train = ["train", "--max-steps", "30", "--run", "r", "--threads", "1"]
    done = wrapper(*train)
    assert done.returncode == 0, done.stdout + done.stderr
    run = wrapper.folder / "runs/r"
    assert assert_whole(run) == 30
    made = [
        path
        for top in ("runs", "data")
        for path in [wrapper.folder / top, *(wrapper.folder / top).rglob("*")]
    ]
    assert {(path.stat().st_uid, path.stat().st_gid) for path in made} == {CALLER}

    tmp_path.chmod(0o777)
    mount = ["--user", "12345", "--volume", f"{tmp_path}:/workspace/runs"]
    docker = subprocess.run(
        ["docker", "run", "--rm", *mount, IMAGE, *train], capture_output=True, text=True
    )
    assert docker.returncode == 0, docker.stderr
    assert (run / "digests.jsonl").read_text() == (tmp_path / "r/digests.jsonl").read_text()
    built, of_docker = (
        json.loads((folder / "manifest.json").read_text())["build"]
        for folder in (run, tmp_path / "r")
    )
    assert built == of_docker and built["revision"] and built["lock_sha256"]


def test_only_runs_data_tmp_and_shm_can_be_written(wrapper: Wrapper) -> None:
    (wrapper.folder / "my_tasks").mkdir()
    os.chown(wrapper.folder / "my_tasks", *CALLER)
    program = """
import getpass, os, pathlib, tempfile
assert getpass.getuser() and pathlib.Path.home() == pathlib.Path("/tmp")
folders = "/ /workspace /workspace/my_tasks /opt/venv /opt/trainbox /etc /usr/bin"
for folder in folders.split():
    assert os.statvfs(folder).f_flag & os.ST_RDONLY, folder
for folder in ("/workspace/runs", "/workspace/data", "/tmp", "/dev/shm"):
    tempfile.TemporaryFile(dir=folder).close()
    assert os.statvfs(folder).f_blocks * os.statvfs(folder).f_frsize > 2**28, folder
assert os.getuid() == int(os.environ["SLURM_JOB_UID"])
assert set(os.listdir("/workspace")) == {"runs", "data", "my_tasks"}
assert not {"PYTHONPATH", "SECRET"} & os.environ.keys()
"""
    settings = {"SLURM_JOB_UID": str(CALLER[0]), "PYTHONPATH": "/nowhere", "SECRET": "s"}
    done = wrapper("python", "-c", program, **settings)
    assert done.returncode == 0, done.stderr


def test_arguments_and_settings_arrive_unchanged(wrapper: Wrapper) -> None:
    text = """it's "a" $HOME `id` \\ ü, b=c"""
    program = "import json, os, sys; print(json.dumps([sys.argv[1], os.environ['SET']]))"
    done = wrapper("python", "-c", program, text, SET=text)
    assert json.loads(done.stdout) == [text, text]


def test_exit_codes_and_a_plan_without_a_gpu(wrapper: Wrapper) -> None:
    assert json.loads(wrapper("plan").stdout)["gpus"] == []
    assert wrapper("train", "digitz").returncode == 2
    assert wrapper("train", GPUS="1").returncode == 3
    assert wrapper("bash", "-c", "exit 42").returncode == 42
    assert wrapper("bash", "-c", "kill -KILL $$").returncode == 137


def test_a_script_reads_its_project_and_writes_to_its_run(wrapper: Wrapper) -> None:
    shutil.copytree(ROOT / "tests/support/own_project", project := wrapper.folder / "project")
    for path in [project, *project.rglob("*")]:
        os.chown(path, *CALLER)
    settings = {"PROJECT_DIR": str(project)}
    done = wrapper("run", "--run", "r", "mnist/main.py", "--", "--epochs", "3", **settings)
    assert done.returncode == 9, done.stderr
    found = json.loads(done.stdout)
    assert (found["epochs"], found["uid"], found["error"]) == (
        3,
        CALLER[0],
        "Read-only file system",
    )
    assert (project / "data/images").exists() and (wrapper.folder / "data/images").exists()
    assert (wrapper.folder / "runs/r/model").exists()


@pytest.mark.parametrize(("number", "processes"), [(signal.SIGTERM, "2"), (signal.SIGUSR1, "1")])
def test_a_signal_saves_a_checkpoint_and_the_same_command_resumes(
    wrapper: Wrapper, number: signal.Signals, processes: str
) -> None:
    train = ["train", "--epochs", "4", "--run", "r"]
    with wrapper.start(*train, PROCESSES=processes) as training:
        assert training.stdout and training.stderr
        assert any("epoch 1:" in line for line in training.stdout), training.stderr.read()
        training.send_signal(number)
        training.stdout.read()
        errors = training.stderr.read()
    assert training.returncode == 75, errors
    assert f"{number.name} received" in errors and "Traceback" not in errors
    run = wrapper.folder / "runs/r"
    assert 22 <= assert_whole(run) < 4 * 22
    again = wrapper(*train, PROCESSES=processes)
    assert again.returncode == 0, again.stderr
    assert steps_of(run) == sorted(steps_of(run)) and steps_of(run)[-1] == 4 * 22
