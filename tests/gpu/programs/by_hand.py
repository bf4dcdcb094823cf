"""Measure loops by hand over data on the device, in a process with torch's own settings."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.loop import BATCH_SIZE, LEARNING_RATE, Mlp, RandomMnist
from tests.gpu.program import tried
from trainer.tasks.digits import Digits
from trainer.tasks.language.gpt import BYTES, Gpt

_PROFILED_STEPS, _SHOWN = 10, 12
TASKS: dict[str, Any] = {"Mlp": Mlp(), "RandomMnist": RandomMnist(), "Digits": Digits()}


def measure(
    device: str,
    seconds: float,
    rows: Sequence[tuple[str, str, str]],
    text: dict[str, int] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield ("TASK PRECISION KIND", steps per second) for each of `rows`.

    The kinds are `eager`, `compile`, and `profile`, which yields the kernels of a step. The task
    Text has the sizes `text`.
    """
    for name, precision, kind in rows:
        make = partial(_Gpt, text) if name == "Text" else partial(_Classifier, TASKS[name])
        # torch computes convolutions in TF32 by default, which is not fp32.
        torch.backends.cudnn.allow_tf32 = precision != "fp32"
        torch.backends.cudnn.benchmark = True
        found = partial(_rate_of, seconds=seconds, compiled=kind == "compile")
        if kind == "profile":
            found = partial(_profile_of)
        yield f"{name} {precision} {kind}", tried(partial(found, make, device, precision))


class _Hand:
    """A loop by hand: data on the device, fused AdamW, autocast, and no record of anything."""

    def __init__(self, model: nn.Module, device: str, precision: str) -> None:
        self.device, self.precision = device, precision
        self.model = self.trained = model.to(device).train()
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, fused=device == "cuda"
        )

    def batch(self) -> Tensor:
        raise NotImplementedError

    def loss(self, indices: Tensor) -> Tensor:
        raise NotImplementedError

    def step(self, indices: Tensor) -> None:
        mixed = torch.autocast(self.device, torch.bfloat16)
        with mixed if self.precision == "bf16" else contextlib.nullcontext():
            loss = self.loss(indices)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


class _Classifier(_Hand):
    def __init__(self, task: Any, device: str, precision: str) -> None:
        super().__init__(task.build_model(), device, precision)
        self.task = task
        images, labels = task.train_dataset(Path()).tensors
        self.images, self.labels = images.to(device), labels.to(device)

    def batch(self) -> Tensor:
        return torch.randint(len(self.images), (BATCH_SIZE,), device=self.device)

    def loss(self, indices: Tensor) -> Tensor:
        batch = self.images.index_select(0, indices), self.labels.index_select(0, indices)
        images, labels = self.task.prepare(batch, training=True)
        return F.cross_entropy(self.trained(images), labels)


class _Gpt(_Hand):
    """A language model of random bytes, whose batch is windows at random positions."""

    def __init__(self, text: dict[str, int], device: str, precision: str) -> None:
        sizes = {name: text[name] for name in ("layers", "heads", "width", "context")}
        super().__init__(Gpt(**sizes, dropout=0.0), device, precision)
        self.windows, self.context = text["batch_size"], text["context"]
        self.bytes = torch.randint(BYTES, (2**20,), dtype=torch.uint8, device=device)
        self.within = torch.arange(self.context + 1, device=device)

    def batch(self) -> Tensor:
        return torch.randint(2**20 - self.context, (self.windows, 1), device=self.device)

    def loss(self, indices: Tensor) -> Tensor:
        bytes_BT = self.bytes[indices + self.within].long()
        logits_BTK = self.trained(bytes_BT[:, :-1])
        return F.cross_entropy(logits_BTK.flatten(0, 1), bytes_BT[:, 1:].flatten())


def _rate_of(
    make: Callable[..., _Hand], device: str, precision: str, seconds: float, compiled: bool
) -> float:
    hand = make(device, precision)
    if compiled:
        hand.trained = torch.compile(hand.model)
    return steps_per_s(device, lambda: hand.step(hand.batch()), seconds)


def _profile_of(make: Callable[..., _Hand], device: str, precision: str) -> list[Any]:
    """Return the kernels of a step that take the most time, as (name, ms)."""
    hand = make(device, precision)
    return slowest_kernels(device, lambda: hand.step(hand.batch()))


def slowest_kernels(device: str, step: Callable[[], None]) -> list[tuple[str, float]]:
    """Return the kernels of `step` that take the most time, as (name, ms)."""
    for _ in range(3):
        step()
    with torch.profiler.profile() as profile:
        for _ in range(_PROFILED_STEPS):
            step()
        _finish(device)
    on = "device" if device == "cuda" else "cpu"
    times = {event.key: getattr(event, f"self_{on}_time_total") for event in profile.key_averages()}
    most = sorted(times, key=lambda name: -times[name])[:_SHOWN]
    return [(name[:80], round(times[name] / 1000 / _PROFILED_STEPS, 3)) for name in most]


def steps_per_s(device: str, step: Callable[[], None], seconds: float) -> float:
    """Return the steps per second of about `seconds`, after 0.4 times as long a warm-up.

    The measured steps wait for the GPU only at their end.
    """
    for _ in range(2):  # compile, and choose the algorithms of convolutions
        step()
    done, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < 0.4 * seconds:
        step()
        _finish(device)
        done += 1
    count = max(1, round(done / 0.4))
    begin = time.perf_counter()
    for _ in range(count):
        step()
    _finish(device)
    return count / (time.perf_counter() - begin)


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
