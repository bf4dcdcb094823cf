"""Describe how a worker process ended, for the message of its trial. Pure."""

import re
import signal

_LAST_LINES, _LAST_CHARACTERS = 3, 300


def exit_cause(code: int, process: str = "its process") -> str:
    """Return how the process with this exit code ended; a negative code is a signal."""
    if code >= 0:
        return f"{process} exited with code {code}"
    known = -code in list(signal.Signals)
    return f"{process} was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


def last_output(output: str) -> str:
    """Return where a process crashed and its last lines, to be appended to a message.

    The text is empty if the process printed nothing. Of Python's crash report (faulthandler) it
    keeps the innermost frame outside of the libraries, and drops the list of extension modules.
    """
    printed, crashed, report = output.rpartition("Fatal Python error: ")
    printed = printed if crashed else output
    frames = re.findall(r'File "(.+)", line (\d+) in (.+)', report) if crashed else []
    own = [frame for frame in frames if "/lib/python" not in frame[0]]
    where = ""
    if frames:
        file, line, function = (own or frames)[0]
        where = f" in {function} ({file}, line {line})"
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    text = " | ".join(lines[-_LAST_LINES:])[-_LAST_CHARACTERS:]
    # Binary output would change the terminal, and a database refuses a zero byte.
    text = "".join(character if character.isprintable() else "?" for character in text)
    return where + (f"; its last lines: {text}" if text else "")
