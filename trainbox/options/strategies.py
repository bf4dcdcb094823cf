"""The launch strategies, and what each of them supports.

To add one, add its row here, and its class to `STRATEGIES` in trainer/parallel/strategy.py.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StrategyRules:
    """What the launcher and the trainer have to know of a strategy.

    Attributes:
        help: Its text on help pages, or "" if it cannot be requested.
        by_torchrun: Whether torchrun starts its ranks. If not, there is one process.
        least_processes: The number of processes that it needs.
        keeps_shards: Whether a run keeps its number of shards, and so its bits, on any number of
            processes. If not, each start has one shard for each process.
        allows_fp16: Whether gradients may be scaled, as fp16 needs.
        allows_compile: Whether it is tested with torch.compile.
        allows_channels_last: Whether weights keep the memory format `channels_last`.
    """

    help: str = ""
    by_torchrun: bool = True
    least_processes: int = 1
    keeps_shards: bool = True
    allows_fp16: bool = True
    allows_compile: bool = True
    allows_channels_last: bool = True


STRATEGY_RULES = {
    "single": StrategyRules(by_torchrun=False),
    "ddp": StrategyRules("torchrun, one process per GPU"),
    "fsdp": StrategyRules(
        "the same, each with a share of a model that is too large for one GPU",
        least_processes=2,
        keeps_shards=False,  # torch adds the gradients in an order that depends on the world size
        allows_fp16=False,
        allows_compile=False,
        allows_channels_last=False,
    ),
    "dp": StrategyRules("DataParallel", by_torchrun=False, allows_channels_last=False),
}


def bits_depend_on_processes(name: Any) -> bool:
    """Return whether another number of processes gives other bits under the strategy `name`."""
    rules = STRATEGY_RULES.get(name) if isinstance(name, str) else None
    return rules is not None and not rules.keeps_shards
