"""deploy/image/unneeded.txt: the files that the image leaves out."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/image"
KERNEL = ROOT / "tests/support/triton_kernel.py"
LINES = (FOLDER / "unneeded.txt").read_text().splitlines()
PATTERNS = [line.split()[0] for line in LINES if line and not line.startswith("#")]
SITE = Path(sysconfig.get_paths()["purelib"])

# The test environment has the packages of requirements.lock, as the image does.
needs_cuda_wheels = pytest.mark.skipif(
    not (SITE / "nvidia/nccl").is_dir(), reason="torch is installed without CUDA"
)


def remove(site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [FOLDER / "remove-unneeded.sh", site], capture_output=True, text=True, check=False
    )


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a stand-in for site-packages: each path of the list, and one more beside it."""
    for pattern in PATTERNS:
        path = tmp_path / pattern.replace("*", "-any")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        (path.parent / "needed").touch()
    return tmp_path


def test_the_paths_of_the_list_are_removed_and_no_others(site: Path) -> None:
    done = remove(site)
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in site.rglob("*") if path.is_file()} == {"needed"}


def test_a_path_that_does_not_exist_fails_the_build(site: Path) -> None:
    pattern = PATTERNS[-1]
    (site / pattern.replace("*", "-any")).unlink()
    done = remove(site)
    assert done.returncode == 1
    assert done.stderr == (
        f"remove-unneeded.sh: {pattern} does not exist in {site}: "
        f"correct {FOLDER / 'unneeded.txt'}\n"
    )


@needs_cuda_wheels
def test_the_locked_packages_have_each_path() -> None:
    locked = re.search(r"^torch==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert locked and importlib.metadata.version("torch").startswith(locked[1])
    missing = [pattern for pattern in PATTERNS if not list(SITE.glob(pattern))]
    assert missing == [], "correct the list for the new version"


@needs_cuda_wheels
def test_no_remaining_library_is_linked_with_a_removed_library() -> None:
    """Compare the names in the dynamic section of each library of torch, NVIDIA and triton."""
    if not (readelf := shutil.which("readelf")):
        pytest.skip("no readelf on PATH")
    libraries = {
        path
        for package in ("torch", "nvidia", "triton")
        for pattern in ("*.so", "*.so.*")
        for path in (SITE / package).rglob(pattern)
    }
    roots = {path for pattern in PATTERNS for path in SITE.glob(pattern)}
    removed = {path for path in libraries if roots & {path, *path.parents}}
    stay = libraries - removed
    assert removed and stay
    read = subprocess.run(
        [readelf, "--dynamic", *stay], capture_output=True, text=True, check=True
    ).stdout
    linked = set(re.findall(r"\(NEEDED\).*\[(.*)\]", read))
    assert "libcusparse.so.12" in linked
    assert linked & {path.name for path in removed} <= {path.name for path in stay}


@needs_cuda_wheels
def test_triton_compiles_for_a_gpu_without_the_removed_files(tmp_path: Path) -> None:
    """Compile a kernel to the code of an H100, on a copy of triton: this needs no GPU."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    for folder in ("triton", "nvidia", "torch/bin"):  # links to the files of the test environment
        shutil.copytree(SITE / folder, tmp_path / folder, copy_function=os.symlink)
    assert remove(tmp_path).returncode == 0
    done = subprocess.run(
        [sys.executable, "-P", KERNEL],
        env={"PYTHONPATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"{tmp_path}/triton/__init__.py True\n", done.stderr
