"""The mechanics of --strategy fsdp: each rank keeps a share of the weights, of the gradients and of
the optimizer's state, by torch's fully_shard.

Only runs with this strategy import this file, because it loads a large part of torch. See
docs/decisions/0011-shares-of-a-large-model.md.
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

from trainbox.errors import WrongUse

# The running statistics of these modules are float32, and the kernels need weights of that type.
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def shard(
    module: nn.Module, device: torch.device, world_size: int, gathered_dtype: torch.dtype | None
) -> None:
    """Keep on this rank its share of each parameter of `module`, on `device`.

    The weights of a block are gathered in `gathered_dtype` while the block computes. They are kept
    and updated in their own type.

    Raises:
        WrongUse: The parameters cannot be divided into shares.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim == 0:
            raise WrongUse(
                f"--strategy fsdp cannot divide {name.removeprefix('model.')}, a single "
                "number: give it the shape (1,)"
            )
    if len(types := {str(parameter.dtype) for parameter in module.parameters()}) > 1:
        raise WrongUse(
            "--strategy fsdp needs parameters of one type "
            f"({', '.join(sorted(types))}): convert them in build_model"
        )
    mesh = init_device_mesh(device.type, (world_size,))
    policy = own = MixedPrecisionPolicy()
    if gathered_dtype is not None:
        # Autocast casts the inputs where this is safe.
        policy = MixedPrecisionPolicy(
            param_dtype=gathered_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for norm in [part for part in module.modules() if isinstance(part, _NORMS) and part.affine]:
            fully_shard(norm, mesh=mesh, mp_policy=own)
    for block in blocks(module):
        if not isinstance(block, FSDPModule):
            fully_shard(block, mesh=mesh, mp_policy=policy)
    # True: weights are gathered for the forward and again for the backward, to save memory.
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # The losses are weighted, so the gradient is their sum.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo supports only sums
    register_fsdp_forward_method(module, "inside")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose state cannot be divided again at a resume.

    Raises:
        WrongUse: A tensor of the state has another shape than its parameter.
    """
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameter.shape:
                raise WrongUse(
                    f"--strategy fsdp cannot divide {name} of {type(optimizer).__name__}, of "
                    f"shape {tuple(value.shape)} for a parameter of {tuple(parameter.shape)}: use "
                    "another optimizer"
                )


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return the modules whose weights are gathered one module at a time.

    These blocks are the modules in each ModuleList and Sequential. The weights of all other modules
    are gathered together. A module that shares a parameter with a module outside is not a block,
    because the parameter would have two copies.
    """
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(owner)

    def is_self_contained(block: nn.Module) -> bool:
        inside = set(block.modules())
        return all(owners[parameter] <= inside for parameter in block.parameters())

    return [
        part
        for part in _parts(module)
        if any(True for _ in part.parameters()) and is_self_contained(part)
    ]


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    lists = nn.ModuleList | nn.Sequential
    for child in module.children():
        # A module cannot call these containers, so their parts are the blocks.
        if isinstance(module, lists) and not isinstance(child, lists | nn.ModuleDict):
            yield child
        else:
            yield from _parts(child)


@contextlib.contextmanager
def lost_writes(module: nn.Module) -> Iterator[list[str]]:
    """Collect the names of untrained parameters that a forward in the body writes.

    Such a write is lost, because it changes only the gathered copy.
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

    with contextlib.ExitStack() as hooks:
        for part in module.modules():
            # Run after FSDP's hook that gathers and before its hook that frees.
            if isinstance(part, FSDPModule):
                hooks.enter_context(part.register_forward_pre_hook(keep))
                hooks.enter_context(part.register_forward_hook(compare, prepend=True))
        yield moved


def whole(value: Any) -> Any:
    """Return the whole tensor that `value` is a share of, and any other value unchanged.

    All ranks must call this.
    """
    return value.full_tensor() if isinstance(value, DTensor) else value


def own_numel(value: Tensor) -> int:
    """Return how many elements of `value` this rank keeps."""
    return (value.to_local() if isinstance(value, DTensor) else value).numel()


def share(value: Any, like: Any) -> Any:
    """Return this rank's share of the whole tensor `value`, divided as `like` is divided.

    Return `value` unchanged if `like` is not divided or has another shape.
    """
    if not (isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape):
        return value
    # Each rank has the whole tensor, so no communication is needed. The copy lets go of the whole.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).clone()


def gathered(tree: Any, keeps: bool) -> Any:
    """Return a copy of `tree` on the CPU with whole tensors, which are gathered one at a time.

    If `keeps` is false, the copy has None instead of each tensor. All ranks must call this.
    """
    if isinstance(tree, Tensor):
        tensor = whole(tree).detach()
        return tensor.to("cpu", copy=True) if keeps else None
    if isinstance(tree, Mapping):
        return {name: gathered(value, keeps) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [gathered(value, keeps) for value in tree]
    return tree
