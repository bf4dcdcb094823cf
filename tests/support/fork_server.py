"""The process that has torch loaded and forks the ranks of `tests.support.ranks`.

It follows the orders of one connection. The pytest processes of `make test` share one start of
torch: `shared` starts a process that forks such a process for each connection.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from tests.support.commands import clean_environment
from tests.support.fork import run_and_exit
from tests.support.paths import ROOT

SHARED = "SHARED_FORKS"  # the variable with the address of the process of all workers
LAUNCHES = "tests.support.launches"
# What the command and torchrun import.
_OF_LAUNCHES = (
    "entrypoint.cli.planning",
    "entrypoint.cli.launching",
    "entrypoint.cli.training",
    "entrypoint.driver.nvml",
    "entrypoint.health.deep",
    "torch.distributed.run",
    "trainer.programs.ranks.rendezvous",
)


def start(orders: socket.socket, *words: str) -> "subprocess.Popen[bytes]":
    """Start the process; it reads orders on `orders`, or accepts connections if `shared`.

    On busy cores, the threads of a training would use most of their CPU time to wait actively for
    each other.
    """
    return subprocess.Popen(
        [sys.executable, "-m", __name__, *words],
        cwd=ROOT,
        env=clean_environment(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE"),
        stdin=orders,
    )


@contextlib.contextmanager
def shared() -> Iterator[dict[str, str]]:
    """Yield the variables for pytest processes that share one start of torch."""
    with (
        tempfile.TemporaryDirectory(prefix="forks-") as folder,
        socket.socket(socket.AF_UNIX) as listening,
    ):
        listening.bind(address := f"{folder}/socket")
        listening.listen()
        process = start(listening, "shared")
        try:
            yield {SHARED: address}
        finally:
            process.kill()
            process.wait()


class Server:
    """The orders of `ranks.Forks.ask`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fork(
        self,
        folder: str,
        job: str,
        module: str,
        words: Sequence[str],
        environments: Sequence[dict[str, str]],
    ) -> list[int]:
        """Start a command on each rank and return the process ids."""
        if words[0] == "sweep":
            from tests.support import sweep_forks

            sweep_forks.install()
        if module == LAUNCHES:
            for name in _OF_LAUNCHES:
                importlib.import_module(name)
        return [
            self._fork_rank(folder, job, rank, module, words, environment)
            for rank, environment in enumerate(environments)
        ]

    def code(self, pid: int) -> int | None:
        """Return a rank's exit code, once; None while it runs."""
        ended, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None

    def _fork_rank(
        self,
        folder: str,
        job: str,
        rank: int,
        module: str,
        words: Sequence[str],
        environment: dict[str, str],
    ) -> int:
        if (pid := os.fork()) == 0:
            try:
                from trainbox.processes.process_tree import die_with_parent

                die_with_parent()
                # A test gives a rank the files of another machine.
                os.chdir(Path(folder, environment.get("OTHER_FOLDER", ".")))
                os.environ.update(environment)
                for number in (0, self._connection.fileno()):
                    os.dup2(os.open(os.devnull, os.O_RDONLY), number)
                for number, name in ((1, "out"), (2, "err")):
                    file = os.open(f"{job}/{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                    os.dup2(file, number)
            except BaseException:  # noqa: BLE001 - a fork must not return into the server
                traceback.print_exc()
                os._exit(1)
            run_and_exit(module, words)
        return pid


def load_all() -> None:
    """Import all that a training imports, so that no fork has to."""
    for name in (
        "multiprocessing.synchronize",
        "PIL.GifImagePlugin",
        "PIL.JpegImagePlugin",
        "PIL.PngImagePlugin",
        "sklearn.datasets",
        "tensorboard.plugins.custom_scalar.summary",
        "tensorboard.plugins.hparams.metadata",
        "torch._dynamo",
        "torch.utils._sympy.reference",
        "torch.utils.serialization",
        "trainer.cli.commands",
        "trainer.parallel.fsdp",
        "trainer.records.event_file",
        "trainer.use.evaluate",
        "trainer.use.predict",
        "trainer.session.verify",
    ):
        importlib.import_module(name)
    from trainer.system.sources import loaded_sources

    loaded_sources()  # looks at each module's file, and remembers the libraries'
    gc.freeze()  # a collection in a fork would look at all of these modules, and copy them


def _reap(*_: object) -> None:
    """Wait for ended children. If SIGCHLD was ignored, no parent would count their CPU time."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _accept(listening: socket.socket) -> socket.socket:
    """Return a connection, in a fork of its own; load torch for the first one."""
    from trainbox.processes.process_tree import die_with_parent

    signal.signal(signal.SIGCHLD, _reap)
    die_with_parent()
    while True:
        connection, _ = listening.accept()
        load_all()
        with connection:
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                die_with_parent()
                listening.close()
                return socket.socket(fileno=connection.detach())


def _serve(connection: socket.socket) -> NoReturn:
    """Follow the orders until the other end is closed."""
    faulthandler.enable()  # a crash writes its stack to the rank's own `err`
    load_all()
    server = Server(connection)
    with connection.makefile() as orders:
        for line in orders:
            order, arguments = json.loads(line)
            answer = getattr(server, order)(**arguments)
            connection.sendall(json.dumps(answer).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    given = socket.socket(fileno=0)
    _serve(_accept(given) if sys.argv[1:] else given)
