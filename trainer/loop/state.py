"""What a training is made of and where it stands: all that a checkpoint saves and a resume
restores.
"""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import Dataset

from trainer.data.batches import EvaluationBatches, Schedule
from trainer.errors import WrongUse
from trainer.loop.attributes import Attributes
from trainer.parallel.exchange import Reduction
from trainer.parallel.loss_sums import RunningLosses
from trainer.parallel.strategy import Strategy
from trainer.parallel.world import World
from trainer.records.checkpoint import Checkpoints
from trainer.records.digest import value_digest
from trainer.records.manifest import SourceRecord
from trainer.records.run_log import RunLog
from trainer.settings.config import Settings
from trainer.task import Task

T = TypeVar("T")

_RECENT_ENTRIES = 20  # of the log


@dataclass
class Progress:
    """Where a run stands: with the weights and the optimizer's state, all that a resume needs."""

    step: int = 0
    evaluated_step: int = 0
    best_step: int | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    patience_best: float | None = None
    patience_used: int = 0
    ended_early: bool = False
    skipped: int = 0
    skipped_in_a_row: int = 0
    train_seconds: float = 0.0


class Stopwatch:
    """Seconds of training, counted on from `start`, without the pauses, and laps of steps in
    them.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._offset = start - time.monotonic()
        self._last: tuple[int, float] | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() + self._offset

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self._offset -= time.monotonic() - begin

    def lap(self, step: int) -> tuple[int, float]:
        """Steps and seconds since the last call, or since `start` was called."""
        assert self._last is not None
        (before, since), self._last = self._last, (step, self.seconds)
        return step - before, max(self._last[1] - since, 1e-9)

    def start(self, step: int) -> None:
        self._last = (step, self.seconds)


@dataclass
class Job:
    """Everything that `fit` works on; `loss_module` holds `model`."""

    task: Task
    config: Settings
    strategy: Strategy
    run: RunLog
    checkpoints: Checkpoints
    model: nn.Module
    loss_module: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    autocast_dtype: torch.dtype | None
    train: Dataset[Any]
    evaluation: EvaluationBatches
    schedule: Schedule
    workers: int
    watch: Stopwatch
    running: RunningLosses
    reduction: Reduction
    attributes: Attributes
    progress: Progress = field(default_factory=Progress)
    sources: SourceRecord | None = None
    until_step: int | None = None
    save_due: bool = False
    digested_step: int | None = None  # of the last entry in digests.jsonl
    validated: Callable[[int, Mapping[str, float]], None] | None = None
    swept: Sequence[str] = ()
    around_batches: Callable[[Iterator[Any]], Iterator[Any]] | None = None
    exchange_seconds: float | None = None  # up to the last entry of the log
    slow_network_seconds: float = 0.0  # of the entries in a row
    told_of_network: bool = False
    recent_losses: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_ENTRIES))

    @property
    def world(self) -> World:
        return self.strategy.world

    @property
    def end_step(self) -> int:
        """Where this training ends: the schedule's end, unless it is told to leave off before."""
        return min(self.schedule.total_steps, self.until_step or self.schedule.total_steps)

    def inside(self, compute: Callable[[], T]) -> T:
        """Return `compute()`, which uses the model outside a training forward."""
        return self.strategy.inside(self.loss_module, compute)

    def digests(self, tensors: Mapping[str, Any]) -> dict[str, str]:
        """For each tensor its sha256, of the whole where it is shared out: all processes must call
        this.
        """
        return {name: value_digest(self.strategy.whole(value)) for name, value in tensors.items()}

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds.

        On several processes all must call it: running sums and shared-out tensors are gathered.

        Raises:
            WrongUse: what the optimizer keeps cannot be shared out again at a resume.
        """
        self.strategy.check_optimizer(self.optimizer)
        state = {
            "model": self.model.state_dict(),
            "buffers": [name for name, _ in self.model.named_buffers()],
            "optimizer": self.optimizer.state_dict(),
            "optimizer_class": type(self.optimizer).__name__,
            "scaler": self.scaler.state_dict(),
            "progress": dataclasses.asdict(self.progress) | {"train_seconds": self.watch.seconds},
            "running": self.running.gather(),
            "running_steps": self.running.steps,
        }
        return self.strategy.gathered(state)

    def _restore_optimizer(self, state: Mapping[str, Any]) -> None:
        parameters = [
            parameter for group in self.optimizer.param_groups for parameter in group["params"]
        ]
        share = self.strategy.share
        saved = {
            i: {n: share(v, parameters[i]) for n, v in values.items()}
            for i, values in state["state"].items()
        }
        self.optimizer.load_state_dict({**state, "state": saved})
        # Torch gives a state of another type than its parameter's (a moment in float64) the
        # parameter's.
        for index, values in saved.items():
            kept = self.optimizer.state[parameters[index]]
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and kept[name].dtype != value.dtype:
                    kept[name] = value.to(kept[name].device, copy=True)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned, on any number of processes.

        Raises:
            WrongUse: it is of another model or optimizer.
        """
        model = self.model.state_dict()
        found, here = _shapes(state["model"]), _shapes(model)
        found["optimizer"], here["optimizer"] = (
            state["optimizer_class"],
            type(self.optimizer).__name__,
        )
        other = {
            name: (found.get(name), here.get(name))
            for name in {**found, **here}
            if found.get(name) != here.get(name)
        }
        for name, (saved, now) in other.items():
            raise WrongUse(
                f"{self.run.path} holds a checkpoint of another model or optimizer ({name} "
                f"was {saved} and is {now}): "
                "undo the change of the task, or train anew under another --run name"
            )
        self.model.load_state_dict(
            {
                name: self.strategy.share(value, model[name])
                for name, value in state["model"].items()
            }
        )
        self._restore_optimizer(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.progress = Progress(**state["progress"])
        self.watch = Stopwatch(self.progress.train_seconds)
        self.running.restore(state["running"], state["running_steps"])


def _shapes(model: Mapping[str, Any]) -> dict[str, Any]:
    """Of a state_dict's tensors; of a module's extra state, that there is some."""
    return {
        name: tuple(value.shape) if isinstance(value, torch.Tensor) else "extra state"
        for name, value in model.items()
    }
