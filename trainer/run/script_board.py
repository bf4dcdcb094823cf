"""Show the metrics.jsonl of a script's run in TensorBoard.

The command is `python -m trainer.run.script_board METRICS`, with the path of the file. The
process follows the file until its standard input ends, and then writes what is left. It records how
far it has copied the file, so that the next start of a killed run copies the rest.
"""

import contextlib
import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainbox.contract.entries import EntryReader, step_of
from trainbox.contract.files import replacing
from trainbox.contract.processes import die_with_parent
from trainer.run.gpu_events import show_events
from trainer.run.jsonl import numbers

if TYPE_CHECKING:
    from trainer.run.event_file import EventFile

_LOOK_EVERY_S = 5.0
# TensorBoard cannot store a name that is not Unicode, or a time that is not a number.
_NOT_STORED = (ValueError, OverflowError, TypeError)
_COPIED = ".copied"  # the number of bytes of metrics.jsonl that TensorBoard's files have


class Follower:
    """Copies the entries of metrics.jsonl that are not copied yet to TensorBoard."""

    def __init__(self, metrics: Path) -> None:
        self._folder = metrics.parent / "tensorboard"
        try:
            copied = int((self._folder / _COPIED).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            copied = 0
        self._reader = EntryReader(metrics, copied)
        self._file: EventFile | None = None

    def look(self) -> None:
        """Copy the new entries."""
        events: dict[int, list[dict[str, Any]]] = {}
        for entry in self._reader.read():
            if self._file is None:
                from trainer.run.event_file import EventFile  # takes half a second

                self._file = EventFile(self._folder)
            if (step := step_of(entry)) is None:
                continue
            if entry.get("kind") == "health":
                events.setdefault(step, []).append(entry)
            else:
                with contextlib.suppress(*_NOT_STORED):
                    self._file.scalars(numbers(entry), step, entry.get("time_unix_s"))
        for step, found in events.items():
            with contextlib.suppress(*_NOT_STORED):
                show_events(self._file, found, step)  # type: ignore[arg-type]
        if self._file is not None:
            with contextlib.suppress(OSError), replacing(self._folder / _COPIED) as file:
                file.write(str(self._reader.position).encode())

    def close(self) -> None:
        """Copy what is left and close TensorBoard's file."""
        self.look()
        if self._file is not None:
            self._file.close()


def main() -> None:
    """Follow the file until standard input ends."""
    die_with_parent()
    follower = Follower(Path(sys.argv[1]))
    while not select.select([sys.stdin], [], [], _LOOK_EVERY_S)[0]:
        follower.look()
    follower.close()


if __name__ == "__main__":
    main()
