"""Checkpoints of a training script: written by a thread, verified, and never all removed."""

import functools
import math
import operator
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TextIO

from torch.nn.parallel import DistributedDataParallel

from trainbox import ranks
from trainbox.checkpoint_writer import CheckpointWriter
from trainbox.errors import StorageFailure, WrongUse
from trainbox.files.regular_files import OF_ANOTHER_KIND, append_regular, take_lock
from trainbox.files.sidecar import FIRST_CHECKPOINT, complete_or_remove
from trainbox.folder import run_folder
from trainbox.folders.write_failures import storage_failure, writing
from trainbox.plain_state import plain_state
from trainbox.processes.streams import message
from trainbox.stored_checkpoints import StoredCheckpoints

_INSTEAD = "use another folder"
_NONE, _LOST = -1, -2  # what rank 0 reports instead of a step


class TrainState(SimpleNamespace):
    """All that a training resumes from, as attributes: `TrainState(model=model, epoch=0)`.

    A part with a `state_dict()`, such as a model, an optimizer, a scheduler or a scaler, is saved
    and loaded by this method and `load_state_dict()`. For a model in DistributedDataParallel, the
    state of the inner model is saved, so another number of processes can load it. Other parts are
    values, such as numbers. They are attributes of this object: read and change `state.epoch`,
    because a variable of yours does not follow it.

    It does not contain random numbers: `seed_step` seeds each step.
    """

    def __init__(self, *unnamed: Any, **parts: Any) -> None:
        if unnamed:
            raise WrongUse(
                f"TrainState got a part without a name ({type(unnamed[0]).__name__}): write "
                "TrainState(model=model)"
            )
        super().__init__(**parts)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each part by its name."""
        parts = {name: _unwrapped(part) for name, part in vars(self).items()}
        return {
            name: part.state_dict() if hasattr(part, "state_dict") else part
            for name, part in parts.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of each part.

        Raises:
            WrongUse: `state` has other parts.
        """
        if different := state.keys() ^ vars(self).keys():
            raise WrongUse(
                f"the saved parts are {', '.join(state)}, and the TrainState's parts are "
                f"{', '.join(vars(self))} (different: {', '.join(sorted(different))}): use the "
                "same parts, or a new folder"
            )
        for name, value in state.items():
            part = _unwrapped(getattr(self, name))
            if hasattr(part, "load_state_dict"):
                part.load_state_dict(value)
            else:
                setattr(self, name, value)


def _unwrapped(part: Any) -> Any:
    return part.module if isinstance(part, DistributedDataParallel) else part


class Checkpoints:
    """The checkpoints of a run. Only rank 0 writes, and all ranks load.

    A checkpoint is a file such as `step-00000800.pt` and a sidecar `step-00000800.json` with its
    SHA-256. Both are written under temporary names and then renamed, so a checkpoint is complete or
    not there, whenever the process is killed. Old checkpoints are removed after the new one is on
    the disk. Files with other names are never touched. A process locks the folder from its
    first load or save until it ends.

    Attributes:
        folder: The folder of the checkpoints.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        keep: int = 2,
        best: Literal["max", "min"] = "max",
    ) -> None:
        """Use the checkpoints in `folder`, by default `checkpoints` in the run folder.

        Args:
            folder: On several machines, a folder that all of them share.
            keep: The number of newest checkpoints to keep. With 1, a damaged file cannot be
                replaced by the one before.
            best: Whether the largest or the smallest metric is the best. This checkpoint is kept,
                too.

        Raises:
            WrongUse: An argument has another value.
        """
        if keep < 1 or best not in ("max", "min"):
            raise WrongUse(
                f"Checkpoints(keep={keep}, best={best!r}): give keep=1 or more, and best='max' or "
                "'min'"
            )
        self.folder = run_folder() / "checkpoints" if folder is None else Path(folder).absolute()
        self._sign = 1 if best == "max" else -1
        marker = self.folder / FIRST_CHECKPOINT
        self._files = StoredCheckpoints(self.folder, marker, message, _INSTEAD)
        self._writer = CheckpointWriter(self._files, keep, self._failure)

    def restore(self, state: TrainState, *, best: bool = False) -> int:
        """Load the newest valid checkpoint into `state`, and return its step, or 0 without one.

        All ranks must call this. See `load`, which has the same arguments and errors. A state with
        other parts raises WrongUse.
        """
        if (found := self.load(best=best)) is None:
            return 0
        values, step = found
        state.load_state_dict(values)
        return step

    def load(self, *, best: bool = False) -> tuple[dict[str, Any], int] | None:
        """Return the state and the step of the newest valid checkpoint, or None without one.

        All ranks must call this. Rank 0 compares the SHA-256, and all ranks load the same step.
        Tensors are on the CPU. Loading never runs code from the file. A damaged checkpoint is
        renamed to `.damaged` and reported, and the one before is loaded.

        Args:
            best: Return the checkpoint with the best metric instead of the newest.

        Raises:
            StorageFailure: There were checkpoints, and none is valid. A start from step 0 would
                hide this. Nothing is renamed.
            WrongUse: Another process uses the folder.
        """
        if (step := _on_first_rank(lambda: self._find(best), "load")) is None:
            return None
        state = self._files.load(step)
        ranks.from_first(step)  # all ranks have read the file before one of them saves
        return state, step

    def prepare(self, state: TrainState | Mapping[str, Any]) -> None:
        """Reserve memory for states like `state`. The first `save` is then as fast as later ones.

        Call it after the first step, when the optimizer has its state.
        """
        if ranks.rank() == 0:
            self._writer.prepare(_as_dict(state))

    def save(
        self, step: int, state: TrainState | Mapping[str, Any], metric: float | None = None
    ) -> None:
        """Copy `state`, and let a thread write it as the checkpoint of `step`.

        All ranks may call this, and only rank 0 saves. If the save before still runs, this waits
        for it first. Python ends only after the thread has written, except if it is killed.

        Args:
            step: The number of finished optimizer steps, not below the newest checkpoint's step.
            state: A TrainState, or a dict of nested dicts, lists and tuples of tensors, numbers and
                strings. The tensors are copied to the CPU before this returns.
            metric: The value that selects the best checkpoint. A value that is
                infinite or NaN is never the best.

        Raises:
            StorageFailure: The save before failed. Older checkpoints are unchanged.
            WrongUse: `step` is too small, `state` has a value that cannot be loaded safely, or
                another process uses the folder.
        """
        if isinstance(step, TrainState | Mapping):
            raise WrongUse("save got the state before the step: write save(step, state)")
        if ranks.rank() != 0:
            return
        self._writer.wait()
        step = operator.index(step)  # a number of NumPy or a tensor cannot be written as JSON
        if (newest := max(self._files.steps(), default=0)) > step or step < 0:
            raise WrongUse(
                f"step {step} is before step {newest} of the newest checkpoint in {self.folder}: "
                "call load() before the first step, or use another folder"
            )
        saved: dict[str, Any] = plain_state(_as_dict(state), "state")
        value = None if metric is None or not math.isfinite(metric) else float(metric)
        with writing(self.folder, _INSTEAD):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._own_folder()
        best_step = next(reversed(self._by_metric({step: value})[0]), None)
        self._writer.save(step, saved, {"metric": value}, best_step)

    def wait(self) -> None:
        """Wait until the last save is on the disk. All ranks must call this, before they exit.

        Otherwise a rank that exits first could let torchrun kill rank 0 while it writes.

        Raises:
            StorageFailure: The save failed. Older checkpoints are unchanged.
        """
        _on_first_rank(self._writer.wait, "save")

    def _failure(self, error: BaseException, needed_bytes: int) -> BaseException:
        """Return what the next call raises, and print it for a script that exits without one."""
        if isinstance(error, OSError):
            error = storage_failure(self.folder, error, needed_bytes, _INSTEAD)
        message(str(error))
        return error

    def _own_folder(self) -> None:
        """Refuse a second process, clean up after a killed one, and find the id of the run.

        Raises:
            WrongUse: Another process uses the folder.
        """
        try:
            _lock(self.folder / "lock")
        except OSError as error:
            # A folder that cannot be written has no writer.
            if error.errno in OF_ANOTHER_KIND:
                raise storage_failure(self.folder, error, instead=_INSTEAD) from error
        for path in complete_or_remove(self.folder):
            message(f"{path} has the name of a temporary file of a checkpoint: remove or rename it")
        files = self._files
        files.run_id = files.run_id_found() or files.run_id or os.urandom(8).hex()

    def _find(self, best: bool) -> int | None:
        """Return the step of the newest or best valid checkpoint, or None.

        Raises:
            StorageFailure: None of the checkpoints is valid, or all were removed.
            WrongUse: Another process uses the folder.
        """
        self._writer.wait()
        self._own_folder()
        steps = self._files.steps()
        if best:
            by_metric, unread = self._by_metric({})
            if steps and not by_metric and not unread:
                return None  # none has a metric
            steps = [*by_metric, *unread]
        return self._files.first_valid(reversed(steps))

    def _by_metric(self, new: Mapping[int, float | None]) -> tuple[list[int], list[int]]:
        """Return the saved steps and the `new` ones that have a metric, and the unreadable ones.

        The best is last, and of two with the same metric the earlier one.
        """
        metrics, unread = dict[int, Any](), list[int]()
        for step in self._files.steps():
            try:
                metrics[step] = self._files.sidecar(step).get("metric")
            except ValueError:
                unread.append(step)
        metrics |= new
        found = {step: value for step, value in metrics.items() if isinstance(value, float)}
        return sorted(found, key=lambda step: (self._sign * found[step], -step)), unread


def _on_first_rank(work: Callable[[], int | None], verb: str) -> int | None:
    """Return `work()` of rank 0 on all ranks. If it fails there, all ranks raise an error."""
    found, failure = None, None
    if ranks.rank() == 0:
        try:
            found = work()
        except Exception as error:  # noqa: BLE001 - raised again after all ranks know
            failure = error
    known = _NONE if found is None else found
    step = ranks.from_first(known if failure is None else _LOST)
    if step == _LOST:
        raise failure or StorageFailure(f"rank 0 cannot {verb} a checkpoint: see its message")
    return None if step == _NONE else step


def _as_dict(state: TrainState | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what is saved of `state`.

    Raises:
        WrongUse: `state` has another type.
    """
    if isinstance(state, TrainState):
        return state.state_dict()
    if not isinstance(state, Mapping):
        raise WrongUse(
            f"state is a {type(state).__name__}: save a TrainState or a dict of its parts"
        )
    return state


@functools.cache  # the lock of a folder is kept until the process ends
def _lock(path: Path) -> TextIO:
    """Lock the file at `path`, and return it. Children do not inherit the lock.

    Raises:
        WrongUse: Another process has locked it.
        OSError: The file cannot be opened.
    """
    file = append_regular(path)
    if take_lock(file, posix=True):
        return file
    file.close()
    raise WrongUse(
        f"another process uses the checkpoints in {path.parent}: wait until it ends, or use "
        "another folder"
    )
