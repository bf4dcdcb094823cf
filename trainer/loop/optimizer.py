"""The optimizer of a task, which may be several optimizers."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainbox.errors import WrongUse
from trainbox.options.config import Settings, scaled_learning_rate
from trainbox.task import Task
from trainer.loop.task_checks import wrong_result


def build_optimizer(task: Task, config: Settings, model: nn.Module) -> Optimizer:
    """Return the task's optimizer with the settings of the run. Several optimizers become one.

    Each group keeps its peak learning rate as `initial_lr`.

    Raises:
        WrongUse: No parameter of `model` trains, an optimizer has no parameter of `model`, two have
            the same one, a step needs arguments, or the optimizer has other weights for an
            evaluation.
    """
    parameters = list(model.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        raise WrongUse(
            f"task {type(task).__name__}: all {len(parameters)} parameters of the model have "
            "requires_grad=False: leave it True in a layer of build_model(), such as the last one"
        )
    peak = scaled_learning_rate(
        config.learning_rate, config.lr_scaling, config.batch_size, config.base_batch_size
    )
    built: Any = task.build_optimizer(model, config.optimizer, peak, config.weight_decay)
    parts: Sequence[Any] = built if isinstance(built, tuple) and built else (built,)
    for part in parts:
        _check(task, part, model)
    try:
        optimizer = joined(parts)
    except ValueError:
        raise WrongUse(
            f"task {type(task).__name__}: build_optimizer() gives a parameter to two optimizers: "
            "give each optimizer parameters of its own"
        ) from None
    for group in optimizer.param_groups:
        group["initial_lr"] = float(group["lr"])  # a task may give a tensor
    return optimizer


def _check(task: Task, built: Any, model: nn.Module) -> None:
    if not isinstance(built, Optimizer):
        wanted = "a torch.optim.Optimizer or a tuple of them"
        raise wrong_result(task, "build_optimizer", built, wanted)
    kind, own = type(built), set(model.parameters())
    if not any(own.intersection(group["params"]) for group in built.param_groups):
        raise WrongUse(
            f"task {type(task).__name__}: build_optimizer() returned {kind.__name__}, which has no "
            "parameter of the model: give it model.parameters()"
        )
    if callable(getattr(built, "train", None)) and callable(getattr(built, "eval", None)):
        raise WrongUse(
            f"task {type(task).__name__}: {kind.__name__} keeps other weights for training than "
            "for evaluation, and Trainbox does not call its train() and eval(): use another "
            "optimizer, such as AdamW"
        )
    if not {"state", "param_groups"} <= (saved := built.state_dict()).keys():
        raise WrongUse(
            f"task {type(task).__name__}: {kind.__name__}.state_dict() has {', '.join(saved)} "
            "instead of the entries state and param_groups, which a checkpoint needs: keep its own "
            "values in self.state and in the parameter groups"
        )
    try:
        inspect.signature(kind.step).bind(built)  # a scheduler replaces the method of the object
    except TypeError as error:
        raise WrongUse(
            f"task {type(task).__name__}: {kind.__name__}.step() cannot be called without "
            f"arguments ({error}), as a training step does: use another optimizer, such as AdamW"
        ) from None


class _Joined(Optimizer):
    """Several optimizers, the `parts`, as one: it shares their parameter groups and their state."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = tuple(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            self.state.update(part.state)  # some optimizers make their state before the first step
        self._share()

    def _share(self) -> None:
        """Let the parts use this optimizer's groups and state."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


def joined(parts: Sequence[Optimizer]) -> Optimizer:
    """Return one optimizer, which steps the `parts` in their order, or the only part.

    The name of its class consists of the names of the parts' classes. A resume compares this name
    with the name in the checkpoint.

    Raises:
        ValueError: Two optimizers have the same parameter.
    """
    if len(parts) == 1:
        return parts[0]
    name = " + ".join(type(part).__name__ for part in parts)
    optimizer: Optimizer = type(name, (_Joined,), {})(parts)
    return optimizer
