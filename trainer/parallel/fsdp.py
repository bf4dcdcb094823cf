"""What --strategy fsdp does: weights, gradients and the optimizer's state shared out over the
processes by torch's fully_shard.

Imported by runs that do so alone: it brings a part of torch that takes as long to load as a fifth
of the rest. docs/decisions/0011-shares-of-a-large-model.md.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.errors import WrongUse

# Their running statistics are float32, and their kernels want weights of the same type.
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def shard(
    module: nn.Module, device: torch.device, world_size: int, gathered_dtype: torch.dtype | None
) -> None:
    """Leave each process its share of each parameter of `module`, on `device`.

    A block's weights are gathered while it computes, in `gathered_dtype`; they are kept and updated
    in their own type.

    Raises:
        WrongUse: its parameters cannot be shared out.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim == 0:
            raise WrongUse(
                f"--strategy fsdp cannot share out {name.removeprefix('model.')}, a single "
                "number: give it the shape (1,)"
            )
    if len(types := {str(parameter.dtype) for parameter in module.parameters()}) > 1:
        raise WrongUse(
            "--strategy fsdp needs all parameters of one type, and these are "
            f"{', '.join(sorted(types))}"
        )
    mesh = init_device_mesh(device.type, (world_size,))
    policy = own = MixedPrecisionPolicy()
    if gathered_dtype is not None:
        # Inputs are cast by autocast, where that is right.
        policy = MixedPrecisionPolicy(
            param_dtype=gathered_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for norm in [part for part in module.modules() if isinstance(part, _NORMS) and part.affine]:
            fully_shard(norm, mesh=mesh, mp_policy=own)
    for block in blocks(module):
        if not isinstance(block, FSDPModule):
            fully_shard(block, mesh=mesh, mp_policy=policy)
    # True: gathered for the forward and again for the backward, and never there between them.
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # the losses are weighted: the gradient is their sum
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    register_fsdp_forward_method(module, "inside")


def blocks(module: nn.Module) -> list[nn.Module]:
    """The modules that are gathered one at a time: each part of a ModuleList or Sequential.

    The rest is gathered as one.

    A part that shares a parameter with another place is none: it would have two copies.
    """
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(owner)

    def stands_alone(block: nn.Module) -> bool:
        inside = set(block.modules())
        return all(owners[parameter] <= inside for parameter in block.parameters())

    return [
        part
        for part in _parts(module)
        if any(True for _ in part.parameters()) and stands_alone(part)
    ]


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    lists = nn.ModuleList | nn.Sequential
    for child in module.children():
        # which nobody can call
        if isinstance(module, lists) and not isinstance(child, lists | nn.ModuleDict):
            yield child
        else:
            yield from _parts(child)


@contextlib.contextmanager
def moves_noted(module: nn.Module) -> Iterator[list[str]]:
    """The names of untrained parameters that a forward in the body writes to, which is lost with
    what was gathered.
    """
    moved: list[str] = []
    before: dict[nn.Parameter, Tensor] = {}

    def at_hand(part: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        named = part.named_parameters()
        return (
            (name, p) for name, p in named if not p.requires_grad and not isinstance(p, DTensor)
        )

    def keep(part: nn.Module, _inputs: Any) -> None:
        before.update({parameter: parameter.clone() for _, parameter in at_hand(part)})

    def compare(part: nn.Module, _inputs: Any, _output: Any) -> None:
        moved.extend(
            name for name, p in at_hand(part) if p in before and not torch.equal(before.pop(p), p)
        )

    hooks = []
    for part in module.modules():
        # after its own hook that gathers, and before the one that lets go
        if isinstance(part, FSDPModule):
            hooks += [
                part.register_forward_pre_hook(keep),
                part.register_forward_hook(compare, prepend=True),
            ]
    try:
        yield moved
    finally:
        for hook in hooks:
            hook.remove()


def whole(value: Any) -> Any:
    """A tensor that is shared out, put together; all processes must call this.

    Anything else as it is.
    """
    return value.full_tensor() if isinstance(value, DTensor) else value


def own_numel(value: Tensor) -> int:
    """How many numbers of it this process holds."""
    return (value.to_local() if isinstance(value, DTensor) else value).numel()


def share(value: Any, like: Any) -> Any:
    """This process's share of the whole tensor `value`, where `like` has its shape and is shared
    out; else `value`.
    """
    if not (isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape):
        return value
    # Each process has the whole at hand, and asks no other; a copy, so that the whole is not kept
    # with it.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).clone()


def gathered(tree: Any, keeps: bool) -> Any:
    """A copy of `tree` on the CPU, its tensors put together one at a time; where `keeps` is false
    there is None for each.

    All processes must call this.
    """
    if isinstance(tree, Tensor):
        tensor = whole(tree).detach()
        return tensor.to("cpu", copy=True) if keeps else None
    if isinstance(tree, Mapping):
        return {name: gathered(value, keeps) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [gathered(value, keeps) for value in tree]
    return tree
