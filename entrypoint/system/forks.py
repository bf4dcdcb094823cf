"""One of Trainbox's modules in this process or in a fork, which starts sooner than a new Python."""

import contextlib
import gc
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import NoReturn

_HOME = str(Path(__file__).resolve().parents[2])


class ForkedModule:
    """`python -P -m MODULE ARGUMENTS` in a fork, with pipes as its standard input and output.

    The fork runs the module as a program of its own and never returns into its parent's code. It
    meets its parent only at the arguments, the environment, the two pipes and its exit code. The
    parent does not import the module.

    Attributes:
        returncode: the exit code, or the negative number of the signal that ended the fork. Set by
            `communicate`.
    """

    returncode: int

    def __init__(self, module: str, *arguments: str) -> None:
        """Fork. Only a program without threads may fork."""
        read_input, self._input = os.pipe()
        self._output, write_output = os.pipe()
        gc.freeze()  # no collection, here or in the fork, visits what is imported so far
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._input)
            os.close(self._output)
            _run(module, arguments, read_input, write_output)
        os.close(read_input)
        os.close(write_output)

    def communicate(self, text: str) -> str:
        """Write the short `text` as the only input, wait for the end, and return the output."""
        with contextlib.suppress(BrokenPipeError):  # the fork has ended without its input
            os.write(self._input, text.encode())
        os.close(self._input)
        with os.fdopen(self._output, encoding="utf-8", errors="replace") as output:
            printed = output.read()
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return printed


def _run(module: str, arguments: tuple[str, ...], stdin: int, stdout: int) -> NoReturn:
    """Become the process of `module` with these standard streams."""
    try:
        for number, end in enumerate((stdin, stdout)):
            os.dup2(end, number)
            os.close(end)
        # The old streams may have text that the parent has not written yet.
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        become(module, *arguments)
    finally:
        os._exit(1)  # the parent's code must not see an error


def become(module: str, *arguments: str) -> NoReturn:
    """Run `python -P -m MODULE ARGUMENTS` as the rest of this process, and exit with its code."""
    try:
        sys.argv = [module, *arguments]
        if not sys.flags.safe_path:
            # `python -m` puts the current folder here, and the module removes it.
            sys.path.insert(0, _HOME)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)
    except BaseException:  # noqa: BLE001 - the parent's code must not see it
        sys.excepthook(*sys.exc_info())
    os._exit(1)
