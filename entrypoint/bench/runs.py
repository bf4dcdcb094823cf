"""The trainings of `trainbox bench`.

Each is a real `trainbox train` in a temporary folder. One runs at a time.
"""

import contextlib
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from entrypoint.bench.tables import BenchCase, BenchResult, Measured, measurement_order
from entrypoint.launch.inner_trainings import Process, start
from trainbox.errors import Failure, shell_code
from trainbox.files.regular_files import read_object
from trainbox.files.temporary import temporary_folder
from trainbox.folders.write_failures import writing
from trainbox.processes.process_tree import heeded_stop_signals, kill_tree
from trainbox.processes.programs import TRAINER, command_of
from trainbox.processes.streams import last_message, say

ANOTHER_FOLDER = "give another folder to --out"
_POLL_S = 0.1
_END_S = 10.0  # the wait for a stopped training, whose checkpoint is not needed

Arguments = Callable[[BenchCase, str], list[str]]


class Bench:
    """A bench that measures cases in rounds.

    `outcomes` has the results so far. `facts` describes the hardware and the build.
    """

    def __init__(
        self, cases: Sequence[BenchCase], arguments: Arguments, describe: Callable[[BenchCase], str]
    ) -> None:
        self.outcomes = {case: BenchResult() for case in cases}
        self.facts: dict[str, Any] = {}
        self.stopped_by: str | None = None
        self._arguments, self._describe = arguments, describe

    def run(self, rounds: int) -> None:
        """Measure all cases in `rounds` rounds, until a signal arrives.

        A case that fails is not measured again.
        """
        with self._signals_recorded(), temporary_folder("bench-") as folder:
            self._run(rounds, folder)

    def _run(self, rounds: int, folder: Path) -> None:
        todo = measurement_order(list(self.outcomes), rounds)
        took: list[float] = []
        for position, (number, case) in enumerate(todo):
            outcome = self.outcomes[case]
            if outcome.failure:
                continue
            left = sum(not self.outcomes[later].failure for _, later in todo[position:])
            expected = _duration(left * sum(took) / len(took)) if took else ""
            about = f", about {expected} left" if took else ""
            say(f"round {number + 1} of {rounds}, {self._describe(case)}{about}")
            begin = time.monotonic()
            try:
                measured = self._train(case, folder / f"{number}-{position}")
            except Failure as failure:
                outcome.failure, outcome.exit_code = str(failure), failure.exit_code
                say(f"  no result: {failure}")
            else:
                if measured is None:
                    return
                outcome.rounds[number] = measured
                say(f"  {measured.samples_per_second:,.0f} samples/s")
            took.append(time.monotonic() - begin)

    def _train(self, case: BenchCase, folder: Path) -> Measured | None:
        """Run one training, and return its figures, or None if a signal arrived.

        Raises:
            Failure: the training failed.
        """
        folder.mkdir()
        log = folder / "output.log"
        training = start(["train", *self._arguments(case, str(folder))], log)
        if not self._has_ended(training):
            return None
        try:
            if training.returncode:
                printed = log.read_text(encoding="utf-8", errors="replace").strip() or "no output"
                reason = last_message(printed) or printed.splitlines()[-1]
                raise Failure(reason, exit_code=shell_code(training.returncode))
            self.facts = self.facts or _facts(read_object(folder / "case/manifest.json"))
            return Measured(**read_object(folder / "case/measured.json"))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _has_ended(self, training: Process) -> bool:
        """Wait for the end of the training. Return False if a signal arrived, which stops it."""
        while not self.stopped_by:
            with contextlib.suppress(subprocess.TimeoutExpired):
                training.wait(timeout=_POLL_S)
                return True
        training.terminate()
        try:
            training.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            kill_tree(training.pid)
            training.wait()
        return False

    @contextlib.contextmanager
    def _signals_recorded(self) -> Iterator[None]:
        def note(number: int, _frame: FrameType | None) -> None:
            self.stopped_by = self.stopped_by or signal.Signals(number).name

        before = heeded_stop_signals()
        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def write_files(folder: Path, text: str, report: Mapping[str, Any]) -> None:
    """Write bench.md and bench.json, and let the trainer draw bench.svg.

    Raises:
        StorageFailure: a file cannot be written.
        Failure: the figure cannot be drawn.
    """
    with writing(folder, ANOTHER_FOLDER):
        (folder / "bench.md").write_text(text + "\n", encoding="utf-8")
        (folder / "bench.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    drawn = subprocess.run(command_of(TRAINER, "bench-figure", str(folder)), check=False)
    if drawn.returncode:
        raise Failure(
            f"--out {folder}: bench.svg could not be drawn; bench.md and bench.json are complete",
            exit_code=drawn.returncode,
        )


def _facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    device = manifest["device"]
    hardware = (
        ", ".join(device["names"]) if device["type"] == "cuda" else manifest["machine"]["cpu_model"]
    )
    return {
        "hardware": hardware,
        "torch": manifest["packages"]["torch"],
        "revision": manifest["build"].get("revision"),
    }


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
