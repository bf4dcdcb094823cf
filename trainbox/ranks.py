"""This process among the ranks of torchrun, and what the ranks agree on.

Nothing here imports torch. torch.distributed is used only if the script has imported it.
"""

import atexit
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainbox.errors import WrongUse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# The process group of the script, and the group of the same ranks that exchanges tensors of the
# CPU, if the group of the script is of NCCL only.
_groups: "tuple[ProcessGroup, ProcessGroup] | None" = None


def rank() -> int:
    """Return the rank of this process, or 0 without torchrun."""
    return _of_group("get_rank", "RANK", 0)


def world_size() -> int:
    """Return the number of ranks, or 1 without torchrun."""
    return _of_group("get_world_size", "WORLD_SIZE", 1)


def is_joined() -> bool:
    """Return whether the script has a process group."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def largest(values: Sequence[int]) -> list[int]:
    """Return the largest of all ranks' values, each alone. All ranks must call this.

    Raises:
        WrongUse: torchrun has started several ranks, and the script has no process group yet.
    """
    if _is_alone():
        return list(values)
    import torch
    from torch import distributed

    tensor = torch.tensor(values, dtype=torch.int64)
    distributed.all_reduce(tensor, distributed.ReduceOp.MAX, _cpu_group())
    return [int(value) for value in tensor.tolist()]


def from_first(value: int) -> int:
    """Return the `value` of rank 0, once all ranks have called this.

    Raises:
        WrongUse: torchrun has started several ranks, and the script has no process group yet.
    """
    return largest([value if rank() == 0 else -(2**63)])[0]


def _of_group(function: str, variable: str, default: int) -> int:
    if is_joined():
        return int(getattr(sys.modules["torch.distributed"], function)())
    text = os.environ.get(variable, "")
    return int(text) if text.isascii() and text.isdigit() else default


def _is_alone() -> bool:
    """Return whether no other rank has to agree.

    Raises:
        WrongUse: other ranks exist, and the script has no process group yet.
    """
    if world_size() == 1:
        return True
    if not is_joined():
        raise WrongUse(
            f"torchrun has started {world_size()} processes, and torch.distributed is not "
            "initialized: call torch.distributed.init_process_group() first"
        )
    return False


def _cpu_group() -> "ProcessGroup":
    """Return a group of all ranks for tensors of the CPU, which all ranks make at the same call."""
    global _groups  # noqa: PLW0603 - a process has one default group, too
    from torch import distributed
    from torch.distributed import ProcessGroup

    world = distributed.group.WORLD
    assert isinstance(world, ProcessGroup)
    if "cpu:" in distributed.get_backend_config(world):
        return world  # not kept here: gloo aborts if a group outlives destroy_process_group()
    if _groups is None or _groups[0] is not world:
        group = distributed.new_group(backend="gloo")
        assert isinstance(group, ProcessGroup)
        _groups = (world, group)
        atexit.register(_forget_groups)
    return _groups[1]


def _forget_groups() -> None:
    global _groups  # noqa: PLW0603 - see above
    _groups = None
