"""Measure the host's part of a training step: what Python and torch do beside the computation.

The model is so small that its computation takes less time than the calls that start it. A captured
step whose replay does nothing is what the host does while a GPU replays a graph.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.loop import RandomMnist, bare_loop, in_turns, median_and_interval
from trainer.loop import graphs
from trainer.parallel.world import World

T = TypeVar("T")
_TURNS, _STEPS = 40, 200


@dataclass(frozen=True)
class Tiny(RandomMnist):
    """A perceptron of 16 inputs and 16 hidden units."""

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        images_N128, labels_N = super().train_dataset(data_dir).tensors
        return TensorDataset(images_N128[:, :, :4, :4].contiguous(), labels_N)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))


class _Nothing:
    """As `graphs.Recorder`, but the work is computed once, and a replay does nothing."""

    def __init__(self, world: World) -> None:
        pass

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        return work(), lambda: None


def measure() -> Iterator[str]:
    yield "| step, perceptron of 16 units, batch 128 | CPU time of a turn, to a bare loop by hand |"
    yield "|---|---|"
    for name, captures in (("eager", False), ("captured, whose replay does nothing", True)):
        with patch.object(graphs, "Recorder", _Nothing):
            task = Tiny(examples=128 * 400)
            ours, by_hand = in_turns(task, _TURNS, _STEPS, "fp32", bare_loop, captures)
        ratios = [mine[1] / plain[1] for mine, plain in zip(ours, by_hand, strict=True)]
        yield f"| {name} | {median_and_interval(ratios)} |"
