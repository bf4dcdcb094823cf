"""The node as an unprivileged user sees it."""

import subprocess
import sys
from pathlib import Path

from tests.support.commands import clean_environment

# As root, drop the privileges after all imports, because the interpreter may be in root's home.
PROGRAM = """
import os, sys
from pathlib import Path
from entrypoint.health.node import read_node
if os.getuid() == 0:
    os.setuid(12345)
print(read_node(Path(sys.argv[1])).output_fault)
"""


def test_a_folder_for_runs_in_an_unreadable_folder(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "inner").mkdir(parents=True)
    closed.chmod(0)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, closed / "inner" / "runs"],
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    closed.chmod(0o700)
    assert done.stderr == ""
    assert "cannot be written by uid" in done.stdout
