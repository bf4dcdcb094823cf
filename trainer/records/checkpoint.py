"""The checkpoints of one run, and its best weights in model.safetensors."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trainbox.checkpoint_writer import CheckpointWriter
from trainbox.errors import ExitCode, Failure
from trainbox.files.entries import plain
from trainbox.folders.write_failures import storage_failure
from trainer.records.checkpoint_files import CheckpointFiles

_BEST_EVERY_S = 10.0  # the fewest seconds between a save and a new best that is written at once


class RunCheckpoints(CheckpointWriter):
    """The saves of one run's checkpoints in `files`.

    Attributes:
        files: The checkpoints.
        may_be_nan: the names of buffers that contained NaN when they were built.
        may_write_held: Returns whether a best in memory may be written after an error.
    """

    files: CheckpointFiles
    may_be_nan: Collection[str] = ()
    may_write_held: Callable[[], bool]

    def __init__(
        self,
        folder: Path,
        keep: int,
        writes: bool,
        report: Callable[[str], None],
        gathered: bool = False,
        run_id: str | None = None,
    ) -> None:
        """Save in `folder`. `writes` is true only on the first rank."""

        def failure(error: BaseException, needed_bytes: int) -> BaseException:
            if not isinstance(error, OSError):
                return error
            return storage_failure(folder, error, needed_bytes)

        files = CheckpointFiles(folder, report, run_id, mapped=gathered)
        super().__init__(files, keep, failure, gathered)
        self.may_write_held = _always
        self._writes = writes
        self._since_s = time.monotonic()
        self._written_s = -math.inf

    def of_rehearsal(self, folder: Path) -> "RunCheckpoints":
        """Return the saves of the rehearsal in `folder`, which use the buffers of this run.

        They are removed soon, so they are not durable.
        """
        report, gathered = self.files.report, self._gathered
        found = RunCheckpoints(folder, 1, self._writes, report, gathered, "rehearsal")
        found.snapshot, found.durable = self.snapshot, False
        return found

    def due(self, minutes: float) -> bool:
        """Return whether the last save was more than `minutes` ago.

        This is true only once per save, because the save happens a step later. A best in memory is
        due after 10 seconds.
        """
        limit_s = minutes * 60 if self._held is None else min(minutes * 60, _BEST_EVERY_S)
        if not self._writes or time.monotonic() - self._since_s < limit_s:
            return False
        self._since_s = time.monotonic()
        return True

    def best_is_late(self) -> bool:
        """Return whether a new best is written at once, because the last save was long ago."""
        return time.monotonic() - self._written_s >= _BEST_EVERY_S

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Allocate the buffers for states like `state` in the thread."""
        if self._writes:
            super().prepare(state)

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        fields: Mapping[str, Any],
        best_step: int | None,
        before: Callable[[Mapping[str, Any]], object] | None = None,
        later: bool = False,
    ) -> None:
        """Copy `state`, and write it in a thread as the checkpoint of `step`.

        `fields` are the metrics of a validation. If `step` is the best step, the model is written
        to `model.safetensors` too. The best may be written `later`: see the base class.

        Raises:
            StorageFailure: The previous save failed.
            Failure: The weights of the previous save were not finite, so nothing was written.
        """
        if not later:
            self._since_s = self._written_s = time.monotonic()
        if not self._writes:
            return

        def check(copy: Mapping[str, Any]) -> dict[str, Tensor]:
            tensors = {
                name: value for name, value in copy["model"].items() if isinstance(value, Tensor)
            }
            checked = {name: t for name, t in tensors.items() if name not in self.may_be_nan}
            _refuse_not_finite(step, checked, copy.get("buffers", ()))
            return tensors

        def check_and_record(copy: Mapping[str, Any]) -> None:
            tensors = check(copy)
            if before is not None:
                before(copy)
            if step == best_step:
                self.files.write_best(step, tensors)

        super().save(
            step,
            {**state, "checkpoint": {"run_id": self.files.run_id, "step": step}},
            {"metrics": plain(fields), "best_step": best_step},
            best_step,
            check_and_record,
            later,
        )
        if self._held is not None:  # another best may replace it, so no thread would check it
            try:
                check(self._held.state)
            except Failure:
                self.drop_held()
                raise

    def finish(self) -> None:
        """As the base class, but drop what is in memory if it may not be written."""
        if self._held is not None and not self.may_write_held():
            self.drop_held()
        self.may_write_held = _always  # it may keep the memory of a job
        super().finish()


def _always() -> bool:
    return True


def _refuse_not_finite(step: int, tensors: Mapping[str, Tensor], buffers: Collection[str]) -> None:
    """Raise a Failure if a tensor is not finite. Buffers may contain infinities, as masks do."""
    for name, tensor in tensors.items():
        if (tensor.is_floating_point() or tensor.is_complex()) and not (
            ~tensor.isnan() if name in buffers else tensor.isfinite()
        ).all():
            raise Failure(
                f"the weights {name!r} are not finite at step {step}: lower --lr, or add "
                "--warmup-epochs or --clip-norm",
                exit_code=ExitCode.NOT_FINITE,
            )
