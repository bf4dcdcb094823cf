"""Leases of processes that have ended."""

import json
import os
import time
from pathlib import Path

from trainbox.folders.lease import LEASE


def kill(run: Path, seconds_ago: float = 300) -> None:
    """Change the lease of a folder as if its process, on another machine, had been killed."""
    path = run / LEASE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"process": ""}))
    os.utime(path, (time.time() - seconds_ago,) * 2)
