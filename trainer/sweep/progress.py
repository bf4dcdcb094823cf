"""Show the progress of a whole sweep."""

import sys
import time

from tqdm import tqdm

_LINE_EVERY_S = 10.0


class SweepProgress:
    """One bar for the whole sweep; without a terminal, a line every few seconds."""

    def __init__(self, total: int, done: int) -> None:
        self._total, self._first, self._begin = total, done, time.monotonic()
        self._line_at = time.monotonic() + _LINE_EVERY_S
        self._bar = (
            tqdm(total=total, initial=done, unit=" trials", dynamic_ncols=True)
            if sys.stderr.isatty()
            else None
        )

    def show(self, done: int, running: int, failures: int) -> None:
        """Show these numbers of trials."""
        text = f"{running} running, {failures} failed"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)
        elif time.monotonic() > self._line_at:
            self._line_at = time.monotonic() + _LINE_EVERY_S
            speed = (done - self._first) / (time.monotonic() - self._begin)
            left = f", {(self._total - done) / speed:.0f} s left" if speed else ""
            self.log(
                f"{done} of {self._total} trials done, {text}, {60 * speed:.0f} per minute{left}"
            )

    def log(self, text: str) -> None:
        """Print the text in one line."""
        print_above_bar(" ".join(text.split()))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def print_above_bar(text: str) -> None:
    """Print the text to standard output, above the bar if there is one."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()
