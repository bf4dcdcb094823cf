"""Forks that run a module, instead of processes that start Python and import torch again."""

import fcntl
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

_PATH = sys.path[1:]  # without the current folder, and before a command puts it in order
_HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_HANDLED += (signal.SIGXCPU, signal.SIGVTALRM)


class Fork:
    """A forked process, with the part of `subprocess.Popen` that launchers and sweeps use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end and return the exit code; raise TimeoutExpired after `timeout` s."""
        if timeout is None:
            return self._wait(0)
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"the fork {self.pid}", timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class ForkWithOutput(Fork):
    """A fork whose output is read at its end, from two files in memory."""

    stdout = stderr = None  # the pipes of a Popen

    def __init__(self, pid: int, files: Sequence[int]) -> None:
        super().__init__(pid)
        self._files = files

    def communicate(self, timeout: float) -> tuple[bytes, ...]:
        """Wait for the end and return the output; raise TimeoutExpired after `timeout` s."""
        self.wait(timeout)
        return tuple(os.pread(file, os.fstat(file).st_size, 0) for file in self._files)


def fork_with_output(
    args: Sequence[str],
    env: Mapping[str, str],
    start_new_session: bool,
    preexec_fn: Callable[[], None] | None,
    **_pipes: int,
) -> ForkWithOutput:
    """Fork for the command `python -m MODULE ARGUMENTS` and keep its output."""
    out, err = files = [os.memfd_create("output") for _ in ("out", "err")]
    for file in files:
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # the ranks write at the same time
    fork = fork_python(
        args,
        env,
        stdout=out,
        stderr=err,
        start_new_session=start_new_session,
        preexec_fn=preexec_fn,
    )
    return ForkWithOutput(fork.pid, files)


def fork_python(
    args: Sequence[str],
    env: Mapping[str, str],
    cwd: str | None = None,
    stdin: int | None = None,
    stdout: IO[str] | int | None = None,
    stderr: int | None = None,
    start_new_session: bool = False,
    preexec_fn: Callable[[], None] | None = None,
) -> Fork:
    """Fork for the command `python -m MODULE ARGUMENTS`, as `subprocess.Popen` starts it.

    The fork has the input of this process, which is empty.
    """
    module, *words = args[args.index("-m") + 1 :]
    sys.stdout.flush()
    sys.stderr.flush()
    if (pid := os.fork()) == 0:
        # A program starts without its parent's handlers.
        for number in _HANDLED:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if start_new_session:
            os.setsid()
        if preexec_fn:
            preexec_fn()
        if cwd:
            os.chdir(cwd)
        if stdout is not None:
            os.dup2(stdout if isinstance(stdout, int) else stdout.fileno(), 1)
        if stderr is not None:
            os.dup2(1 if stderr == subprocess.STDOUT else stderr, 2)
        os.environ.clear()
        os.environ.update(env)
        given = env.get("PYTHONPATH")
        sys.path[:] = [str(Path.cwd()), *(given.split(os.pathsep) if given else ()), *_PATH]
        import torch  # not at the top, since each pytest worker imports this file

        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))  # as an import of torch does
        run_and_exit(module, words)
    return Fork(pid)


def run_and_exit(module: str, words: Sequence[str]) -> NoReturn:
    """Run `python -m MODULE ARGUMENTS` in this fork, and end it."""
    try:
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - a fork must not return into its parent's code
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
