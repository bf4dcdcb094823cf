"""Describe everything that can affect the bits of a run: settings, sources, data and machine."""

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from trainbox.disclosure.recorded_values import listed_changes, shown_arguments, shown_settings
from trainbox.disclosure.secret_rule import shown_variable
from trainbox.errors import WrongUse
from trainbox.files.build_info import build_info, git
from trainbox.processes.environment import launch_facts
from trainer.data.examples import Collate, length, read_examples
from trainer.parallel.strategy import Strategy
from trainer.parallel.world import World
from trainer.records.compare_runs import VARIABLES_OF_BITS, cannot_resume, manifest_differences
from trainer.records.digest import value_digest
from trainer.records.run_log import RunLog
from trainer.system.sources import loaded_sources

_PACKAGES = ("trainbox", "torch", "torchvision", "numpy", "tensorboard", "safetensors")
# Prefixes of the environment variables that affect computing libraries.
_ENVIRONMENT = (
    *VARIABLES_OF_BITS,
    "OMP_",
    "KMP_",
    "CUDA_MPS_",
    "NCCL_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "TRITON_",
    "PYTORCH_",
    "PYTHONHASHSEED",
)
# The value that `trainer.__main__` sets.
_OF_TRAINBOX = ("TORCH_DISABLE_NATIVE_JIT", "1")
# torch sets this folder when it imports its compiler.
_OF_TORCH = "TORCHINDUCTOR_CACHE_DIR"
_SAMPLED_EXAMPLES = 16
# Of a larger dataset in memory, only every n-th example is hashed: hashing all takes seconds.
_HASHED_BYTES = 2**30


def describe(
    strategy: Strategy,
    argv: list[str],
    settings: Mapping[str, Any],
    data_digests: Mapping[str, str],
    sources: Mapping[str, str],
) -> dict[str, Any]:
    """Return the manifest of a run that is about to start, as JSON values."""
    facts = launch_facts(os.environ)
    return {
        "argv": shown_arguments(argv),
        **({"config_file": facts.config_file} if facts.config_file else {}),
        "plan": {
            "reason": facts.reason or None,
            "strategy": strategy.name,
            "world_size": strategy.world.world_size,
        },
        "settings": shown_settings(settings),
        "build": _build(),
        "image_digest": os.environ.get("TRAINBOX_IMAGE_DIGEST"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "device": _device(strategy.world),
        "machine": {
            "system": platform.platform(),
            "cpu_model": _cpu_model(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
        "threads": torch.get_num_threads(),
        "environment": {
            name: shown_variable(name, value)
            for name, value in sorted(os.environ.items())
            if name.startswith(_ENVIRONMENT) and (name, value) != _OF_TRAINBOX and name != _OF_TORCH
        },
        "sources": dict(sorted(sources.items())),
        "data": dict(data_digests),
    }


class SourceRecord:
    """The source files that a run's manifest lists.

    Modules that are loaded after the start are compared with the list and added to it.
    """

    def __init__(self, run: RunLog, known: Mapping[str, str], anyway: bool) -> None:
        """Start with `known`, the files that the manifest lists.

        If `anyway` is true, a changed file is logged and not refused.
        """
        self._run, self._known, self._anyway = run, dict(known), anyway
        self._seen: set[str] = set()

    def newly_loaded(self) -> dict[str, str]:
        """Return the source files that this process has loaded since the last call."""
        found = {
            name: digest for name, digest in loaded_sources().items() if name not in self._seen
        }
        self._seen |= found.keys()
        return found

    def compare_and_add(self, found: Sequence[Mapping[str, str]]) -> None:
        """Compare the files that each rank has newly loaded, and add them to the manifest.

        `found` has one entry per rank, in the order of the ranks.

        Raises:
            Changed: A file has changed since the run was started.
            WrongUse: The processes have loaded different files.
        """
        known = len(self._known)
        old = {name: self._known[name] for name in found[0] if name in self._known}
        changed = manifest_differences({"sources": old}, {"sources": found[0]})
        if changed and not self._anyway:
            raise cannot_resume(self._run.path, changed)
        self._known |= found[0]
        for rank, others in enumerate(found):
            for name, digest in others.items():
                if self._known.setdefault(name, digest) != digest:
                    raise WrongUse(
                        f"the source file of module {name} differs between processes 0 and {rank}: "
                        "copy the same files to all machines"
                    )
        if self._run.writes and (changed or len(self._known) > known):
            self._write(changed)

    def _write(self, changed: Mapping[str, tuple[Any, Any]]) -> None:
        if (stored := self._run.folder.read_json("manifest.json")) is None:
            return  # the file was removed, which the next resume reports
        stored["sources"] = dict(sorted({**self._known, **stored.get("sources", {})}.items()))
        if changed:
            self._run.report(f"changed since the run's start: {listed_changes(changed)}")
            for start in stored.get("resumes", [])[-1:]:  # empty before the first checkpoint
                start["changed"] = {**start.get("changed", {}), **changed}
        self._run.folder.write_json("manifest.json", stored)


def dataset_digest(
    dataset: Dataset[Any], workers: int, collate: Collate
) -> tuple[str, dict[str, str]]:
    """Return the SHA-256, in hex, of the content of a dataset that is not empty.

    For a dataset in memory, this covers its tensors. For another dataset, it covers the length and
    examples spread over the dataset, each as a batch of one. The digests of the source files that
    read them follow.
    """
    if isinstance(dataset, TensorDataset):
        tensors = dataset.tensors
        every = max(1, -(-sum(tensor.nbytes for tensor in tensors) // _HASHED_BYTES))
        return value_digest([len(tensors[0]), tuple(tensor[::every] for tensor in tensors)]), {}
    count = length(dataset)
    indices = sorted({count * i // _SAMPLED_EXAMPLES for i in range(_SAMPLED_EXAMPLES)})
    examples, sources = read_examples(dataset, indices, workers, collate)
    return value_digest([count, examples]), sources


def revision() -> str:
    """Return the commit of the running code, or "unknown" outside of an image and of git."""
    return str(_build().get("revision") or "unknown")


@functools.cache  # a sweep's worker needs it for each trial
def _build() -> dict[str, Any]:
    """Return the revision and the digests of the lock files, from the image or from git."""
    built = build_info(os.environ)
    if "revision" in built:
        return built
    root = Path(__file__).parents[2]
    diff, lock = git(root, "diff", "HEAD"), root / "requirements.lock"
    return {
        "revision": git(root, "rev-parse", "HEAD"),
        "dirty_diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else None,
        "lock_sha256": hashlib.sha256(lock.read_bytes()).hexdigest() if lock.exists() else None,
        **built,
    }


@functools.cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None
    )


def cublas_version() -> str | None:
    """Return the version of cuBLAS that torch has loaded, or None if it is not known.

    torch has no function for it.
    """
    try:
        library = ctypes.CDLL(f"libcublas.so.{(torch.version.cuda or '').partition('.')[0]}")
    except OSError:
        return None
    parts = (ctypes.c_int * 3)()
    for index in range(3):  # cublasGetProperty numbers them: major, minor, patch
        address = ctypes.byref(parts, index * ctypes.sizeof(ctypes.c_int))
        if library.cublasGetProperty(index, address) != 0:
            return None
    return ".".join(map(str, parts))


def _device(world: World) -> dict[str, Any]:
    if world.device.type != "cuda":
        return {"type": world.device.type}
    own = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    driver = Path("/proc/driver/nvidia/version")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {
        "type": "cuda",
        "names": sorted({gpu.name for gpu in own}),
        "uuids": [str(gpu.uuid) for gpu in own],
        "compute_capability": f"{own[0].major}.{own[0].minor}",
        # CUDA's random numbers depend on this count. MPS can limit it, and some models vary.
        "multiprocessors": sorted({gpu.multi_processor_count for gpu in own}),
        "cublas": cublas_version(),
        "driver": driver.read_text(encoding="utf-8").splitlines()[0] if driver.exists() else None,
        "visible": visible and shown_variable("CUDA_VISIBLE_DEVICES", visible),
        "nccl": _nccl_version(),
    }


def _nccl_version() -> str | None:
    """Return the version of NCCL, or None if torch is built without it, as NVIDIA's for Jetson."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except AttributeError:
        return None
