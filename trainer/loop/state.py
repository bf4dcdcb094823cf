"""The state of a training, which a checkpoint contains, and the parts that `fit` uses."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.utils.data import Dataset

from trainbox.errors import WrongUse
from trainbox.options.config import Settings
from trainbox.plain_state import plain_state
from trainbox.task import Task
from trainer.data.batches import EvaluationBatches
from trainer.data.schedule import Schedule
from trainer.parallel.buffers import evaluating, left_alone
from trainer.parallel.exchange import Reduction
from trainer.parallel.loss_sums import RunningLosses
from trainer.parallel.strategy import Strategy
from trainer.parallel.world import World
from trainer.records.checkpoint import RunCheckpoints
from trainer.records.digest import value_digest
from trainer.records.manifest import SourceRecord
from trainer.records.run_gpus import RunGpus
from trainer.records.run_log import RunLog

T = TypeVar("T")


@dataclass
class Progress:
    """The numbers that a resume needs besides the weights and the optimizer's state.

    `step` counts optimizer updates, `evaluated_step` is the step of the last validation, and
    `validations` has the metrics of each, if the task defines a schedule.
    """

    step: int = 0
    evaluated_step: int = 0
    validations: list[dict[str, float]] = field(default_factory=list)
    best_step: int | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    patience_best: float | None = None
    patience_used: int = 0
    ended_early: bool = False
    skipped: int = 0
    skipped_in_a_row: int = 0
    train_seconds: float = 0.0


class Stopwatch:
    """Seconds of training without pauses, counted from `start`, and laps of steps."""

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
        """Return the steps and seconds since the last call of this method or of `start`."""
        assert self._last is not None
        (before, since), self._last = self._last, (step, self.seconds)
        return step - before, max(self._last[1] - since, 1e-9)

    def start(self, step: int) -> None:
        self._last = (step, self.seconds)


@dataclass
class JobState:
    """The state that changes during a training: exactly the content of a checkpoint."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    running: RunningLosses
    progress: Progress = field(default_factory=Progress)
    watch: Stopwatch = field(default_factory=Stopwatch)
    _built: dict[str, str] = field(init=False)
    _trained: dict[str, nn.Parameter] = field(init=False)
    _types: dict[str, str] = field(init=False)
    _layout: list[Any] = field(init=False)
    _groups: int = field(init=False)

    def __post_init__(self) -> None:
        model = self.model.state_dict()
        self._built, self._types, self._layout = _shapes(model), _types(model), _layout(model)
        self._trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self._groups = len(self.optimizer.param_groups)

    def capture(self, strategy: Strategy) -> dict[str, Any]:
        """Return the content of a checkpoint; all ranks must call this.

        Raises:
            WrongUse: A resume could not load the state.
        """
        strategy.check_optimizer(self.optimizer)
        model = self.model_state()
        if len(self.optimizer.param_groups) != self._groups:
            raise WrongUse(
                "a parameter group was added to the optimizer, which a resume would not have: add "
                "all groups in build_optimizer()"
            )
        if changed := self._change(model):
            raise WrongUse(
                f"the model has changed since it was built ({changed}), so a resume could not load "
                "a checkpoint: create all parameters and buffers in build_model(), with their "
                "final shapes and types, or run an example through the model there"
            )
        now = {} if strategy.forward_is_collective else dict(self.model.named_parameters())
        for name, parameter in self._trained.items():
            if now.get(name, parameter) is not parameter:
                raise WrongUse(
                    f"the trained parameter {name} was replaced by another object, which the "
                    "optimizer does not update, but would update after a resume: change its values "
                    "in place, under torch.no_grad()"
                )
        state = strategy.gathered(
            {
                "model": model,
                "buffers": [name for name, _ in self.model.named_buffers()],
                "optimizer": self.optimizer.state_dict(),
                "optimizer_class": type(self.optimizer).__name__,
                "scaler": self.scaler.state_dict(),
                "progress": dataclasses.asdict(self.progress)
                | {"train_seconds": self.watch.seconds},
                "running": self.running.gather(),
                "running_steps": self.running.steps,
            }
        )
        parts = {
            n: plain_state(p, f"the state of the {n}") for n, p in state.items() if n != "model"
        }
        return {**state, **parts}

    def _change(self, model: Mapping[str, Any]) -> str | None:
        """Return the first shape or type in the state dict `model` that the built model lacks."""
        if _layout(model) == self._layout:
            return None
        changed = _first_change(self._built, _shapes(model))
        return changed or _first_change(self._types, _types(model))

    def model_state(self) -> dict[str, Any]:
        """Return the model's tensors and extra state, as a checkpoint has them."""
        state = self.model.state_dict()
        return {
            name: plain_state(value, f"the model's {name}", True) for name, value in state.items()
        }

    def restore(self, saved: Mapping[str, Any], strategy: Strategy, path: Path) -> None:
        """Continue from what `capture` returned for the run in `path`, on any number of ranks.

        Raises:
            WrongUse: The saved state is of another model or optimizer.
        """
        # Compare the model and the optimizer with the checkpoint.
        if changed := self.other_shape(saved):
            raise WrongUse(
                f"the checkpoint in {path} is of another model or optimizer ({changed}): undo the "
                "change of the task, or start a new run with --run NAME"
            )
        # Restore all parts of the state.
        _load(self.model, saved["model"], strategy)
        self._restore_optimizer(saved["optimizer"], strategy)
        self.scaler.load_state_dict(saved["scaler"])
        self.progress = Progress(**saved["progress"])
        self.watch = Stopwatch(self.progress.train_seconds)
        self.running.restore(saved["running"], saved["running_steps"])

    def other_shape(self, saved: Mapping[str, Any]) -> str | None:
        """Return the first part of `saved` of another shape, as `name: old -> new`, or None."""
        found, here = _shapes(saved["model"]), _shapes(self.model.state_dict())
        found["optimizer"] = saved["optimizer_class"]
        here["optimizer"] = type(self.optimizer).__name__
        return _first_change(found, here)

    def _restore_optimizer(self, state: Mapping[str, Any], strategy: Strategy) -> None:
        parameters = [
            parameter for group in self.optimizer.param_groups for parameter in group["params"]
        ]
        # Beside the state of parameters, under numbers, an optimizer may have other state, under
        # texts.
        saved = {
            i: {n: strategy.share(v, parameters[i]) for n, v in values.items()}
            for i, values in state["state"].items()
            if isinstance(i, int)
        }
        self.optimizer.load_state_dict({**state, "state": state["state"] | saved})
        # Torch converts a state to the type of its parameter, such as float64 to float32: undo it.
        for index, values in saved.items():
            converted = self.optimizer.state[parameters[index]]
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and converted[name].dtype != value.dtype:
                    converted[name] = value.to(converted[name].device, copy=True)


@dataclass
class Inference:
    """The parts that compute a validation.

    Attributes:
        loss_module: A module that computes the losses of a batch. It wraps `model`.
        evaluation: This rank's batches of the validation set.
        workers: The number of loader workers.
        frozen: A description of the weights that do not train because of `--freeze`.
        keeps_on_host: Whether an evaluation copies the weights to the CPU, because the device may
            have less memory than the device of the training.
    """

    keeps_on_host: ClassVar[bool] = True

    task: Task
    config: Settings
    strategy: Strategy
    model: nn.Module
    loss_module: nn.Module
    autocast_dtype: torch.dtype | None
    evaluation: EvaluationBatches
    workers: int
    frozen: str

    @property
    def world(self) -> World:
        return self.strategy.world

    def evaluating(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Return a context in which the model is in evaluation mode, as `buffers.evaluating`."""
        return evaluating(self.model, self.keeps_on_host)

    @contextlib.contextmanager
    def leaves_the_model(self, method: str) -> Iterator[None]:
        """Run `method` of the task, which must not change what a checkpoint has.

        Raises:
            WrongUse: It has changed a buffer or a parameter.
        """
        with left_alone(self.model) as changed:
            yield
        if changed:
            raise WrongUse(
                f"task {type(self.task).__name__}: {method} changes {changed[0]} of the model, "
                "whose digest is recorded before: count in losses() with train_metrics, or end the "
                "training by --early-stopping"
            )

    def inside(self, compute: Callable[[], T]) -> T:
        """Return `compute()`, which uses the model outside a training forward."""
        return self.strategy.inside(self.loss_module, compute)


@dataclass
class Job(Inference):
    """The parts of one training, which `fit` uses.

    Attributes:
        state: The content of a checkpoint: the model, the optimizer, the progress.
        schedule: The number of steps, and the micro-batches of this rank in each step.
        reduction: Adds the gradients of all shards.
        in_both: The number of validation examples that are also training examples, or None if it is
            not known.
        initial: The origin of the weights that the run starts from, for its manifest.
        sources: The loaded source files, to compare later; set when the manifest is written.
        end_step: The step after which this training ends.
        before_step: Called before each step with the number of steps of this start, and with the
            seconds that they waited for data.
        rehearsal: The entry of the manifest about the rehearsal of this start.
        notes: Lines about what may be wrong with the data or the task, also from the rehearsal.
        eager: Why the steps are not captured as CUDA graphs, or "" if they are.
        broken_start: Which loss or gradient was infinite or NaN before the first update, or "".
        starts_at_zero: Whether the gradient of the first step was 0 in all parameters.
        with_gradient: The parameters that this rank's first steps gave a gradient.
        check_hidden_state: Notes the state outside checkpoints that has changed.
    """

    keeps_on_host: ClassVar[bool] = False  # the copy fits where the gradients were

    run: RunLog
    gpus: RunGpus
    checkpoints: RunCheckpoints
    state: JobState
    train: Dataset[Any]
    schedule: Schedule
    reduction: Reduction
    in_both: int | None = None
    initial: dict[str, str] | None = None
    sources: SourceRecord | None = None
    before_step: list[Callable[[int, float], None]] = field(default_factory=list)
    rehearsal: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    eager: str = "nothing has shown that they may be captured"
    broken_start: str = ""
    starts_at_zero: bool = False
    with_gradient: set[str] = field(default_factory=set)
    check_hidden_state: Callable[[], None] = lambda: None
    end_step: int = field(init=False)

    def __post_init__(self) -> None:
        self.end_step = self.schedule.total_steps

    def check_unchanged(self) -> None:
        """Compare the loaded source files with the files at the start.

        All ranks must call this, and all raise the same error.

        Raises:
            Changed: A source file differs from the file with which the run was started.
            WrongUse: The ranks have loaded different files.
        """
        if self.sources is None:
            return
        loaded = self.world.from_each(self.sources.newly_loaded())
        try:
            self.sources.compare_and_add(loaded)
        except WrongUse:
            self.checkpoints.drop_held()  # another file may have computed it
            raise

    def is_unchanged(self) -> bool:
        """Return whether the source files that this rank has loaded are as at the start."""
        try:
            if self.sources is not None:
                self.sources.compare_and_add([self.sources.newly_loaded()])
        except WrongUse:
            return False
        return True

    def digests(self, tensors: Mapping[str, Any]) -> dict[str, str]:
        """Return the SHA-256 of each whole tensor; all ranks must call this."""
        return {name: value_digest(self.strategy.whole(value)) for name, value in tensors.items()}


def load_weights(
    model: nn.Module, saved: Mapping[str, Any], strategy: Strategy, path: Path
) -> None:
    """Load the model's state that was `saved` in the checkpoint at `path`, on any number of ranks.

    Raises:
        WrongUse: The saved state is of another model.
    """
    if changed := _first_change(_shapes(saved), _shapes(model.state_dict())):
        raise WrongUse(
            f"{path} is of another model ({changed}): undo the change of the task or of its data"
        )
    _load(model, saved, strategy)


def _load(model: nn.Module, saved: Mapping[str, Any], strategy: Strategy) -> None:
    here = model.state_dict()
    model.load_state_dict(
        {name: strategy.share(value, here[name]) for name, value in saved.items()}
    )


def _first_change(found: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """Return the first entry that differs, as `name: old -> new`, or None."""
    for name in {**found, **here}:
        old, new = found.get(name, "missing"), here.get(name, "missing")
        if old != new:
            return f"{name}: {old} -> {new}"
    return None


def _layout(model: Mapping[str, Any]) -> list[Any]:
    """Return the names, shapes and types of a state dict; a comparison of them takes less time."""
    return [
        (name, value.shape, value.dtype) if isinstance(value, torch.Tensor) else name
        for name, value in model.items()
    ]


def _types(model: Mapping[str, Any]) -> dict[str, str]:
    """Return the type of each tensor of a state dict."""
    return {n: str(value.dtype) for n, value in model.items() if isinstance(value, torch.Tensor)}


def _shapes(model: Mapping[str, Any]) -> dict[str, str]:
    """Return a description of each entry of a state dict: a tensor's shape, or extra state."""
    return {
        name: f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else "extra state"
        for name, value in model.items()
    }
