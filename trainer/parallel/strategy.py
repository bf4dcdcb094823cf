"""The launch strategies: how a model and its batches are divided among GPUs and processes.

A strategy has a class here and a row in `STRATEGY_RULES`. The rest of the trainer asks a
`Strategy` object and never its name.
"""

import contextlib
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from trainbox.options.strategies import STRATEGY_RULES
from trainbox.processes.environment import launch_facts
from trainer.parallel.world import World

T = TypeVar("T")


class Strategy:
    """What depends on the strategy; by default, each process has the whole model (single, ddp).

    Attributes:
        name: The strategy's name in the launch plan and in the manifest.
        world: This rank's view of the process group.
        rules: The features that the strategy supports.
        forward_is_collective: Whether a forward communicates, so that all ranks must call it.
        gathers_states: Whether `gathered` returns a copy of a state instead of the state itself.
    """

    forward_is_collective: ClassVar[bool] = False
    gathers_states: ClassVar[bool] = False

    def __init__(self, name: str, world: World) -> None:
        self.name, self.world, self.rules = name, world, STRATEGY_RULES[name]

    def wrap(self, module: nn.Module, autocast_dtype: torch.dtype | None) -> nn.Module:
        """Return `module` on this rank's device, so that one forward uses all GPUs of this rank."""
        return module.to(self.world.device)

    def differing_weight(self, digests: Callable[[], Mapping[str, str]]) -> str | None:
        """Return the name of a weight that must be equal on all ranks before `wrap` and is not.

        `digests` returns hexadecimal digests of the weights by name; all ranks must call this.
        """
        return None

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise WrongUse if a checkpoint could not restore the state of `optimizer`."""

    def inside(self, module: nn.Module, compute: Callable[[], T]) -> T:
        """Return `compute()`, which uses the model of the wrapped `module` outside its forward.

        All ranks must call this if `forward_is_collective`.
        """
        return compute()

    def wait_for_all(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return `World.wait_for_all`, for a body that computes with the model.

        If `forward_is_collective`, all ranks compute together, and the time limit applies.
        """
        return (
            contextlib.nullcontext()
            if self.forward_is_collective
            else self.world.wait_for_all(what)
        )

    def summed_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the trained parameters whose gradients the tree of shards adds."""
        return [parameter for parameter in module.parameters() if parameter.requires_grad]

    def inference_dtype(self, autocast_dtype: torch.dtype | None) -> torch.dtype | None:
        """Return the autocast type for code that expects weights in their own type, or None."""
        return None

    def validation_batches(self, batch_count: int) -> Sequence[int]:
        """Return the numbers of the validation batches that this rank computes."""
        return self.world.owned(batch_count)

    def batch_parts(self, batch_size: int, shards: int, accumulation: int) -> tuple[int, str, str]:
        """Return how many shards or GPUs share a batch, their noun, and the examples of each."""
        noun, plural = "shard", "shards"
        if shards == self.world.world_size:
            noun, plural = ("GPU", "GPUs") if self._on_gpu else ("process", "processes")
        least, rest = divmod(batch_size, shards * accumulation)
        return (
            shards,
            plural if shards > 1 else noun,
            f"{least} or {least + 1}" if rest else f"{least}",
        )

    def header(self, module: nn.Module) -> dict[str, str]:
        """Return the rows that the strategy adds to the header of a training."""
        return {}

    def whole(self, value: Any) -> Any:
        """Return the whole tensor that `value` is a share of, and any other value unchanged.

        All ranks must call this.
        """
        return value

    def share(self, value: Any, like: Any) -> Any:
        """Return this rank's share of the whole tensor `value`, divided as `like` is divided."""
        return value

    def gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return `state` with whole tensors on rank 0; all ranks must call this."""
        return state

    def lost_writes(self, module: nn.Module) -> contextlib.AbstractContextManager[list[str]]:
        """Collect the names of untrained parameters that a forward writes without effect."""
        return contextlib.nullcontext([])

    def peak_memory_mib(self) -> list[float]:
        """Return the peak memory of tensors on each GPU of all ranks, in MiB.

        Without a GPU, return the peak resident memory of each rank. All ranks must call this.
        """
        if self._on_gpu:
            own = [torch.cuda.max_memory_allocated(index) / 2**20 for index in self._gpus()]
        else:
            unit = 2**20 if sys.platform == "darwin" else 2**10
            own = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit]
        each = self.world.gather_rows(torch.tensor([own]))
        found: list[float] = each.flatten().tolist()
        return found

    def own_gpus(self) -> list[tuple[str, str]]:
        """Return the UUID and the name of each GPU that this rank computes on."""
        if not self._on_gpu:
            return []
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        found = []
        for ordinal in self._gpus():
            gpu = torch.cuda.get_device_properties(ordinal)
            # A process can use only one MIG slice, for which torch may report the UUID of the GPU.
            slice_ = visible[ordinal] if ordinal < len(visible) else ""
            found.append((slice_ if slice_.startswith("MIG-") else f"GPU-{gpu.uuid}", gpu.name))
        return found

    @property
    def _on_gpu(self) -> bool:
        return self.world.device.type == "cuda"

    def _gpus(self) -> Sequence[int]:
        """Return the ordinals of the GPUs that this rank computes on."""
        return [self.world.device.index]


class DataParallel(Strategy):
    """One process that splits each micro-batch over all visible GPUs."""

    def wrap(self, module: nn.Module, autocast_dtype: torch.dtype | None) -> nn.Module:
        return nn.DataParallel(module.to(self.world.device))

    def batch_parts(self, batch_size: int, shards: int, accumulation: int) -> tuple[int, str, str]:
        count = len(self._gpus())
        most, rest = divmod(batch_size, count * accumulation)
        # torch.chunk gives the last GPUs fewer examples.
        return count, "GPUs" if count > 1 else "GPU", f"up to {most + 1}" if rest else f"{most}"

    def _gpus(self) -> Sequence[int]:
        return range(torch.cuda.device_count())


class Sharded(Strategy):
    """A share of each parameter on each rank, by torch's fully_shard.

    The methods that compute are in `trainer.parallel.fsdp`, which is slow to import. Only a run
    that uses this strategy imports it.
    """

    forward_is_collective = True
    gathers_states = True

    def wrap(self, module: nn.Module, autocast_dtype: torch.dtype | None) -> nn.Module:
        from trainer.parallel import fsdp

        fsdp.shard(module, self.world.device, self.world.world_size, autocast_dtype)
        return module

    def differing_weight(self, digests: Callable[[], Mapping[str, str]]) -> str | None:
        return self.world.first_difference(digests())

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        from trainer.parallel import fsdp

        fsdp.check_optimizer(optimizer)

    def inside(self, module: nn.Module, compute: Callable[[], T]) -> T:
        computed: T = module.inside(compute)  # type: ignore[operator]
        return computed

    def summed_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        return []  # torch adds the gradients during the backward

    def inference_dtype(self, autocast_dtype: torch.dtype | None) -> torch.dtype | None:
        return autocast_dtype  # gathered weights are of this type

    def validation_batches(self, batch_count: int) -> Sequence[int]:
        # Each forward needs all ranks, so a rank with fewer batches repeats the last batch. The
        # statistics of the repetitions are not counted.
        own = self.world.owned(batch_count)
        most = len(self.world.owned_by(0, batch_count))
        return [*own, *[batch_count - 1] * (most - len(own))]

    def header(self, module: nn.Module) -> dict[str, str]:
        from trainer.parallel import fsdp

        own = sum(map(fsdp.own_numel, module.parameters()))
        return {"sharded": f"{own:,} of them on rank 0"}

    def whole(self, value: Any) -> Any:
        from trainer.parallel import fsdp

        return fsdp.whole(value)

    def share(self, value: Any, like: Any) -> Any:
        from trainer.parallel import fsdp

        return fsdp.share(value, like)

    def gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        from trainer.parallel import fsdp

        whole: dict[str, Any] = fsdp.gathered(state, self.world.is_first)
        return whole

    def lost_writes(self, module: nn.Module) -> contextlib.AbstractContextManager[list[str]]:
        from trainer.parallel import fsdp

        return fsdp.lost_writes(module)


STRATEGIES: dict[str, type[Strategy]] = {
    "single": Strategy,
    "ddp": Strategy,
    "dp": DataParallel,
    "fsdp": Sharded,
}


def launched_as() -> tuple[str, int]:
    """Return the strategy's name and the world size that the launcher has set.

    The ranks of torchrun use ddp if the environment has a strategy of one process.
    """
    name = launch_facts(os.environ).strategy
    if "LOCAL_RANK" in os.environ and not STRATEGY_RULES[name].by_torchrun:
        name = "ddp"
    return name, int(os.environ.get("WORLD_SIZE", "1"))


def join(device_name: str) -> Strategy:
    """Join the process group, and return the strategy that the launcher has set.

    Raises:
        DeviceMissing: `device_name` is not available; the CPU never replaces it.
    """
    name, _ = launched_as()
    return STRATEGIES[name](name, World.start(device_name))
