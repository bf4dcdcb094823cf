"""Start a training script as its user does, or in forked processes, on one process or two."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from tests.support.commands import clean_environment, wait_until
from tests.support.nodes import free_port
from tests.support.ranks import Ranks, StartedRanks
from trainbox.options.run_name import run_name
from trainbox.processes.process_tree import children

_TERM_IS_HANDLED = 1 << (signal.SIGTERM - 1)


class Script(Protocol):
    """A script that runs on one rank or several."""

    def poll(self) -> int | None: ...
    def wait(self) -> object: ...
    def pids(self) -> list[int]:
        """Return the process ids of the ranks that have started."""

    def output(self) -> str:
        """Return the lines that all ranks have printed so far."""

    def codes(self) -> list[int]:
        """Return the exit codes of the ranks after they have ended."""


class ForkedScript:
    """A script on forked processes, with the variables of torchrun."""

    def __init__(self, started: StartedRanks) -> None:
        self._started = started
        self.poll, self.wait = started.poll, started.wait

    def pids(self) -> list[int]:
        return self._started.pids

    def output(self) -> str:
        return _whole_lines(self._started.printed("out"))

    def codes(self) -> list[int]:
        return self._started.wait().codes


class RealScript:
    """`python FILE` or `torchrun FILE`. The exit codes of torchrun's ranks are in its report."""

    def __init__(self, folder: Path, processes: int, file: Path, arguments: Sequence[str]) -> None:
        self._processes, self._logs = processes, folder / f"logs-{len(list(folder.iterdir()))}"
        self._logs.mkdir()
        launcher = [sys.executable]
        if processes > 1:
            # Each rank has its own output: two ranks could write parts of one line.
            launcher = [str(Path(sys.executable).with_name("torchrun")), "--standalone"]
            launcher += [
                f"--nproc-per-node={processes}",
                f"--log-dir={self._logs}",
                "--redirects=1",
            ]
        with (self._logs / "stdout.log").open("wb") as out, self._report.open("wb") as err:
            self._process = subprocess.Popen(
                [*launcher, str(file), *arguments],
                cwd=folder,
                env=clean_environment(OMP_NUM_THREADS="1"),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        self.poll, self.wait = self._process.poll, self._process.wait

    def pids(self) -> list[int]:
        pid = self._process.pid
        return sorted(children(pid)) if self._processes > 1 else [pid]

    def output(self) -> str:
        return _whole_lines(path.read_text() for path in sorted(self._logs.rglob("stdout.log")))

    @property
    def _report(self) -> Path:
        return self._logs / "stderr.log"

    def codes(self) -> list[int]:
        code = self._process.wait()
        if self._processes == 1 or code == 0:
            return [code] * self._processes
        return list(map(int, re.findall(r"^ +exitcode +: (-?\d+)", self._report.read_text(), re.M)))


class Scripts:
    """Starts scripts that have the same run folder, and ends what still runs."""

    def __init__(self, folder: Path, ranks: Ranks | None) -> None:
        """Fork with `ranks`, or start real processes."""
        self.folder, self._ranks = folder, ranks
        name = run_name(str(folder / "script.py"), False, [])
        self.run = folder / ("run" if ranks else f"runs/{name}")
        self._started: list[Script] = []

    def start(self, processes: int, code: str, *arguments: str) -> Script:
        """Start `code` with `arguments`."""
        script: Script
        if self._ranks is None:
            (file := self.folder / "script.py").write_text(code, encoding="utf-8")
            script = RealScript(self.folder, processes, file, arguments)
        else:
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            env["TRAINBOX_RUN"] = str(self.run)
            module = "tests.support.program"
            script = ForkedScript(
                self._ranks.start(processes, code, *arguments, module=module, env=env)
            )
        self._started.append(script)
        return script

    def kill(self, script: Script) -> None:
        """Kill all ranks, and wait until the launcher has ended as well."""
        for pid in script.pids():
            os.kill(pid, signal.SIGKILL)
        script.wait()

    def close(self) -> None:
        for script in self._started:
            if script.poll() is None:
                self.kill(script)


def wait_for_handlers(script: Script, processes: int) -> None:
    """Wait until each rank handles SIGTERM."""
    wait_until(
        lambda: len(pids := script.pids()) == processes and all(map(_handles_term, pids)), script
    )


def _whole_lines(outputs: Iterable[str]) -> str:
    """Return the lines of all ranks. The last line of a killed rank may not be complete."""
    return "".join(output[: output.rfind("\n") + 1] for output in outputs)


def _handles_term(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) & _TERM_IS_HANDLED)
