"""How the running code was built, as manifests record it."""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainbox.contract.files import read_object


def build_info(env: Mapping[str, str]) -> dict[str, Any]:
    """Return what the image has recorded at its build, and the digest of the added packages' lock.

    `make build REQUIREMENTS=my.txt` copies my.lock into the environment.
    """
    lock = Path(sys.prefix) / "extra.lock"
    digest = hashlib.sha256(lock.read_bytes()).hexdigest() if lock.exists() else None
    try:
        built = read_object(Path(env.get("TRAINBOX_BUILD_INFO", "")))
    except (OSError, ValueError):  # outside of the image
        built = {}
    return built | {"extra_lock_sha256": digest}
