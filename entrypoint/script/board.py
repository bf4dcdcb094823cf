"""The process that shows the metrics of a script in TensorBoard."""

import subprocess
from pathlib import Path

from trainbox.contract.processes import command_of, ignore_stop_signals
from trainbox.contract.record_folder import METRICS
from trainbox.contract.streams import message

_END_S = 20.0  # TensorBoard's files are a copy, so their end is not worth a longer wait


class Board:
    """A process that shows metrics.jsonl in TensorBoard. Only code of the trainer writes there."""

    def __init__(self, run: Path) -> None:
        """Start the process for the folder `run`."""
        self._process = subprocess.Popen(
            command_of("trainer.run.script_board", str(run / METRICS)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            # This process has no threads, so `preexec_fn` is safe.
            preexec_fn=ignore_stop_signals,  # noqa: PLW1509
        )

    def close(self) -> None:
        """Let the process write what is left, and print why it did not, if it did not."""
        try:
            errors = self._process.communicate(timeout=_END_S)[1]
        except subprocess.TimeoutExpired:
            self._process.kill()
            errors = self._process.communicate()[1] + f"\nnot within {_END_S:.0f} s".encode()
        if code := self._process.returncode:
            lines = errors.decode(errors="replace").splitlines() or [f"exit code {code}"]
            message(
                f"TensorBoard's files lack values of {METRICS} ({lines[-1]}): the next start of "
                "this run adds them"
            )
