"""Log which ranks of a user's program still run long after another one has exited.

torchrun ends the other ranks of a rank that fails. If a rank exits with code 0, torchrun waits for
the others without a limit, and they may wait for that rank.
"""

import os
import threading
import time
from collections.abc import Callable, Set
from pathlib import Path

from trainbox.processes.process_tree import children

_AFTER_S, _LOOK_EVERY_S = 60.0, 5.0


class EarlyExits:
    """The ranks of this node that have exited while others run."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._since_s: float | None = None
        self._reported: set[int] = set()

    def look(self, running: Set[int], now_s: float) -> str | None:
        """Return a message if a rank exited `_AFTER_S` ago, once for each set of exited ranks."""
        self._seen |= running
        exited = self._seen - running
        if not exited:
            self._since_s = None
        if not exited or not running or exited == self._reported:
            return None
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s < _AFTER_S:
            return None
        self._since_s, self._reported = None, exited
        return (
            f"{_names(exited)} exited, and {_names(running)} still "
            f"run{'' if len(running) > 1 else 's'}: if they wait for each other, the wait ends "
            "after the timeout of init_process_group(); see End in docs/guides/own-script.md"
        )


def watch_exits(log: Callable[[str], None]) -> None:
    """Start a thread that calls `log` with the messages of `EarlyExits`."""

    def watch() -> None:
        exits = EarlyExits()
        while True:
            if message := exits.look(running_ranks(), time.monotonic()):
                log(message)
            time.sleep(_LOOK_EVERY_S)

    threading.Thread(target=watch, name="early exits", daemon=True).start()


def running_ranks() -> set[int]:
    """Return the ranks that are children of this process, by their variable RANK."""
    found = set()
    for pid in children(os.getpid()):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has just exited
            continue
        found |= {
            int(each[5:]) for each in variables if each.startswith(b"RANK=") and each[5:].isdigit()
        }
    return found


def _names(ranks: Set[int]) -> str:
    """Return `rank 1` or `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
