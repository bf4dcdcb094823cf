"""What can affect a script's result: sources, versions, machine, scheduler and arguments."""

import hashlib
import json
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entrypoint.driver.gpus import Gpu
from entrypoint.launch.plan import LaunchPlan
from entrypoint.script.revision import revision
from entrypoint.script.target import Target
from trainbox.contract.energy import earlier_joules
from trainbox.contract.python_path import user_folders
from trainbox.contract.secret_rule import arguments_without_secrets, shown_variable

_SCHEDULER = "SLURM_"
_OF_PACKAGES = ("site-packages", "dist-packages")
_HEADERS = {key: re.compile(rf"^{key}: *(.+)$", re.MULTILINE) for key in ("Name", "Version")}


def describe(target: Target, sources: Mapping[str, str], env: Mapping[str, str]) -> dict[str, Any]:
    """Return the manifest of a run as JSON values. `env` is the user's environment."""
    return {
        "kind": "script",
        "script": target.name,
        "arguments": arguments_without_secrets(target.arguments),
        "sources": dict(sources),
        "revision": revision(target.file.absolute().parent),
        "build": _build(env) | {"extra_lock_sha256": _extra_lock_sha256()},
        "image_digest": env.get("TRAINBOX_IMAGE_DIGEST"),
        "python": platform.python_version(),
        "packages": dict(sorted(packages([*user_folders(env), *sys.path]).items())),
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


def changed_sources(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of the files whose content changed, in order."""
    return sorted(name for name in before.keys() & now.keys() if before[name] != now[name])


def project_folders(target: Target, search_path: Sequence[str]) -> list[Path]:
    """Return the folders from which the target imports its own modules.

    Some clusters put a folder of installed packages in PYTHONPATH. The manifest has the versions of
    packages, and to parse their files takes minutes.
    """
    first = Path.cwd() if target.is_module else target.file.absolute().parent
    own = [Path(entry) for entry in search_path if entry]
    return [first, *(folder for folder in own if folder.name not in _OF_PACKAGES)]


def packages(search_path: Sequence[str]) -> dict[str, str]:
    """Return the version of each package that is installed in a folder of `search_path`.

    importlib.metadata takes as long as the rest of a start: it parses the long descriptions of
    packages, and its own import loads the library for e-mail.
    """
    found: dict[str, str] = {}
    for folder in reversed(search_path):  # the first folder has precedence
        for path in Path(folder).glob("*.dist-info/METADATA"):
            headers = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
            name, version = (_HEADERS[key].search(headers) for key in ("Name", "Version"))
            if name and version:
                found[name[1].strip()] = version[1].strip()
    return found


def _gpu(gpu: Gpu) -> dict[str, Any]:
    return {
        "index": gpu.label,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "memory_mib": gpu.memory_mib,
    }


def _build(env: Mapping[str, str]) -> dict[str, Any]:
    try:
        build = json.loads(Path(env.get("TRAINBOX_BUILD_INFO", "")).read_bytes())
    except (OSError, ValueError):
        return {}
    return build if isinstance(build, dict) else {}


def _extra_lock_sha256() -> str | None:
    """Return the digest of the lock of added packages (`make build REQUIREMENTS=my.txt`)."""
    try:
        return hashlib.sha256((Path(sys.prefix) / "extra.lock").read_bytes()).hexdigest()
    except OSError:
        return None
