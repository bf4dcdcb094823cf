"""The output of a running training: lines, the progress bar, the rank's log and heartbeat."""

import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from trainbox.files.regular_files import append_regular
from trainbox.processes.streams import printable
from trainer.data.schedule import Schedule
from trainer.records.quiet import Quiet

_LINE_EVERY_S, _BEAT_EVERY_S = 10.0, 5.0
_SHORT_S = 2.0  # a shorter validation or rehearsal has no bar
T = TypeVar("T")
_BAR = "{desc}{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"
_REHEARSAL_BAR = "{desc}{percentage:3.0f}% |{bar}| {n}/{total} parts [{elapsed}]"
_VALIDATION_BAR = "{desc}{percentage:3.0f}% |{bar}| {n}/{total} batches [{elapsed}<{remaining}]"


class Console:
    """The terminal and the log file of one rank, which prints only if `prints` is true."""

    def __init__(self, log: Path, prints: bool, hang_minutes: float | None = None) -> None:
        """Open `log`, which also receives this process's warnings and tracebacks.

        A training without progress for `hang_minutes` is ended.

        Raises:
            OSError: The log cannot be written.
        """
        self._prints, self._unwritten = prints, ""
        # A bar is shown only on a terminal. Without one, all calls of a bar do nothing.
        self._has_bars = prints and sys.stderr.isatty()
        self._new_bar: Callable[..., tqdm[Any]] = functools.partial(
            tqdm, dynamic_ncols=True, disable=not self._has_bars
        )
        self._bar = self._new_bar(disable=True)
        self._timer: threading.Timer | None = None
        self._batch_size, self._last_line_at = 0, 0.0
        heartbeat = os.environ.get("TRAINBOX_HEARTBEAT")
        self._heartbeat = Path(heartbeat) if heartbeat and prints else None
        self._beat_at = 0.0
        self._quiet = Quiet(hang_minutes, self.report)
        self._log = append_regular(log)
        logging.raiseExceptions = False  # a full disk is reported once, and not for each record
        self._handler = logging.StreamHandler(self._log)
        self._handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
        )
        logging.getLogger().addHandler(self._handler)

    def report(self, text: str) -> None:
        """Print a line on the terminal and write it to the log."""
        self.show(text)
        self._log.write(self._unwritten)
        self._unwritten = ""

    def show(self, text: str) -> None:
        """Print a line on the terminal. It is in the log from the next `report` on.

        A run that is refused has reported nothing, and leaves no folder.
        """
        if self._prints:
            text = printable(text, keep="\n\t")  # the text may come from another node
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()
            self._unwritten += text + "\n"

    def start_bar(self, step: int, schedule: Schedule) -> None:
        """Show a progress bar from `step` on, if standard error is a terminal."""
        self._batch_size = schedule.batch_size
        self._bar = self._new_bar(
            initial=step * schedule.batch_size,
            total=schedule.total_steps * schedule.batch_size,
            unit=" samples",
            unit_scale=True,
            bar_format=_BAR,
        )

    def start_rehearsal_bar(self, parts: int) -> None:
        """Show a bar of the `parts` of a rehearsal, if it takes more than 2 seconds."""
        self._batch_size = 1
        self._bar = self._new_bar(
            desc="rehearsal  ", total=parts, bar_format=_REHEARSAL_BAR, delay=_SHORT_S, leave=False
        )
        # The first part alone may take longer.
        self._timer = threading.Timer(_SHORT_S, self._bar.refresh)
        self._timer.daemon = True
        self._timer.start()

    def validation_bar(self, batches: Iterable[T], count: int) -> Iterable[T]:
        """Return the `count` batches, with a second progress bar while they are read.

        The bar appears if standard error is a terminal and the batches take more than 2 seconds.
        """
        counted = self._counted(batches)
        if not self._has_bars:
            return counted
        return self._new_bar(
            counted,
            "validation  ",
            total=count,
            bar_format=_VALIDATION_BAR,
            delay=_SHORT_S,
            leave=False,
        )

    def _counted(self, batches: Iterable[T]) -> Iterator[T]:
        for batch in batches:
            self._progress()
            yield batch

    def count_step(self) -> None:
        """Move the bar by one step, or by one part of a rehearsal."""
        self._bar.update(self._batch_size)
        self._progress()

    def report_progress(self, line: str, speed: str) -> None:
        """Show `line` on the bar. Without a bar, print `line` and `speed` every 10 seconds."""
        if not self._bar.disable:
            self._bar.set_description_str(line + "  ", refresh=False)
        elif time.monotonic() - self._last_line_at > _LINE_EVERY_S:
            self._last_line_at = time.monotonic()
            self.report(line + speed)

    def look(self) -> None:
        """Report a training without progress. Another thread calls this every few seconds.

        Until the first step, nobody knows how long the data and the model take.
        """
        if not self._quiet.has_begun:
            self._beat()
        if self._prints:
            self._quiet.look()

    def _progress(self) -> None:
        self._quiet.progress()
        self._beat()

    def _beat(self) -> None:
        """Write the heartbeat file. Its age is for the image's health check.

        Its content is for `trainbox health --live`: a clock that somebody sets must not end a
        training, or keep it alive.
        """
        if self._heartbeat is not None and time.monotonic() > self._beat_at:
            self._beat_at = time.monotonic() + _BEAT_EVERY_S
            with contextlib.suppress(OSError):
                self._heartbeat.write_text(f"{time.monotonic():.0f}\n", encoding="utf-8")

    def end_bar(self) -> None:
        """Close the bar. `report` still works."""
        if self._timer is not None:
            self._timer.cancel()
        self._bar.close()

    def close(self) -> None:
        """Close the bar and the log."""
        self.end_bar()
        logging.getLogger().removeHandler(self._handler)
        self._log.close()
