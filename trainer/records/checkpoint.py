"""Save checkpoints in a thread while the training continues."""

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainbox.contract.errors import ExitCode, Failure
from trainbox.contract.files import replacing
from trainbox.contract.sidecar import write_checkpoint
from trainbox.snapshot import Snapshot, tensors_of
from trainer.records.checkpoint_files import CheckpointFiles
from trainer.records.mirror import Mirror
from trainer.system.storage import storage_failure


class CheckpointWriter:
    """The saves of one run's checkpoints in `files`.

    A save copies the tensors into kept buffers and returns. A thread then writes, syncs and
    renames, and the next save waits for it. A crash loses the checkpoint that is being written,
    but never an older one.

    Attributes:
        mirror: copies each complete checkpoint to an object storage; None by default.
    """

    mirror: Mirror | None = None

    def __init__(
        self,
        folder: Path,
        keep: int,
        writes: bool,
        report: Callable[[str], None],
        gathered: bool = False,
        run_id: str | None = None,
    ) -> None:
        """Save in `folder`, and keep the newest `keep` checkpoints.

        `writes` is true only on the first rank. `report` logs a message. `run_id` is written into
        each checkpoint. If the states are `gathered`, they are already copies on the CPU, so they
        are not copied again.
        """
        self.files = CheckpointFiles(folder, report, run_id, mapped=gathered)
        self.keep, self._writes, self._report, self._gathered = keep, writes, report, gathered
        self._snapshot = Snapshot()
        self._folder_seen = folder.exists()
        self._since_s = time.monotonic()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._recorded = threading.Event()
        self._recorded.set()

    def due(self, minutes: float) -> bool:
        """Return whether the last save was more than `minutes` ago.

        This is true only once per save, because the save happens a step later.
        """
        if not self._writes or time.monotonic() - self._since_s < minutes * 60:
            return False
        self._since_s = time.monotonic()
        return True

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Allocate the buffers for states like `state` in the thread.

        The first save then pauses the training no longer than later saves.
        """
        if self._writes:
            self.wait()
            self._start(lambda: self._snapshot.allocate(state))

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
        best_step: int | None,
        record: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """Copy `state`, and write it in a thread as the checkpoint of `step`.

        The newest few checkpoints and that of `best_step` are kept. If `step` is the best step, its
        model is written to `model.safetensors` too. The thread calls `record` with the copy before
        it writes, because hashing the tensors takes longer than copying them.

        Raises:
            StorageFailure: The previous save failed.
        """
        self._since_s = time.monotonic()
        if self._writes:
            self.wait()
            copy = dict(state) if self._gathered else self._snapshot.take(state)
            needed = sum(tensor.nbytes for tensor in tensors_of(copy))
            self._recorded.clear()
            self._start(lambda: self._write(step, copy, dict(metrics), best_step, record), needed)

    def wait_until_recorded(self) -> None:
        """Wait until the current save has called its `record`. It is not durable by then."""
        self._recorded.wait()

    def wait(self) -> None:
        """Wait until the current save is durable.

        Raises:
            StorageFailure: The checkpoint could not be written. Older ones are unchanged.
            Failure: The weights are not finite, so nothing was written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def finish(self) -> None:
        """Wait for the current save, and ignore its failure."""
        if self._thread is not None:
            self._thread.join()

    def _start(self, work: Callable[[], None], needed_bytes: int = 0) -> None:
        """Run `work` in the thread. The next `wait` raises its failure.

        The message for a full disk contains `needed_bytes`.
        """

        def run() -> None:
            try:
                work()
            except OSError as error:
                self._failure = storage_failure(self.files.folder, error, needed_bytes)
            except BaseException as error:  # noqa: BLE001 - the next wait raises it
                self._failure = error
            finally:
                self._recorded.set()

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()

    def _write(
        self,
        step: int,
        state: dict[str, Any],
        metrics: dict[str, float],
        best_step: int | None,
        record: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """Write a checkpoint. The thread runs this."""
        tensors = {
            name: value for name, value in state["model"].items() if isinstance(value, Tensor)
        }
        _refuse_not_finite(step, tensors, state.get("buffers", ()))
        self._make_folder(step)
        # Record the digests first, because a next entry waits for them.
        if record is not None:
            record(state)
        self._recorded.set()
        # Write the best weights, then the checkpoint. Then mark the run as one with checkpoints,
        # and remove old ones.
        if step == best_step:
            self.files.write_best(step, tensors)
        _write_checkpoint(self.files, step, state, metrics, best_step)
        if not self.files.first.exists():
            with replacing(self.files.first) as file:
                file.write(json.dumps({"step": step}).encode() + b"\n")
        self.files.prune(self.keep, best_step)
        if self.mirror is not None:
            self.mirror.saved(self.files.run_id, best_step)

    def _make_folder(self, step: int) -> None:
        """Make the folder of the checkpoints. Report if it was removed during the training."""
        folder = self.files.folder
        if self._folder_seen and not folder.exists():
            self._report(
                f"{folder} was removed with all its checkpoints: created again for the checkpoint "
                f"of step {step}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._folder_seen = True


def _refuse_not_finite(step: int, tensors: Mapping[str, Tensor], buffers: Collection[str]) -> None:
    """Raise a Failure if a tensor is not finite. Buffers may contain infinities, as masks do."""
    for name, tensor in tensors.items():
        if (
            tensor.is_floating_point()
            and not (~tensor.isnan() if name in buffers else tensor.isfinite()).all()
        ):
            raise Failure(
                f"the weights {name!r} are not finite at step {step}: lower --lr, or add "
                "--warmup-epochs or --clip-norm; older checkpoints are valid",
                exit_code=ExitCode.NOT_FINITE,
            )


def _write_checkpoint(
    files: CheckpointFiles,
    step: int,
    state: Mapping[str, Any],
    metrics: Mapping[str, float],
    best_step: int | None,
) -> None:
    """Write the tensors and the sidecar of `step`."""
    identity = {"run_id": files.run_id, "step": step}
    write_checkpoint(
        files.folder,
        step,
        lambda file: torch.save({**state, "checkpoint": identity}, file),
        {**identity, "metrics": metrics, "best_step": best_step},
    )
