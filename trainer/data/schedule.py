"""Select the examples of each step: a pure function of the seed, the epoch and the step.

A position in a run is an integer, so a resume needs no sampler state.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trainbox.order import derive_seed


@dataclass(frozen=True)
class MicroBatch:
    """The examples of one forward: examples `start` to `stop` of the global batch.

    `part` is the index of the micro-batch in its shard.
    """

    shard: int
    part: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def micro_batches(
    batch_size: int, shards: int, accumulation: int, owned: Iterable[int]
) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of the shards `owned`.

    The sizes of shards differ by at most one example, and so do the sizes of a
    shard's micro-batches.
    """
    cut = []
    for shard in owned:
        begin, end = batch_size * shard // shards, batch_size * (shard + 1) // shards
        for part in range(accumulation):
            start, stop = (begin + (end - begin) * i // accumulation for i in (part, part + 1))
            cut.append(MicroBatch(shard, part, start, stop))
    return tuple(cut)


def epoch_order(seed: int, epoch: int, size: int) -> Tensor:
    """Return the order of the examples in `epoch`, a permutation of shape (size,).

    The permutation depends only on the arguments.
    """
    return torch.randperm(
        size, generator=torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    )


@dataclass(frozen=True)
class Schedule:
    """The steps of a run over `examples` examples.

    Each epoch drops its last incomplete batch. Epochs have different orders, so each epoch drops
    different examples.
    """

    seed: int
    examples: int
    batch_size: int
    total_steps: int
    micros: tuple[MicroBatch, ...]

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        return self.examples // self.batch_size

    def indices(
        self, start_step: int, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (epoch, indices) of this rank's micro-batches from `start_step` to the end."""
        order_epoch, order = -1, torch.empty(0)
        steps_per_epoch = self.steps_per_epoch
        for step in range(start_step, self.total_steps):
            epoch, position = divmod(step, steps_per_epoch)
            if epoch != order_epoch:
                order_epoch, order = epoch, epoch_order(self.seed, epoch, self.examples).to(device)
            first = position * self.batch_size
            for micro in self.micros:
                yield epoch, order[first + micro.start : first + micro.stop]
