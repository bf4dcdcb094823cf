"""Start the command `trainbox`, and let no module of a user's PYTHONPATH replace one of ours.

Python finds this module before sys.path is in order. Its long name avoids that a module of the user
with the same name is found first.
"""

# A part of the interpreter, which no module of a user can replace.
import _signal  # type: ignore[import-not-found]
import os
import site
import sys

# Ctrl-C ends the imports below without a traceback. The command sets Python's handler again.
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

_HOME = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - a user may have pathlib
_LIBRARY = os.path.dirname(os.__file__)  # noqa: PTH120


def main() -> None:
    """Put sys.path in order, let our own processes inherit it, and run the command.

    When Python exits, it removes its signal handlers. From then on, a late signal, such as a second
    Ctrl-C, would replace the exit code by 128 + N. So stop signals are ignored at the end.
    """
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of the program, or with -m the current one
    given = os.environ.get("PYTHONPATH")
    theirs = {_absolute(folder) for folder in given.split(os.pathsep)} if given else set()
    sys.path.sort(key=lambda folder: _turn(folder, theirs))  # stable
    from trainbox.processes.environment import own_environment
    from trainbox.processes.process_tree import ignore_stop_signals

    os.environ |= own_environment(os.environ)
    from entrypoint.cli.commands import main as command

    try:
        command()
    finally:
        ignore_stop_signals()


def _turn(folder: str, theirs: set[str]) -> int:
    """Return the place of a folder in sys.path, from 0 for the first one to 3 for the last one.

    The order: Python's library, Trainbox, installed packages, the folders of PYTHONPATH (`theirs`).
    """
    if folder in (_LIBRARY, f"{_LIBRARY}/lib-dynload"):
        return 0
    if folder == _HOME:
        return 1
    return 3 if folder in theirs and folder not in site.getsitepackages() else 2


def _absolute(folder: str) -> str:
    try:
        return os.path.abspath(folder)  # noqa: PTH100
    except FileNotFoundError:  # the current folder was removed
        return folder
