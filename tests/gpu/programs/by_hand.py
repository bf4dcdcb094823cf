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
from trainer.run.digest import value_digest
from trainer.tasks.digits import Digits
from trainer.tasks.language.gpt import BYTES, Gpt

_GRAPH_STEPS = 50
TASKS: dict[str, Any] = {"Mlp": Mlp(), "RandomMnist": RandomMnist(), "Digits": Digits()}


def measure(
    device: str,
    seconds: float,
    rows: Sequence[tuple[str, str, str]],
    text: dict[str, int] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield ("TASK PRECISION KIND", steps per second) for each of `rows`.

    The kinds are `eager`, `compile` and `graph`, which has the bits under two seeds as well. The
    task Text has the sizes `text`.
    """
    for name, precision, kind in rows:
        make = partial(_Gpt, text) if name == "Text" else partial(_Classifier, TASKS[name])
        rate = _graph if kind == "graph" else partial(_rate_of, compiled=kind == "compile")
        # torch computes convolutions in TF32 by default, which is not fp32.
        torch.backends.cudnn.allow_tf32 = precision != "fp32"
        torch.backends.cudnn.benchmark = kind != "graph"
        torch.use_deterministic_algorithms(kind == "graph")
        yield f"{name} {precision} {kind}", tried(partial(rate, make, device, precision, seconds))


class _Hand:
    """A loop by hand: data on the device, fused AdamW, autocast, and no record of anything."""

    def __init__(self, model: nn.Module, device: str, precision: str, graph: bool) -> None:
        self.device, self.precision, self.graph = device, precision, graph
        self.model = self.trained = model.to(device).train()
        on_gpu = device == "cuda"
        rate = torch.tensor(LEARNING_RATE, device=device) if graph and on_gpu else LEARNING_RATE
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=rate, fused=on_gpu, capturable=graph and on_gpu
        )

    def batch(self) -> Tensor:
        raise NotImplementedError

    def loss(self, indices: Tensor) -> Tensor:
        raise NotImplementedError

    def step(self, indices: Tensor) -> None:
        mixed = torch.autocast(self.device, torch.bfloat16, cache_enabled=not self.graph)
        with mixed if self.precision == "bf16" else contextlib.nullcontext():
            loss = self.loss(indices)
        self.optimizer.zero_grad(set_to_none=not self.graph)
        loss.backward()
        self.optimizer.step()


class _Classifier(_Hand):
    def __init__(self, task: Any, device: str, precision: str, graph: bool) -> None:
        torch.manual_seed(0)
        super().__init__(task.build_model(), device, precision, graph)
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

    def __init__(self, text: dict[str, int], device: str, precision: str, graph: bool) -> None:
        sizes = {name: text[name] for name in ("layers", "heads", "width", "context")}
        super().__init__(Gpt(**sizes, dropout=0.0), device, precision, graph)
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
    hand = make(device, precision, graph=False)
    if compiled:
        hand.trained = torch.compile(hand.model)
    return steps_per_s(device, lambda: hand.step(hand.batch()), seconds)


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


def _graph(
    make: Callable[..., _Hand], device: str, precision: str, seconds: float
) -> dict[str, Any]:
    """Replay one captured step; return its rate, and whether it has the bits of eager steps.

    A step is seeded, so that dropout draws the same numbers in both.
    """
    hand = make(device, precision, graph=True)
    batches = [hand.batch() for _ in range(_GRAPH_STEPS)]
    same, rate = [], 0.0
    for seed in (1, 2):
        digests = []
        for captured in (False, True):
            hand, indices = make(device, precision, graph=True), batches[0].clone()
            replay = _captured(hand, indices) if captured else partial(hand.step, indices)
            for number, batch in enumerate(batches):
                torch.manual_seed(seed * _GRAPH_STEPS + number)
                indices.copy_(batch)
                replay()
            _finish(device)
            digests.append(value_digest(hand.model.state_dict()))
            if captured:
                rate = steps_per_s(device, replay, seconds)
        same.append(digests[0] == digests[1])
    return {"steps_per_s": rate, "same_bits": same}


def _captured(hand: _Hand, indices: Tensor) -> Callable[[], None]:
    """Capture one step in a CUDA graph, and return its replay; the model is as before."""
    if hand.device != "cuda":
        return partial(hand.step, indices)
    weights = {name: value.clone() for name, value in hand.model.state_dict().items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            hand.step(indices)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hand.step(indices)
    # Undo the steps of the warm-up, in place, because the graph has the addresses.
    with torch.no_grad():
        for name, value in hand.model.state_dict().items():
            value.copy_(weights[name])
        for state in hand.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
    return graph.replay
