"""What was run, on what: enough to explain a run later."""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from trainer.distributed import Process

_PACKAGES = ("trainbox", "torch", "torchvision", "numpy", "tensorboard", "safetensors")


def describe(process: Process, argv: list[str], shards: int | None, weights_digest: str) -> dict[str, Any]:
    """The manifest of a run about to start, as primitives for JSON."""
    return {
        "argv": argv,
        "plan": {
            "reason": os.environ.get("TRAINBOX_REASON"),
            "strategy": process.strategy,
            "world_size": process.world_size,
            "shards": shards,
        },
        "build": _build(),
        "image_digest": os.environ.get("TRAINBOX_IMAGE_DIGEST"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "device": _device(process),
        "machine": {"system": platform.platform(), "cpu_capability": torch.backends.cpu.get_cpu_capability()},
        "threads": torch.get_num_threads(),
        "initial_weights_sha256": weights_digest,
    }


def _build() -> dict[str, Any]:
    """Revision and lock digest: baked into the image, else asked of git beside this file."""
    if baked := os.environ.get("TRAINBOX_BUILD_INFO"):
        try:
            info = json.loads(Path(baked).read_text())
            assert isinstance(info, dict)
            return info
        except (OSError, ValueError):
            pass
    root = Path(__file__).parent.parent
    lock = root / "requirements.lock"
    return {
        "revision": _git(root, "rev-parse", "HEAD"),
        "dirty": bool(_git(root, "status", "--porcelain")),
        "lock_sha256": hashlib.sha256(lock.read_bytes()).hexdigest() if lock.exists() else None,
    }


def _git(root: Path, *words: str) -> str | None:
    try:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(process: Process) -> dict[str, Any]:
    if process.device.type != "cuda":
        return {"type": process.device.type}
    properties = torch.cuda.get_device_properties(process.device)
    return {
        "type": "cuda",
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
