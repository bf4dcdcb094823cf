"""Write the checkpoints of a folder in a thread, for `trainbox.Checkpoints` and for the trainer."""

import functools
import json
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainbox.files.regular_files import replacing
from trainbox.files.sidecar import (
    checkpoint_path,
    remove_checkpoint,
    set_aside,
    write_checkpoint,
)
from trainbox.pinned import pinned_like
from trainbox.stored_checkpoints import StoredCheckpoints
from trainbox.tensor_trees import mapped, tensors_in


class _Held(NamedTuple):
    """A checkpoint in memory: its step and state, and what writes it."""

    step: int
    state: Mapping[str, Any]
    write: Callable[[], None]


class CheckpointWriter:
    """The only writer of the checkpoints in `files`.

    A save copies the tensors into kept buffers and returns. A thread then writes, syncs and
    renames, and the next save waits for it. A crash loses the checkpoint that is being written or
    that is only in memory, but never an older one.

    Attributes:
        durable: Whether a save is on the disk when it is complete.
        snapshot: The kept buffers. Several writers may use them in turn.
    """

    durable = True

    def __init__(
        self,
        files: StoredCheckpoints,
        keep: int,
        failure: Callable[[BaseException, int], BaseException],
        gathered: bool = False,
    ) -> None:
        """Save in `files`, and keep the newest `keep` checkpoints and the best one.

        `failure` returns what the next `wait` raises for an error of the thread and the bytes that
        a save needed. If the states are `gathered`, they are already copies on the CPU, so they are
        not copied again.
        """
        self.files, self.keep = files, keep
        self._failure_of, self._gathered = failure, gathered
        self.snapshot = Snapshot()
        self._held: _Held | None = None
        self._folder_seen = files.folder.exists()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Allocate the buffers for states like `state` in the thread.

        The first save then pauses the training no longer than later saves.
        """
        self.wait()
        self._start(lambda: self.snapshot.allocate(state), state)

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

        The sidecar gets the `fields`. The thread calls `before` with the copy before it writes; an
        error there refuses the save.

        A checkpoint to write `later` stays in memory until the next save or `finish`. A save with
        another `best_step` drops it.
        """
        if self._held is not None and self._held.step == best_step != step:
            self._write_held()
        self.wait()
        copy = dict(state) if self._gathered else self.snapshot.take(state)
        fields = {"run_id": self.files.run_id, "step": step, **fields}
        write = functools.partial(self._write, step, copy, fields, best_step, before)
        self._held = _Held(step, copy, write)
        if not later:
            self._write_held()

    def _write_held(self) -> None:
        """Write the checkpoint that is in memory, if there is one, in the thread."""
        held, self._held = self._held, None
        if held is not None:
            self._start(held.write, held.state)

    def wait(self) -> None:
        """Wait until the current save is durable, and raise its failure."""
        self._join()
        self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def finish(self) -> None:
        """Write what is in memory, and wait for the current save. A failure is only reported."""
        self._join()
        self._failure = None  # of a save that another error has interrupted
        self._write_held()
        self._join()
        failure, self._failure = self._failure, None
        if failure is not None:
            self.files.report(f"the newest best checkpoint is lost: {failure}")

    def drop_held(self) -> None:
        """Forget the checkpoint that is in memory."""
        self._held = None

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _start(self, work: Callable[[], None], state: Mapping[str, Any]) -> None:
        """Run `work` with the `state` in the thread. The next `wait` raises its failure."""

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - the next wait raises it
                needed_bytes = sum(tensor.nbytes for tensor in tensors_in(state))
                self._failure = self._failure_of(error, needed_bytes)

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()

    def _write(
        self,
        step: int,
        state: Mapping[str, Any],
        fields: Mapping[str, Any],
        best_step: int | None,
        before: Callable[[Mapping[str, Any]], object] | None,
    ) -> None:
        """Write a checkpoint, then the marker, and then remove old checkpoints."""
        folder, marker = self.files.folder, self.files.marker
        if self._folder_seen and not folder.exists():
            self.files.report(
                f"{folder} was removed with all its checkpoints: created again for the "
                f"checkpoint of step {step}"
            )
        folder.mkdir(parents=not self._folder_seen, exist_ok=True)
        self._folder_seen = True
        if before is not None:
            before(state)
        if step not in (steps := self.files.steps()):
            set_aside(checkpoint_path(folder, step, ".pt"))  # a file of another program
        write_checkpoint(folder, step, lambda file: torch.save(state, file), fields, self.durable)
        if not marker.exists():
            with replacing(marker, self.durable) as file:
                marked = {name: fields[name] for name in ("run_id", "step")}
                file.write(json.dumps(marked).encode() + b"\n")
        self._prune({*steps, step}, best_step)

    def _prune(self, steps: Collection[int], best_step: int | None) -> None:
        """Remove old checkpoints of this run: all but the newest `keep` and the best one."""
        if len(steps) > self.keep:
            ours = [step for step in sorted(steps) if self._is_ours(step)]
            for step in {*ours} - {*ours[-self.keep :], best_step}:
                remove_checkpoint(self.files.folder, step)

    def _is_ours(self, step: int) -> bool:
        try:
            self.files.sidecar(step)
        except ValueError:
            return False
        return True


class Snapshot:
    """A copy of a training's state, in buffers that are kept between saves.

    A copy into fresh memory would take several times as long.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def allocate(self, state: Mapping[str, Any]) -> None:
        """Get the buffers for states like `state`."""
        self._buffers_for(tensors_in(state))

    @torch.no_grad()
    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of `state` on the CPU, valid until the next call."""
        tensors = tensors_in(state)
        if tensors:  # torch refuses an empty list
            torch._foreach_copy_(self._buffers_for(tensors), tensors, non_blocking=True)
        for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        copies = iter(self._buffers)
        copy: dict[str, Any] = mapped(lambda _: next(copies), state)
        return copy

    def _buffers_for(self, tensors: list[Tensor]) -> list[Tensor]:
        if [_layout(t) for t in tensors] != [_layout(t) for t in self._buffers]:
            self._buffers = []  # free the old ones first
            on_gpu = [tensor for tensor in tensors if tensor.device.type == "cuda"]
            pinned = iter(pinned_like(on_gpu) if on_gpu else [])
            # Zeros instead of empty memory, so that the pages are allocated now.
            self._buffers = [
                next(pinned)
                if tensor.device.type == "cuda"
                else torch.zeros_like(tensor, device="cpu", requires_grad=False)
                for tensor in tensors
            ]
        return self._buffers


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.stride()
