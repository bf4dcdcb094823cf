"""What can affect a script's result: versions, machine, scheduler and arguments."""

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrypoint.driver.gpus import Gpu
from entrypoint.launch.plan import LaunchPlan
from entrypoint.script.python import installed, python_of_path
from entrypoint.script.target import Target
from entrypoint.system.revision import image_build
from trainbox.contract.energy import earlier_joules
from trainbox.contract.secret_rule import arguments_without_secrets, shown_variable

_SCHEDULER = "SLURM_"


def describe(target: Target, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the manifest of a new run as JSON values. `env` is the user's environment.

    For another program, such as a shell script, this is the Python that the program finds in PATH.
    """
    python = target.python or python_of_path(env)
    version, packages = installed(python, env) if python else (None, {})
    return {
        "run_id": os.urandom(8).hex(),
        "kind": "script",
        "script": target.name,
        "arguments": arguments_without_secrets(target.arguments),
        "sources": {},
        "revision": None,
        "build": image_build(env) | {"extra_lock_sha256": _extra_lock_sha256()},
        "image_digest": env.get("TRAINBOX_IMAGE_DIGEST"),
        "python": version,
        "interpreter": {"path": python.command[0], "from": python.origin} if python else None,
        "packages": packages,
        "machine": {"system": platform.platform(), "host": platform.node()},
        "starts": [],
    }


def describe_start(
    plan: LaunchPlan, target: Target, env: Mapping[str, str], begin_unix_s: float
) -> dict[str, Any]:
    """Return the entry of one start in the manifest.

    `processes` are those of all nodes, if each node has the same number.
    """
    return {
        "time_unix_s": round(begin_unix_s, 3),
        "arguments": arguments_without_secrets(target.arguments),
        "reason": plan.reason,
        "processes": plan.nnodes * plan.nproc_per_node,
        "gpus": [_gpu(gpu) for gpu in plan.gpus],
        "scheduler": {
            name: shown_variable(name, value)
            for name, value in sorted(env.items())
            if name.startswith(_SCHEDULER)
        },
    }


def is_manifest(value: Mapping[str, Any]) -> bool:
    """Return whether `value` has the form of a manifest of a script, to which a start is added."""
    try:
        earlier_joules(value)
    except ValueError:
        return False
    return isinstance(value.get("sources"), dict) and isinstance(value.get("starts"), list)


def _gpu(gpu: Gpu) -> dict[str, Any]:
    return {
        "index": gpu.label,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "memory_mib": gpu.memory_mib,
    }


def _extra_lock_sha256() -> str | None:
    """Return the digest of the lock of added packages (`make build REQUIREMENTS=my.txt`)."""
    try:
        return hashlib.sha256((Path(sys.prefix) / "extra.lock").read_bytes()).hexdigest()
    except OSError:
        return None
