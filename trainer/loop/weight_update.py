"""Update the weights with torch's fused Adam or AdamW, without parts of its step that do not apply.

torch's `step` looks for missing state, hooks, a profiler and GPUs each time. For a small perceptron
on a CPU, this takes 0.11 ms of a step of 2.8 ms.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.adam import adam


def weight_update(optimizer: Optimizer, scaler: GradScaler) -> Callable[[], None]:
    """Return a function that updates the weights with the same bits as `scaler.step(optimizer)`."""

    def update() -> None:
        scaler.step(optimizer)
        scaler.update()

    # A subclass may have changed the step.
    if scaler.is_enabled() or type(optimizer) not in (Adam, AdamW):
        return update
    assert isinstance(optimizer, Adam)

    def update_fused() -> None:
        states = [_states(optimizer, group) for group in optimizer.param_groups]
        if all(states) and not _is_extended(optimizer):
            for group, states_P in zip(optimizer.param_groups, states, strict=True):
                _update_group(group, states_P)
        else:
            optimizer.step()

    return update_fused


def _states(optimizer: Adam, group: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Return the state of each parameter of `group`, or nothing if only torch can update it.

    This is so before the first update, and if a parameter has no gradient.
    """
    if not group["fused"] or group["amsgrad"]:
        return []
    states_P = [
        state
        for parameter in group["params"]
        if parameter.grad is not None and (state := optimizer.state.get(parameter))
    ]
    return states_P if len(states_P) == len(group["params"]) else []


def _is_extended(optimizer: Optimizer) -> bool:
    """Return whether other code runs in each step: a hook, or a wrapper such as a scheduler's."""
    return bool(
        "step" in vars(optimizer)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


@torch.no_grad()
def _update_group(group: Mapping[str, Any], states_P: list[dict[str, Tensor]]) -> None:
    """Update the P parameters of a group."""
    beta1, beta2 = group["betas"]
    adam(
        group["params"],
        [parameter.grad for parameter in group["params"]],
        [state["exp_avg"] for state in states_P],
        [state["exp_avg_sq"] for state in states_P],
        [],
        [state["step"] for state in states_P],
        fused=True,
        # True for AdamW. Adam has an option for it.
        decoupled_weight_decay=group["decoupled_weight_decay"],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )
