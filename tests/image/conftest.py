"""The image, built on BASE_IMAGE (default: the Dockerfile's own), and a checkout that uses it."""

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGE = "trainbox-test"
NAMES = ["Makefile", "Dockerfile", ".dockerignore", "docker-compose.yml", "docker-compose.cpu.yml"]
NAMES += ["docker-compose.infiniband.yml"]
NAMES += [
    "pyproject.toml",
    "requirements.lock",
    "requirements-dev.lock",
    "deploy/extra",
    "deploy/development.mk",
    "deploy/host.py",
    "deploy/image",
    "entrypoint",
    "trainbox",
    "trainbox_start.py",
    "trainer",
]

Done = subprocess.CompletedProcess[str]
Docker = Callable[..., Done]


@dataclass(frozen=True)
class Checkout:
    """A copy of the files that a user has, with its own environment and Compose project."""

    path: Path
    env: dict[str, str]

    def run(self, *words: str, **settings: str) -> Done:
        """Run a command to its end, without a terminal."""
        return subprocess.run(
            words,
            cwd=self.path,
            env={**self.env, **settings},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def start(self, *words: str, **settings: str) -> subprocess.Popen[str]:
        """Start a command in its own session, with both outputs in one pipe."""
        return subprocess.Popen(
            words,
            cwd=self.path,
            env={**self.env, **settings},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def compose(self, *words: str, **settings: str) -> Done:
        """Run `docker compose` with the CPU file."""
        files = ("-f", "docker-compose.yml", "-f", "docker-compose.cpu.yml")
        return self.run("docker", "compose", *files, *words, **settings)


def copy_tree(to: Path) -> Path:
    """Copy the files of NAMES into the folder `to`."""
    for name in NAMES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, to / name)
    return to


def make_build(tree: Path, image: str, **settings: str) -> float:
    """Run `make build` and return the seconds that it took."""
    start = time.monotonic()
    done = subprocess.run(
        ["make", "build", f"IMAGE={image}"],
        cwd=tree,
        env={**os.environ, "BUILDKIT_PROGRESS": "plain", **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return time.monotonic() - start


def engine_answers(**env: str) -> bool:
    """Return whether `docker info` succeeds."""
    if not shutil.which("docker"):
        return False
    asked = subprocess.run(
        ["docker", "info"], env={**os.environ, **env}, capture_output=True, check=False
    )
    return asked.returncode == 0


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the working tree and commit it, so that the image has a revision.

    Each worker of pytest does this. With a fixed date, the revision is the same for all of them,
    and so is the image.
    """
    made = copy_tree(tmp_path_factory.mktemp("tree"))
    date = "2000-01-01T00:00:00Z"
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "tested"]):
        subprocess.run(
            ["git", "-c", "user.name=test", "-c", "user.email=test@test", *words],
            cwd=made,
            env=os.environ | {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date},
            check=True,
        )
    return made


@pytest.fixture(scope="session")
def image(tree: Path) -> str:
    """Build the image and return its name; skip the test if no Docker engine answers."""
    if not engine_answers():
        pytest.skip("no Docker engine answers: `docker info` fails or docker is not on PATH")
    print(f"\nmake build: {make_build(tree, IMAGE):.1f} s")
    return IMAGE


@pytest.fixture
def docker(image: str) -> Iterator[Docker]:
    """Run `docker`; the containers that a test names are removed at its end."""
    names: list[str] = []

    def run(*words: str) -> Done:
        if "--name" in words:
            names.append(words[words.index("--name") + 1])
        return subprocess.run(
            ["docker", *words],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    yield run
    if names:
        subprocess.run(["docker", "rm", "--force", *names], capture_output=True, check=False)


@pytest.fixture
def checkout(image: str, tree: Path, tmp_path: Path) -> Iterator[Checkout]:
    """Return a checkout whose containers run with the caller's uid by default."""
    kept = ("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONFIG", "BASE_IMAGE")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    env |= {
        "UID": str(os.getuid()),
        "GID": str(os.getgid()),
        "IMAGE": image,
        "COMPOSE_PROJECT_NAME": unique_name(),
    }
    env["PWD"] = str(tmp_path / "checkout")
    made = Checkout(shutil.copytree(tree, tmp_path / "checkout"), env)
    yield made
    down = made.compose(
        "--profile", "health", "down", "--volumes", "--remove-orphans", "--timeout", "1"
    )
    assert down.returncode == 0, down.stderr


def unique_name() -> str:
    return f"trainbox-test-{uuid.uuid4().hex[:8]}"
