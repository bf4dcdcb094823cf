"""Files of torch.save and safetensors, and what has only their name."""

import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.kinds import slow_but
from tests.support.unsafe_pickle import MakesFolder
from trainbox.tensor_files import read_tensor_file

_WEIGHTS = {"w": torch.arange(3.0)}
_DAMAGED = "it is damaged, or torch.save did not write it"


def _truncated(path: Path) -> None:
    torch.save(_WEIGHTS, path)
    path.write_bytes(path.read_bytes()[:-100])


def _program(path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), path)


def _other_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/b", "x")


@pytest.mark.parametrize("mapped", [False, True])
def test_tensors_are_read(tmp_path: Path, mapped: bool) -> None:
    torch.save(_WEIGHTS, tmp_path / "a.pt")
    save_file(_WEIGHTS, tmp_path / "a.safetensors")
    for name in ("a.pt", "a.safetensors"):
        assert read_tensor_file(tmp_path / name, mapped)["w"].equal(_WEIGHTS["w"])


def test_a_path_that_is_not_unicode_is_read(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"L\xe4ufe")
    folder.mkdir()
    torch.save(_WEIGHTS, folder / "w.pt")
    assert read_tensor_file(folder / "w.pt", mapped=True)["w"].equal(_WEIGHTS["w"])


# fmt: off
_NAMES = [
    ("a.pt", lambda path: torch.save(Namespace(), path),
     "it has an object of argparse.Namespace, and only tensors, numbers and texts are read"),
    ("a.pt", lambda path: torch.save({"x": MakesFolder(path / "../ran")}, path),
     "it has an object of posix.mkdir, and only tensors, numbers and texts are read"),
    ("a.pt", _program,
     "it has a program of TorchScript, and only tensors, numbers and texts are read"),
    ("a.pt", lambda path: path.write_bytes(pickle.dumps(MakesFolder(path))), _DAMAGED),
    ("a.pt", _truncated, _DAMAGED),
    ("a.pt", _other_zip, _DAMAGED),
    ("a.pt", lambda path: path.write_text("the weights of a model\n"), _DAMAGED),
    ("a.pt", Path.touch, _DAMAGED),
    ("a.safetensors", lambda path: torch.save(_WEIGHTS, path),
     "it is damaged, or not a safetensors file"),
    ("a.safetensors", Path.touch, "it is damaged, or not a safetensors file"),
]
# fmt: on


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("name", "write", "reason"), _NAMES)
def test_another_file_is_an_error_with_our_reason_and_runs_nothing(
    tmp_path: Path, name: str, write: Callable[[Path], object], reason: str, mapped: bool
) -> None:
    write(tmp_path / name)
    with pytest.raises(ValueError, match=f"^{reason}$"):
        read_tensor_file(tmp_path / name, mapped)
    assert [path.name for path in tmp_path.iterdir()] == [name]


# In a process of its own, since a long test run has free memory that the limit does not count.
_READ_IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from trainbox.tensor_files import read_tensor_file

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**25, resource.RLIM_INFINITY))
try:
    read_tensor_file(Path(sys.argv[1]), sys.argv[2] == "True")
except MemoryError as error:
    print(error)
"""


@pytest.mark.parametrize("mapped", slow_but([True], [False, True]))
def test_a_file_that_does_not_fit_in_memory_is_not_damaged(tmp_path: Path, mapped: bool) -> None:
    path = tmp_path / "a.pt"
    torch.save(torch.zeros(2**24), path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", _READ_IN_LITTLE_MEMORY, path, str(mapped)],
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == (f"{path} does not fit in memory\n", "")


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Path.mkdir, "not a regular file"),
        (os.mkfifo, "not a regular file"),
        (lambda path: None, "No such file or directory"),
    ],
)
def test_what_is_not_a_file_is_an_error_of_the_system(
    tmp_path: Path, name: str, make: Callable[[Path], object], reason: str
) -> None:
    make(tmp_path / name)
    with pytest.raises(OSError, match=reason):
        read_tensor_file(tmp_path / name)
