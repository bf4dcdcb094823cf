"""Report the failure with which this process exits."""

import contextlib
import logging
import os
from pathlib import Path
from typing import NoReturn

from trainbox.errors import Failure
from trainbox.processes.environment import Internal
from trainbox.processes.streams import message


def report_failure(failure: Failure) -> None:
    """Print the failure to standard error, or write it to the file of this rank.

    The launcher reads the files, and prints the same failure of several ranks once.
    """
    if folder := os.environ.get(Internal.MESSAGES):
        with contextlib.suppress(OSError):  # a cleaner of temporary files may have removed it
            Path(folder, os.environ["RANK"]).write_text(
                str(failure), encoding="utf-8", errors="backslashreplace"
            )
            return
    message(str(failure))


def end_with(failure: Failure) -> NoReturn:
    """Report the failure and end this process, whose main thread hangs. Call it in a thread."""
    logging.getLogger(__name__).error(str(failure))
    report_failure(failure)
    logging.shutdown()
    os._exit(failure.exit_code)
