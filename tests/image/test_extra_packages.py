"""`make build REQUIREMENTS=my.txt` and `docker compose build`: packages beside the locked ones.

The examples that need such packages run in this image.
"""

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import IMAGE, ROOT, Checkout, Docker, make_build
from .test_image import SHORT, folder, mount, steps_of

pytestmark = pytest.mark.image

EXTRA, COMPOSED = "trainbox-test-extra", "trainbox-test-composed"
REQUIREMENTS = "lightning==2.6.6\naccelerate==1.15.0\nnumpy\ntorch>=2.1\n"

# The packages with their versions, and the files of torch with their sizes and dates.
CONTENT = """
import hashlib, importlib.metadata, importlib.util, json, pathlib
site = pathlib.Path(importlib.util.find_spec("torch").origin).parents[1]
files = sorted(
    (str(path), stat.st_size, stat.st_mtime_ns)
    for path in site.glob("torch*/**/*") for stat in [path.lstat()]
    if not path.relative_to(site).parts[0].startswith("torchmetrics")  # an added package
)
versions = {found.name: found.version for found in importlib.metadata.distributions()}
digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
print(json.dumps([versions, len(files), digest]))
"""


def content(docker: Docker, image: str) -> list[Any]:
    done = docker("run", "--rm", "--read-only", "--tmpfs", "/tmp", image, "python", "-c", CONTENT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return found


def layers(docker: Docker, image: str) -> list[str]:
    done = docker("image", "inspect", image, "--format", "{{json .RootFS.Layers}}")
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return found


@pytest.fixture(scope="module")
def folder_of_extra(image: str, tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the image EXTRA, which is removed at the end; return the folder with my.lock."""
    folder = tmp_path_factory.mktemp("extra") / "checkout"
    shutil.copytree(tree, folder)
    (folder / "my.txt").write_text(REQUIREMENTS)
    seconds = make_build(folder, EXTRA, REQUIREMENTS="my.txt")
    print(f"\nmake build REQUIREMENTS=my.txt: {seconds:.1f} s")
    return folder


@pytest.fixture(scope="module", autouse=True)
def remove_images() -> Iterator[None]:
    yield
    subprocess.run(["docker", "image", "rm", "--force", EXTRA, COMPOSED], capture_output=True)


@pytest.fixture
def extra(checkout: Checkout, folder_of_extra: Path) -> Checkout:
    """Return a checkout with my.txt and my.lock, whose image is EXTRA."""
    for name in ("my.txt", "my.lock"):
        shutil.copy(folder_of_extra / name, checkout.path)
    checkout.env["IMAGE"] = EXTRA
    return checkout


def pins(lock: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([^ ;]+)", lock, re.MULTILINE))


def test_packages_are_added_and_torch_is_unchanged(
    docker: Docker, folder_of_extra: Path, tmp_path: Path
) -> None:
    before, files, torch = content(docker, IMAGE)
    after, *torch_after = content(docker, EXTRA)
    assert torch_after == [files, torch] and files > 5000
    assert after.items() > before.items()
    assert (after["lightning"], after["accelerate"]) == ("2.6.6", "1.15.0")
    same = [a == b for a, b in zip(layers(docker, IMAGE), layers(docker, EXTRA), strict=True)]
    assert same.index(False) >= 4, "the packages of requirements.lock are not built again"

    lock = (folder_of_extra / "my.lock").read_text()
    locked = {name.replace("_", "-").lower(): version for name, version in pins(lock).items()}
    added = {name.replace("_", "-").lower(): after[name] for name in after.keys() - before.keys()}
    assert locked.items() >= added.items() and "torch" not in locked and "://" not in lock
    runs = folder(tmp_path / "runs", 0o777)
    done = docker("run", "--rm", "--user", "12345", *mount(runs), EXTRA, *SHORT)
    assert done.returncode == 0, done.stderr
    assert lock_of(runs / "r") == hashlib.sha256(lock.encode()).hexdigest()


def lock_of(run: Path) -> str | None:
    build = json.loads((run / "manifest.json").read_text())["build"]
    digest: str | None = build["extra_lock_sha256"]
    return digest


def test_compose_builds_with_the_same_lock(extra: Checkout, docker: Docker) -> None:
    lock = (extra.path / "my.lock").read_bytes()
    built = extra.compose("build", "train", IMAGE=COMPOSED, REQUIREMENTS="my.txt")
    assert built.returncode == 0, built.stderr
    assert docker("run", "--rm", COMPOSED, "python", "-c", "import accelerate").returncode == 0
    assert (extra.path / "my.lock").read_bytes() == lock


@pytest.mark.parametrize(
    ("name", "steps", "written"),
    [
        ("lightning", [8, 16, 24], "checkpoints/last.ckpt"),
        ("accelerate", [16, 32, 48], "checkpoints/step-00000048.pt"),
    ],
)
def test_a_framework_trains_on_two_processes_and_resumes_after_a_kill(
    extra: Checkout, name: str, steps: list[int], written: str
) -> None:
    project = shutil.copytree(ROOT / "examples" / name, extra.path.parent / "project")
    script = (f"PROJECT_DIR={project}", "SCRIPT=train.py", "RUN_IN=docker-cpu")
    building = ("BUILD=1", "REQUIREMENTS=my.txt", "PROCESSES=2")
    done = extra.run("make", "run", *script, *building, "RUN_OPTIONS=--run r", "ARGS=--epochs 3")
    assert done.returncode == 0, done.stdout + done.stderr
    run = extra.path / "runs/r"
    assert steps_of(run) == steps and (run / written).exists() and (run / "model.pt").exists()
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    assert lock_of(run) == hashlib.sha256((extra.path / "my.lock").read_bytes()).hexdigest()

    options = "RUN_OPTIONS=--compare model.pt"
    done = extra.run("make", "drill", *script, "BUILD=0", options, "ARGS=--epochs 100")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r" SIGKILL at step \d+, SIGTERM at \d+ ", done.stdout), done.stdout
    assert "  the same bits in all 2 trainings: " in done.stdout


def test_a_requirement_that_moves_torch_is_refused(checkout: Checkout) -> None:
    (checkout.path / "my.txt").write_text("einops==0.8.2\ntorch==2.0\n")
    done = checkout.run("make", "build", "REQUIREMENTS=my.txt")
    assert done.returncode == 2, done.stderr
    assert "you require torch==2.0 and torch==2." in done.stderr
    assert "Error 2" in done.stderr and "Traceback" not in done.stderr
    assert not (checkout.path / "my.lock").exists()
    built = checkout.compose("build", "train", IMAGE="trainbox-test-none", REQUIREMENTS="my.txt")
    assert built.returncode != 0
    assert "my.lock does not exist: run make lock REQUIREMENTS=my.txt" in built.stdout
