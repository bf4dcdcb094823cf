"""Several optimizers of a task as one, so that a step and a checkpoint have one optimizer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class _Joined(Optimizer):
    """Steps each of its `parts`, whose parameter groups and state it has."""

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

    The name of its class has the names of theirs. A resume compares this name with that of the
    checkpoint.

    Raises:
        ValueError: Two optimizers have the same parameter.
    """
    if len(parts) == 1:
        return parts[0]
    name = " + ".join(type(part).__name__ for part in parts)
    optimizer: Optimizer = type(name, (_Joined,), {})(parts)
    return optimizer
