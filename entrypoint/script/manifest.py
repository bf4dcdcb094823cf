"""What can affect a script's result: versions, machine, scheduler and arguments."""

import os
import platform
from collections.abc import Mapping
from typing import Any

from entrypoint.launch.plan import LaunchPlan
from entrypoint.script.python import ask, python_of_path
from entrypoint.script.target import Target
from trainbox.disclosure.secret_rule import arguments_without_secrets, shown_variable
from trainbox.files.build_info import build_info

SCHEDULER = "SLURM_"  # the variables of the scheduler
SOFTWARE = ("python", "packages", "build", "image_digest")  # the entries about it


def describe(target: Target, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the manifest of a new run as JSON values. `env` is the user's environment.

    For another program, such as a shell script, this is the Python that the program finds in PATH.

    Raises:
        WrongUse: the script is not valid Python.
    """
    python = target.python or python_of_path(env)
    script = target.name if target.python and not target.is_module else None
    version, packages = ask(python, env, script) if python else (None, {})
    return {
        "run_id": os.urandom(8).hex(),
        "kind": "script",
        "script": target.name,
        "arguments": arguments_without_secrets(target.arguments),
        "sources": {},
        "revision": None,
        "build": build_info(env),
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
    """Return the manifest's entry of one start; `processes` counts only the first node."""
    return {
        "time_unix_s": round(begin_unix_s, 3),
        "arguments": arguments_without_secrets(target.arguments),
        "reason": plan.reason,
        "nodes": plan.nnodes,
        "processes": plan.nproc_per_node,
        "gpus": [
            {"index": gpu.label, "uuid": gpu.uuid, "name": gpu.name, "memory_mib": gpu.memory_mib}
            for gpu in plan.gpus
        ],
        "scheduler": {
            name: shown_variable(name, value)
            for name, value in sorted(env.items())
            if name.startswith(SCHEDULER)
        },
    }


def is_manifest(value: Mapping[str, Any]) -> bool:
    """Return whether `value` has the form of a manifest of a script, to which a start is added."""
    return isinstance(value.get("sources"), dict) and isinstance(value.get("starts"), list)
