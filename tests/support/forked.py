"""A `trainbox` that starts in milliseconds: a fork of a process that has already imported it.

Most of the time of a short command is the start of Python and its imports. A test of what a command
prints or decides does not need them. A test of signals or of the start uses a real start.
"""

import atexit
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.commands import Ended, Trainbox, clean_environment, quick


class CommandForks:
    """Runs `trainbox` in forks, one at a time.

    There is a server for each LD_LIBRARY_PATH, because the dynamic loader reads it only at the
    start of a program.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: dict[str | None, subprocess.Popen[str]] = {}

    def run(self, words: tuple[str, ...], folder: Path, env: Mapping[str, str]) -> Ended:
        """Run `trainbox` with the arguments `words` in `folder`; `env` is its whole environment."""
        server = self._server(env.get("LD_LIBRARY_PATH"))
        assert server.stdin and server.stdout
        print(json.dumps([words, str(folder), dict(env)]), file=server.stdin, flush=True)
        answer = server.stdout.readline()
        assert answer, "the process that forks has ended"
        # A character that is not UTF-8 must not fail here: the test shows the text.
        out, err = (self._output(server, name).read_text(errors="replace") for name in _STREAMS)
        return Ended(int(answer), out, err)

    def close(self) -> None:
        """End the servers."""
        for server in self._servers.values():
            server.communicate()  # the end of its input ends it

    def _server(self, library_path: str | None) -> "subprocess.Popen[str]":
        if library_path not in self._servers:
            folder = tempfile.mkdtemp(dir=self._folder)
            env = {} if library_path is None else {"LD_LIBRARY_PATH": library_path}
            self._servers[library_path] = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, folder],
                env=clean_environment(**env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return self._servers[library_path]

    @staticmethod
    def _output(server: "subprocess.Popen[str]", name: str) -> Path:
        assert isinstance(server.args, list)
        return Path(str(server.args[-1])) / name


@dataclass
class ForkedTrainbox(Trainbox):
    """A `Trainbox` whose calls run in forks; `start` still starts a real process."""

    forks: CommandForks | None = field(default=None, kw_only=True)

    def __call__(
        self, *words: str, module: str = "entrypoint", env: Mapping[str, str] | None = None
    ) -> Ended:
        assert self.forks is not None and module == "entrypoint"
        return self.forks.run(tuple(quick(words)), self.folder, clean_environment(**(env or {})))


@pytest.fixture(scope="session")
def command_forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandForks]:
    made = CommandForks(tmp_path_factory.mktemp("forks"))
    yield made
    made.close()


@pytest.fixture
def forked(trainbox: Trainbox, command_forks: CommandForks) -> ForkedTrainbox:
    """`trainbox` without the time of a start."""
    return ForkedTrainbox(trainbox.folder, trainbox.started, forks=command_forks)


_STREAMS = ("out", "err")


def _serve(outputs: Path) -> None:
    """Fork for each request and answer with the exit code; return in the fork alone."""
    for line in sys.stdin:
        words, folder, env = json.loads(line)
        if (pid := os.fork()) == 0:
            _become(words, folder, env, outputs)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    os._exit(0)


def _become(words: list[str], folder: str, env: dict[str, str], outputs: Path) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in enumerate(_STREAMS, 1):
        os.dup2(os.open(outputs / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    sys.argv = ["trainbox", *words]


if __name__ == "__main__":
    # The modules that nearly every command imports, and none that opens the driver's library.
    import pynvml  # noqa: F401

    import entrypoint.cli.bench
    import entrypoint.cli.commands
    import entrypoint.cli.drill
    import entrypoint.cli.health
    import entrypoint.cli.planning
    import entrypoint.cli.run
    import entrypoint.cli.stored
    import entrypoint.cli.training
    import entrypoint.driver.nvml
    import entrypoint.health.check
    import entrypoint.health.verdict

    gc.freeze()  # a collection in a fork would copy all of these modules
    _serve(Path(sys.argv[1]))
    try:
        entrypoint.cli.commands.main()
    except SystemExit as end:
        # The interpreter's own end would take longer than the command.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(end.code or 0))
