"""The update of the weights has the bits of torch's step, and torch does what only torch can do."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from trainer.loop.weight_update import weight_update

STEPS = 4
Build = Callable[[list[nn.Parameter]], Optimizer]


def _adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=0.1, fused=True)


def _parameters(*dtypes: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [
        nn.Parameter(torch.randn(size, generator=generator).to(dtype))
        for size, dtype in zip((40, 3, 7), dtypes or [torch.float32] * 3, strict=False)
    ]


def _step(optimizer: Optimizer, update: Callable[[], object], step: int, *without: int) -> None:
    """Update with new gradients, and without one for the parameters `without`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    generator = torch.Generator().manual_seed(step)
    for index, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if index in without else gradient.to(parameter.dtype)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.9
    update()


def _tensors(optimizer: Optimizer) -> list[Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        tensor
        for parameter in parameters
        for tensor in (parameter.detach(), *optimizer.state[parameter].values())
    ]


def _assert_same_bits(optimizer: Optimizer, expected: Optimizer) -> None:
    ours, theirs = _tensors(optimizer), _tensors(expected)
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


@pytest.fixture
def torch_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that torch's own optimizers made."""
    steps = list[str]()

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Optimizer, *arguments: Any) -> Any:
            steps.append(name)
            return real(self, *arguments)

        step.hooked = True  # otherwise torch wraps it, for other tests as well
        return step

    for kind, real in [(kind, kind.step) for kind in (Adam, AdamW, SGD)]:
        monkeypatch.setattr(kind, "step", noted(kind.__name__, real))
    return steps


@pytest.mark.parametrize(
    "build",
    [
        _adamw,
        lambda parameters: Adam(parameters, lr=0.1, fused=True, weight_decay=0.1),
        lambda parameters: Adam(
            parameters, fused=True, weight_decay=0.1, decoupled_weight_decay=True
        ),
        lambda parameters: AdamW(parameters, betas=(0.5, 0.7), eps=1e-3, maximize=True, fused=True),
        lambda parameters: AdamW(
            [
                {"params": parameters[:2], "weight_decay": 0.0},
                {"params": parameters[2:], "lr": 0.5, "betas": (0.1, 0.2)},
            ],
            fused=True,
        ),
    ],
    ids=["AdamW", "Adam", "Adam as AdamW", "all options", "groups"],
)
def test_a_fused_update_has_the_bits_of_torch(build: Build, torch_steps: list[str]) -> None:
    optimizer, expected = build(_parameters()), build(_parameters())
    update = weight_update(optimizer, GradScaler("cpu", enabled=False))
    for step in range(STEPS):
        _step(optimizer, update, step)
        assert len(torch_steps) == 1  # torch makes the state in the first step
    for step in range(STEPS):
        _step(expected, expected.step, step)
    _assert_same_bits(optimizer, expected)


def test_a_restored_state_is_used(torch_steps: list[str]) -> None:
    first = _adamw(_parameters())
    _step(first, first.step, 0)
    optimizer = _adamw([nn.Parameter(p.detach().clone()) for p in first.param_groups[0]["params"]])
    update = weight_update(optimizer, GradScaler("cpu", enabled=False))
    optimizer.load_state_dict(copy.deepcopy(first.state_dict()))
    _step(first, first.step, 1)
    torch_steps.clear()
    _step(optimizer, update, 1)
    assert not torch_steps
    _assert_same_bits(optimizer, first)

    optimizer.load_state_dict(copy.deepcopy(first.state_dict()))  # other tensors than before
    _step(first, first.step, 2)
    _step(optimizer, update, 2)
    _assert_same_bits(optimizer, first)


def test_mixed_types_are_updated_each_with_its_own_type(torch_steps: list[str]) -> None:
    types = (torch.float32, torch.float64, torch.bfloat16)
    optimizer, expected = _adamw(_parameters(*types)), _adamw(_parameters(*types))
    update = weight_update(optimizer, GradScaler("cpu", enabled=False))
    for step in range(STEPS):
        _step(optimizer, update, step)
    assert len(torch_steps) == 1
    for step in range(STEPS):
        _step(expected, expected.step, step)
    _assert_same_bits(optimizer, expected)


@pytest.mark.parametrize(
    "build",
    [
        lambda parameters: AdamW(parameters, fused=True, amsgrad=True),
        lambda parameters: AdamW(parameters, foreach=False),
        lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, fused=True),
        lambda parameters: type("Other", (AdamW,), {})(parameters, fused=True),
    ],
    ids=["amsgrad", "not fused", "SGD", "subclass"],
)
def test_torch_steps_other_optimizers(build: Build, torch_steps: list[str]) -> None:
    optimizer, expected = build(_parameters()), build(_parameters())
    update = weight_update(optimizer, GradScaler("cpu", enabled=False))
    for step in range(STEPS):
        _step(optimizer, update, step)
    assert len(torch_steps) == STEPS
    for step in range(STEPS):
        _step(expected, expected.step, step)
    _assert_same_bits(optimizer, expected)


def test_a_parameter_without_a_gradient_stays() -> None:
    optimizer, expected = _adamw(_parameters()), _adamw(_parameters())
    update = weight_update(optimizer, GradScaler("cpu", enabled=False))
    for step, without in enumerate([(1,), (), (0, 2), (1,), ()]):
        _step(optimizer, update, step, *without)
        _step(expected, expected.step, step, *without)
        _assert_same_bits(optimizer, expected)


def test_a_new_group_of_parameters_is_updated() -> None:
    optimizer, expected = _adamw(_parameters()), _adamw(_parameters())
    update = weight_update(optimizer, GradScaler("cpu", enabled=False))
    for step in range(STEPS):
        if step == 2:
            for one in (optimizer, expected):
                one.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        _step(optimizer, update, step)
        _step(expected, expected.step, step)
    _assert_same_bits(optimizer, expected)


def test_hooks_and_wrappers_run_in_each_step(torch_steps: list[str]) -> None:
    def nothing(*_arguments: Any) -> None:
        return None

    for extend in (
        lambda optimizer: optimizer.register_step_pre_hook(nothing),
        lambda optimizer: optimizer.register_step_post_hook(nothing),
        lambda optimizer: StepLR(optimizer, 1),
        lambda _: register_optimizer_step_pre_hook(nothing),
        lambda _: register_optimizer_step_post_hook(nothing),
    ):
        optimizer = _adamw(_parameters())
        update = weight_update(optimizer, GradScaler("cpu", enabled=False))
        _step(optimizer, update, 0)
        handle = extend(optimizer)
        torch_steps.clear()
        _step(optimizer, update, 1)
        _step(optimizer, update, 2)
        assert len(torch_steps) == 2
        if hasattr(handle, "remove"):
            handle.remove()


def test_the_scaler_of_fp16_skips_an_update_that_is_not_finite() -> None:
    optimizer = _adamw(_parameters())
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    update = weight_update(optimizer, scaler)
    before = optimizer.param_groups[0]["params"][0].detach().clone()
    _step(optimizer, lambda: None, 0)
    optimizer.param_groups[0]["params"][2].grad[0] = torch.inf
    update()
    assert torch.equal(optimizer.param_groups[0]["params"][0], before)
    assert scaler.get_scale() == 2.0
    _step(optimizer, update, 1)
    assert not torch.equal(optimizer.param_groups[0]["params"][0], before)
