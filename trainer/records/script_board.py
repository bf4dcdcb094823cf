"""Show the metrics.jsonl of a script's run in TensorBoard.

The command is `python -m trainer.records.script_board METRICS BYTES`, with the path of the file and
its size before the run. The process follows the file until its standard input ends, and then writes
what is left.
"""

import json
import select
import sys
from pathlib import Path

from trainer.records.tensorboard import EntryLog
from trainer.system.processes import die_with_parent

_LOOK_EVERY_S = 5.0


class Follower:
    """Copies the entries of metrics.jsonl after `seen_bytes` to TensorBoard."""

    def __init__(self, metrics: Path, seen_bytes: int) -> None:
        self._metrics, self._seen_bytes = metrics, seen_bytes
        self._log: EntryLog | None = None

    def look(self) -> None:
        """Copy the complete lines that are new. Lines that are not an object are skipped."""
        try:
            with self._metrics.open("rb") as file:
                file.seek(self._seen_bytes)
                whole, end, _part = file.read().rpartition(b"\n")
        except OSError:  # nothing is reported yet, or the script has removed the folder
            return
        self._seen_bytes += len(whole + end)
        for line in whole.split(b"\n"):
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                self._log = self._log or EntryLog(self._metrics.parent / "tensorboard")
                self._log.write(entry)
        if self._log is not None:
            self._log.flush()

    def close(self) -> None:
        """Copy what is left and close TensorBoard's file."""
        self.look()
        if self._log is not None:
            self._log.close()


def main() -> None:
    """Follow the file until standard input ends."""
    die_with_parent()
    follower = Follower(Path(sys.argv[1]), int(sys.argv[2]))
    while not select.select([sys.stdin], [], [], _LOOK_EVERY_S)[0]:
        follower.look()
    follower.close()


if __name__ == "__main__":
    main()
