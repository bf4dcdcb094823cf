"""Batches of a machine on which CUDA cannot pin memory are pageable, and have the same values."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from trainbox import pinned
from trainbox.tensor_trees import tensors_in
from trainer.data.batches import _gathered_pinned
from trainer.data.examples import example_loader

_LINE = (
    "trainbox: CUDA cannot pin memory on this machine (CUDA error 801), as on WSL2: copies between "
    "the host and the GPU are slower\n"
)
_EXAMPLES = [{"x": torch.arange(3.0) + i, "y": (i, f"name {i}")} for i in range(4)]
_FIRST, _SECOND = [(0, 0), (0, 2)], [(0, 1), (0, 3)]


@pytest.fixture(params=[True, False], ids=["pins", "refuses"])
def machine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[str], str]]:
    """Pin memory or refuse it, as CUDA does; return the attempts, and what is printed once."""
    attempts: list[str] = []
    empty = torch.empty

    def attempt(name: str) -> None:
        attempts.append(name)
        if not request.param:
            refused = torch.AcceleratorError("CUDA error: operation not supported\nadvice")
            refused.error_code = 801
            raise refused

    def pin_memory(tensor: Tensor) -> Tensor:
        attempt("pin_memory")
        return tensor.clone()

    def pinned_empty(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            attempt("empty")
        return empty(*size, **options)

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch, "empty", pinned_empty)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    pinned._report_pageable.cache_clear()
    yield attempts, "" if request.param else _LINE
    pinned._report_pageable.cache_clear()


def test_batches_of_a_loader(
    machine: tuple[list[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    cpu, cuda = (
        list(example_loader(_EXAMPLES, 0, [_FIRST, _SECOND], torch.device(name), 0))
        for name in ("cpu", "cuda")
    )
    assert machine[0] == ["pin_memory"] * 4  # x and the number of y, twice
    assert [(batch["x"].tolist(), batch["y"][1]) for batch in cuda] == [
        (batch["x"].tolist(), batch["y"][1]) for batch in cpu
    ]
    assert all(map(torch.equal, tensors_in(cuda), tensors_in(cpu)))
    assert capsys.readouterr().err == machine[1]


def test_batches_of_tensors(
    machine: tuple[list[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = torch.arange(5), torch.arange(10.0).view(5, 2)
    first, second = _gathered_pinned(tensors, torch.tensor([3, 1]))
    assert machine[0] == ["empty", "empty"]
    assert (first.tolist(), second.tolist()) == ([3, 1], [[6, 7], [2, 3]])
    assert capsys.readouterr().err == machine[1]
