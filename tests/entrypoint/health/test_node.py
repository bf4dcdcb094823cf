"""The node as an unprivileged user sees it, and its InfiniBand."""

import subprocess
import sys
from pathlib import Path

from entrypoint.health.node import judge_infiniband
from entrypoint.system.infiniband import InfiniBand
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


def test_infiniband_without_its_library_is_a_warning() -> None:
    devices = {"mlx5_0": "InfiniBand"}
    assert judge_infiniband(InfiniBand()) == []
    (good,) = judge_infiniband(InfiniBand(devices=devices))
    assert (good.check, good.result) == ("infiniband", "PASS")
    (bad,) = judge_infiniband(InfiniBand(devices=devices, fault="libibverbs.so.1: not found"))
    assert bad.line == (
        "node: infiniband WARN: NCCL between nodes: TCP instead of InfiniBand (mlx5_0): "
        "libibverbs.so.1: not found; limit: its library loads (NCCL) -> install_infiniband: "
        "install libibverbs1 and ibverbs-providers (Debian, Ubuntu), or use the image, which has "
        "them"
    )
