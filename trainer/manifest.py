"""What is run, on what: all that can change a bit or explain one."""

import ast
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from trainer.batches import length, read_examples
from trainer.digest import value_digest
from trainer.distributed import Process
from trainer.task import Task

_PACKAGES = ("trainbox", "torch", "torchvision", "numpy", "tensorboard", "safetensors")
# Read by the libraries that compute; a name of these that is set belongs to the run.
_ENVIRONMENT = (
    "ATEN_",
    "ONEDNN_",
    "DNNL_",
    "MKL_",
    "OMP_",
    "KMP_",
    "CUBLAS_",
    "CUDNN_",
    "NVIDIA_TF32",
    "NCCL_",
    "TORCH_",
    "PYTORCH_",
    "PYTHONHASHSEED",
)
_OWN_FOLDERS = (Path(__file__).resolve().parent, Path(__file__).resolve().parents[1] / "trainbox")
_SAMPLED_EXAMPLES = 16
_WHOLE_BYTES = 2**30  # a larger set in memory would hold a start up for seconds: every so-many-th example of it counts


def describe(
    process: Process,
    task: Task,
    argv: list[str],
    settings: Mapping[str, Any],
    data_digests: Mapping[str, str],
) -> dict[str, Any]:
    """The manifest of a run about to start, as primitives for JSON."""
    return {
        "argv": argv,
        "plan": {
            "reason": os.environ.get("TRAINBOX_REASON"),
            "strategy": process.strategy,
            "world_size": process.world_size,
        },
        "settings": dict(settings),
        "build": _build(),
        "image_digest": os.environ.get("TRAINBOX_IMAGE_DIGEST"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "device": _device(process),
        "machine": {
            "system": platform.platform(),
            "cpu_model": _cpu_model(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
        "threads": torch.get_num_threads(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_ENVIRONMENT)},
        "task_source_sha256": _source_digest(type(task)),
        "data": dict(data_digests),
    }


def sampled_examples(dataset: Dataset[Any], workers: int) -> list[Any]:
    """Some examples spread over the dataset, as batches of one; none where it is held in memory."""
    if isinstance(dataset, TensorDataset):
        return []
    count = length(dataset)
    indices = sorted({count * i // _SAMPLED_EXAMPLES for i in range(_SAMPLED_EXAMPLES)}) if count else []
    return read_examples(dataset, 0, indices, workers)


def dataset_digest(dataset: Dataset[Any], examples: list[Any]) -> str:
    """sha256 of the content: of all of it where it is held in memory, else of the length and of `sampled_examples`."""
    if isinstance(dataset, TensorDataset):
        tensors = dataset.tensors
        every = -(-sum(tensor.nbytes for tensor in tensors) // _WHOLE_BYTES)
        return value_digest([len(tensors[0]), tuple(tensor[:: max(1, every)] for tensor in tensors)])
    return value_digest([length(dataset), examples])


def revision() -> str:
    """The commit that runs; unknown where neither the image nor git tells."""
    return str(_build().get("revision") or "unknown")


@functools.cache  # a sweep's worker asks for each trial
def _build() -> dict[str, Any]:
    """Revision and lock digest: baked into the image, else asked of git beside this file."""
    if baked := os.environ.get("TRAINBOX_BUILD_INFO"):
        try:
            info = json.loads(Path(baked).read_text(encoding="utf-8"))
            assert isinstance(info, dict)
            return info
        except (OSError, ValueError):
            pass
    root = Path(__file__).parent.parent
    lock = root / "requirements.lock"
    diff = _git(root, "diff", "HEAD")
    return {
        "revision": _git(root, "rev-parse", "HEAD"),
        "dirty_diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else None,
        "lock_sha256": hashlib.sha256(lock.read_bytes()).hexdigest() if lock.exists() else None,
    }


def _git(root: Path, *words: str) -> str | None:
    try:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@functools.cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _source_digest(cls: type) -> str:
    """Of the files that define the task's class and those of its bases that are tasks' own, and of what they import nearby."""
    modules = {c.__module__ for c in cls.__mro__ if issubclass(c, Task)} - {"trainer.task"}
    found: set[Path] = set()
    for name in modules:
        if file := inspect.getsourcefile(sys.modules[name]):
            path = Path(file).resolve()
            _add_with_neighbours(path, path.parents[min(name.count("."), len(path.parents) - 1)], found)
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(found))).hexdigest()


def _add_with_neighbours(path: Path, root: Path, found: set[Path]) -> None:
    """Add the file at `path`, and the files below `root` that it imports, wherever in it; Trainbox's own have a revision."""
    found.add(path)
    for node in ast.walk(ast.parse(path.read_bytes())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.ImportFrom):
            near = (
                path.parents[node.level - 1].relative_to(root) if path.parents[node.level - 1].is_relative_to(root) else Path()
            )
            inner = [*near.parts, *(node.module.split(".") if node.module else [])]
            names = [".".join(inner), *(".".join([*inner, alias.name]) for alias in node.names)]
        for name in names:
            place = root.joinpath(*name.split("."))
            for file in (place.with_suffix(".py"), place / "__init__.py"):
                if file not in found and file.is_file() and not any(map(file.is_relative_to, _OWN_FOLDERS)):
                    _add_with_neighbours(file, root, found)


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _device(process: Process) -> dict[str, Any]:
    if process.device.type != "cuda":
        return {"type": process.device.type}
    own = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    driver = Path("/proc/driver/nvidia/version")
    return {
        "type": "cuda",
        "names": sorted({gpu.name for gpu in own}),
        "uuids": [str(gpu.uuid) for gpu in own],
        "compute_capability": f"{own[0].major}.{own[0].minor}",
        "driver": driver.read_text(encoding="utf-8").splitlines()[0] if driver.exists() else None,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
