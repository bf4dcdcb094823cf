"""Ranks without a launcher: forked from a process that has torch loaded, which is most of a small
training's time.

Each is `python -m trainer`, with the variables that torchrun gives it.
"""

import faulthandler
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.commands import clean_environment


@dataclass
class EndedRanks:
    """A command that has ended on each rank; `out` is the first one's, the only one that speaks."""

    codes: list[int]
    out: str
    errs: list[str]


class Ranks:
    """Runs `python -m trainer` on several processes by --strategy fsdp, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._forks = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=Path(__file__).parents[2],
            env=clean_environment(OMP_NUM_THREADS="1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(
        self, processes: int, *words: str, env: Mapping[str, str] | None = None
    ) -> EndedRanks:
        assert self._forks.stdin and self._forks.stdout
        store = self.folder / "store"
        store.unlink(missing_ok=True)
        variables = {
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "TRAINBOX_STRATEGY": "fsdp",
            "TRAINBOX_STORE": str(store),
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            **(env or {}),
        }
        print(
            json.dumps([str(self.folder), processes, variables, words]),
            file=self._forks.stdin,
            flush=True,
        )
        codes = json.loads(self._forks.stdout.readline())
        out, *errs = (
            (self.folder / name).read_text()
            for name in ("out-0", *(f"err-{rank}" for rank in range(processes)))
        )
        return EndedRanks(codes, out, errs)

    def close(self) -> None:
        """Ranks that still run die with it."""
        self._forks.kill()
        self._forks.communicate()


def _serve() -> None:
    faulthandler.enable()  # a crash shows where, in the rank's own `err`
    import torch._dynamo  # noqa: F401 - fully_shard would load it in each rank

    import trainer.parallel.fsdp  # noqa: F401

    for line in sys.stdin:
        folder, processes, variables, words = json.loads(line)
        pids = [_fork(rank, folder, variables, words) for rank in range(processes)]
        print(
            json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]),
            flush=True,
        )


def _fork(rank: int, folder: str, variables: dict[str, Any], words: list[str]) -> int:
    if pid := os.fork():
        return pid
    try:
        os.chdir(folder)
        os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv = ["trainer", *words]
        runpy.run_module("trainer", run_name="__main__")
    finally:
        os._exit(1)  # it ends by itself
    return 0


if __name__ == "__main__":
    _serve()
