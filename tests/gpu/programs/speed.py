"""Measure training steps against a loop by hand, as CUDA graphs, and with records."""

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.loop import BATCH_SIZE, LEARNING_RATE, Mlp, RandomMnist
from tests.gpu.program import tried
from tests.gpu.programs.training import train
from trainer.records.digest import value_digest

_GRAPH_STEPS = 50
MODELS: dict[str, RandomMnist] = {"Mlp": Mlp(), "RandomMnist": RandomMnist()}
# What Trainbox records beside the steps, each more often than by default.
RECORDS: dict[str, dict[str, Any]] = {
    "default": {},
    "--log-steps 1": {"log_steps": 1},
    "--digest-steps 1": {"digest_steps": 1},
    "--digest-steps 100000": {"digest_steps": 100_000},
    "--eval-every 100000": {"eval_every": 100_000},
    "--fast": {"deterministic": False},
}


def measure(device: str, folder: str, seconds: float) -> Iterator[tuple[str, Any]]:
    """Yield steps per second: by hand, as a graph, of Trainbox, and of Trainbox with records."""
    rate = {"learning_rate": LEARNING_RATE, "batch_size": BATCH_SIZE}
    for name, task in MODELS.items():
        for precision in ("fp32", "bf16"):
            case, spec = f"{name} {precision}", f"benchmarks.loop:{name}"
            settings = {"precision": precision, **rate}
            yield f"{case} by hand", tried(partial(_by_hand, device, task, precision, seconds))
            yield (
                f"{case} Trainbox",
                tried(partial(_steps_per_s, device, folder, case, spec, seconds, settings)),
            )
            if device == "cuda":
                yield f"{case} graph", tried(partial(_graph, task, precision, seconds))
    for name, settings in RECORDS.items():
        case = f"digits {name}"
        yield case, tried(partial(_steps_per_s, device, folder, case, "digits", seconds, settings))


def _steps_per_s(
    device: str, folder: str, case: str, task: str, seconds: float, settings: dict[str, Any]
) -> float:
    run = case.replace(" ", "-").replace("--", "-")
    options = {"epochs": 100_000, "batch_size": 64, **settings}
    found = train(device, folder, run, task, measure_s=seconds, **options)
    return found["samples_per_second"] / options["batch_size"]


class _Hand:
    """A loop by hand: data on the device, fused AdamW, autocast, and no record of anything."""

    def __init__(self, device: str, task: RandomMnist, precision: str, graph: bool) -> None:
        torch.manual_seed(0)
        self.device, self.precision, self.graph = device, precision, graph
        images, labels = task.train_dataset(Path()).tensors
        self.images, self.labels = images.to(device), labels.to(device)
        self.model: nn.Module = task.build_model().to(device).train()
        rate = torch.tensor(LEARNING_RATE, device=device) if graph else LEARNING_RATE
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=rate, fused=device == "cuda", capturable=graph
        )

    def batch(self) -> Tensor:
        return torch.randint(len(self.images), (BATCH_SIZE,), device=self.device)

    def step(self, indices: Tensor) -> None:
        images, labels = self.images[indices].float() / 255, self.labels[indices]
        mixed = torch.autocast(self.device, torch.bfloat16, cache_enabled=not self.graph)
        with mixed if self.precision == "bf16" else contextlib.nullcontext():
            loss = F.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad(set_to_none=not self.graph)
        loss.backward()
        self.optimizer.step()


def _by_hand(device: str, task: RandomMnist, precision: str, seconds: float) -> float:
    hand = _Hand(device, task, precision, graph=False)
    return _rate(device, lambda: hand.step(hand.batch()), seconds)


def _rate(device: str, step: Callable[[], None], seconds: float) -> float:
    """Return the steps per second, after a warm-up of 20 steps."""
    for _ in range(20):
        step()
    _finish(device)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(20):
            step()
        count += 20
        _finish(device)
    return count / (time.perf_counter() - begin)


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _graph(task: RandomMnist, precision: str, seconds: float) -> dict[str, Any]:
    """Replay one captured step; return its rate, and whether it has the bits of eager steps."""
    digests = []
    rate = 0.0
    for captured in (False, True):
        hand = _Hand("cuda", task, precision, graph=True)
        generator = torch.Generator("cuda").manual_seed(1)
        batches = [
            torch.randint(len(hand.images), (BATCH_SIZE,), device="cuda", generator=generator)
            for _ in range(_GRAPH_STEPS)
        ]
        indices = batches[0].clone()
        replay = _captured(hand, indices) if captured else partial(hand.step, indices)
        for batch in batches:
            indices.copy_(batch)
            replay()
        torch.cuda.synchronize()
        digests.append(value_digest(hand.model.state_dict()))
        if captured:
            rate = _rate("cuda", replay, seconds)
    return {"steps_per_s": rate, "same_bits": digests[0] == digests[1]}


def _captured(hand: _Hand, indices: Tensor) -> Callable[[], None]:
    """Capture one step in a CUDA graph, and return its replay; the model is as before."""
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
