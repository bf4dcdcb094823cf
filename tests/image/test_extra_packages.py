"""`make build REQUIREMENTS=my.txt` and `docker compose build`: packages beside the locked ones."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import IMAGE, Checkout, Docker, make_build
from .test_image import SHORT, folder, mount

pytestmark = [pytest.mark.image, pytest.mark.timeout(900)]

# The packages with their versions, and the files of torch with their sizes and dates.
CONTENT = """
import hashlib, importlib.metadata, importlib.util, json, pathlib
site = pathlib.Path(importlib.util.find_spec("torch").origin).parents[1]
files = sorted(
    (str(path), stat.st_size, stat.st_mtime_ns)
    for path in site.glob("torch*/**/*") for stat in [path.lstat()]
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


def test_a_package_is_added_and_torch_is_unchanged(
    docker: Docker, checkout: Checkout, tmp_path: Path
) -> None:
    extra, composed = "trainbox-test-extra", "trainbox-test-composed"
    (checkout.path / "my.txt").write_text("einops==0.8.2\nnumpy\ntorch>=2.1\n")
    try:
        seconds = make_build(checkout.path, extra, REQUIREMENTS="my.txt")
        print(f"\nmake build REQUIREMENTS=my.txt: {seconds:.1f} s")
        before, files, torch = content(docker, IMAGE)
        assert content(docker, extra) == [before | {"einops": "0.8.2"}, files, torch]
        assert files > 5000
        same = [a == b for a, b in zip(layers(docker, IMAGE), layers(docker, extra), strict=True)]
        assert same.index(False) >= 4, "the packages of requirements.lock are not built again"

        lock = (checkout.path / "my.lock").read_bytes()
        assert b"\neinops==0.8.2 " in lock and b"\ntorch==" not in lock and b"http" not in lock
        runs = folder(tmp_path / "runs", 0o777)
        done = docker("run", "--rm", "--user", "12345", *mount(runs), extra, *SHORT)
        assert done.returncode == 0, done.stderr
        build = json.loads((runs / "r/manifest.json").read_text())["build"]
        assert build["extra_lock_sha256"] == hashlib.sha256(lock).hexdigest()

        built = checkout.compose("build", "train", IMAGE=composed, REQUIREMENTS="my.txt")
        assert built.returncode == 0, built.stderr
        assert docker("run", "--rm", composed, "python", "-c", "import einops").returncode == 0
        assert (checkout.path / "my.lock").read_bytes() == lock
    finally:
        docker("image", "rm", extra, composed)


def test_a_requirement_that_moves_torch_is_refused(checkout: Checkout) -> None:
    (checkout.path / "my.txt").write_text("einops==0.8.2\ntorch==2.0\n")
    done = checkout.run("make", "build", "REQUIREMENTS=my.txt")
    assert done.returncode == 2, done.stderr
    assert "torch==2.0 needs torch 2.0.0, but requirements.lock has torch 2." in done.stderr
    assert "Error 2" in done.stderr and "Traceback" not in done.stderr
    assert not (checkout.path / "my.lock").exists()
    built = checkout.compose("build", "train", IMAGE="trainbox-test-none", REQUIREMENTS="my.txt")
    assert built.returncode != 0
    assert "my.lock does not exist: run make lock REQUIREMENTS=my.txt" in built.stdout
