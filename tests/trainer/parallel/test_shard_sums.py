"""Tensors of several types are added and exchanged together, with the same bits on all ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.parallel.shard_sums import Exchange
from trainer.parallel.world import World

CPU = torch.device("cpu")
SHARDS = 5


class _Transfer:
    """A transfer that is done when it is waited for, after all ranks have started theirs."""

    def __init__(self, transfer: Callable[[], None]) -> None:
        self.wait = transfer


class _Ranks:
    """Ranks of one process, whose transfers copy tensors."""

    def __init__(self, world_size: int) -> None:
        self.transfers = 0
        self._slices: dict[int, Any] = {}
        self._sums: dict[int, Tensor] = {}
        self.worlds = [World(rank, world_size, CPU) for rank in range(world_size)]
        for world in self.worlds:
            world.all_to_all = self._all_to_all(world.rank)  # type: ignore[method-assign]
            world.all_gather = self._all_gather(world.rank)  # type: ignore[method-assign]

    def _all_to_all(self, rank: int) -> Any:
        def start(received: Tensor, sent: Tensor, _counts: Any, sent_counts: list[int]) -> Any:
            self.transfers += 1
            self._slices[rank] = sent.split(sent_counts)
            return _Transfer(
                lambda: received.copy_(torch.cat([sent[rank] for sent in self._slices.values()]))
            )

        return start

    def _all_gather(self, rank: int) -> Any:
        def start(received: Tensor, sent: Tensor) -> Any:
            self.transfers += 1
            self._sums[rank] = sent
            return _Transfer(lambda: received.copy_(torch.cat(list(self._sums.values()))))

        return start


def _tensors(shard: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(shard)
    transposed = torch.randn(40, 50, generator=generator).T
    floats = [torch.randn(size, generator=generator) for size in (3, 700)]
    halves = [torch.randn(129, generator=generator).bfloat16(), torch.tensor(0.1).bfloat16()]
    return [*floats, transposed, *halves, torch.tensor(shard), torch.arange(9) * shard]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_several_types_have_the_same_sums_in_one_exchange(world_size: int) -> None:
    ranks = _Ranks(world_size)
    likes = _tensors(0)
    exchanges = [Exchange(world, SHARDS, likes) for world in ranks.worlds]
    for _step in range(2):
        ranks.transfers = 0
        for world, exchange in zip(ranks.worlds, exchanges, strict=True):
            for shard in world.owned(SHARDS):
                exchange.push(shard, _tensors(shard))
            exchange.start()
        for exchange in exchanges:
            exchange.add()
        shards = [_tensors(shard) for shard in range(SHARDS)]
        expected = [((a + b) + (c + d)) + e for a, b, c, d, e in zip(*shards, strict=True)]
        for exchange in exchanges:
            for found, total in zip(exchange.totals(), expected, strict=True):
                assert found.dtype == total.dtype
                assert found.stride() == total.stride()
                assert torch.equal(found, total)
        assert ranks.transfers == (0 if world_size == 1 else 2 * world_size)
