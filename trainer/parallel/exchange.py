"""One gradient from all shards, with the same bits on any number of ranks.

The gradient of each shard is computed alone. The shards' gradients are added along the tree of
`trainer.parallel.tree`: first on each rank the subtrees that the rank owns, then between ranks the
rest. Collectives move bytes and never add.
"""

import contextlib
import enum
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.data.schedule import MicroBatch
from trainer.errors import WrongUse
from trainer.parallel.buffers import Slot, buffer_slots
from trainer.parallel.tree import TreeSum, subtrees
from trainer.parallel.world import Transfer, World
from trainer.system.elapsed import Elapsed

_BUCKET_BYTES = 8 * 2**20  # exchanged as soon as the backward has computed all its gradients
_ADDABLE = {
    *(
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}
# As torch allocates: kernels may add in another order if a tensor starts at another offset.
_ALIGNMENT_BYTES = 512


class _Phase(enum.Enum):
    """A phase of a step."""

    # The gradients of each shard are added to those of this rank's previous shards.
    COLLECT = enum.auto()
    # The last backward of this rank sends each bucket as soon as its sum is complete.
    OVERLAP = enum.auto()


class Reduction:
    """The sum of all shards' gradients on each rank, and the mean of the buffers that they moved.

    In each step, `of` runs once for each micro-batch, and `finish` runs once. The step starts in
    the phase COLLECT: `of` adds gradients and moves at the end of each shard. If the step overlaps,
    the last micro-batch of this rank is the phase OVERLAP. `finish` sends the rest, adds, sends the
    sums back and sets each parameter's gradient and the buffers.
    """

    def __init__(
        self,
        world: World,
        shards: int,
        accumulation: int,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        """Sum the gradients of `parameters`, and average the buffers of `module`."""
        self._world, self._shards, self._accumulation = world, shards, accumulation
        self._last_shard = world.owned(shards)[-1]
        # A single shard has the sum and the mean already, so its gradients and buffers stay.
        is_single = shards == 1
        self._buckets = [
            _Bucket(world, shards, group) for group in ([] if is_single else _grouped(parameters))
        ]
        self._buffer_slots = [] if is_single else buffer_slots(module)
        self._moved = _MovedBuffers(world, shards, self._buffer_slots)
        # The buckets that this step has not sent yet. All ranks send them in this order.
        self._unsent = deque(self._buckets)
        self._phase = _Phase.COLLECT
        # The visible part of the exchange: from a step's last backward until the sums are set.
        self.exchange_time = Elapsed(world.device)
        if world.world_size > 1:
            for bucket in self._buckets:
                for parameter in bucket.parameters:
                    parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    def also_average(self, slots: Sequence[Slot]) -> None:
        """Treat the frozen parameters in `slots`, which a forward changes, as buffers."""
        if self._shards > 1:
            self._moved = _MovedBuffers(self._world, self._shards, [*self._buffer_slots, *slots])

    @contextlib.contextmanager
    def of(self, micro: MicroBatch, overlaps: bool = True) -> Iterator[None]:
        """Enclose the forward and backward of a micro-batch.

        The shards come in order, each with all its micro-batches. If `overlaps` is false, nothing
        is sent before `finish`.
        """
        # Each shard starts with the buffers from before the step.
        ends_shard = micro.part == self._accumulation - 1
        if micro.part == 0:
            self._moved.begin(micro.shard)

        # Only the last backward of a rank completes its sums, so only then may buckets be sent.
        ends_step = ends_shard and micro.shard == self._last_shard
        self._phase = _Phase.OVERLAP if overlaps and ends_step else _Phase.COLLECT
        yield
        if not ends_shard:
            return

        # Add the shard's gradients and moves to those of the previous shards of this rank.
        for bucket in self._unsent:
            bucket.push(micro.shard)
        self._moved.end(micro.shard)

    def finish(self) -> None:
        """Exchange with the other ranks, and set each parameter's gradient and the buffers.

        Call this after the last micro-batch of a step.
        """
        with self.exchange_time() if self._world.world_size > 1 else contextlib.nullcontext():
            # Send the subtrees of this rank that the backward has not sent yet.
            for bucket in self._unsent:
                bucket.exchange.start()
            self._moved.start()

            # Add the own slice of all subtrees, and send the sums to all ranks.
            for bucket in self._buckets:
                bucket.exchange.add()
            self._moved.add()

            # Set the gradients and the buffers.
            for bucket in self._buckets:
                bucket.finish()
            self._moved.finish()
        self._phase, self._unsent = _Phase.COLLECT, deque(self._buckets)

    def _hook(self, bucket: "_Bucket") -> Callable[[Tensor], None]:
        """Return the function that torch calls when a gradient of `bucket` is computed."""

        def ready(parameter: Tensor) -> None:
            if self._phase is not _Phase.OVERLAP:
                return
            if id(parameter) in bucket.ready:
                raise WrongUse(
                    "a parameter's gradient is computed several times in one backward (for example "
                    "by activation checkpoints with use_reentrant=True around a module that is "
                    "used more than once): use use_reentrant=False"
                )
            bucket.ready.add(id(parameter))
            # Send buckets in the same order on all ranks, whatever the order of the backward.
            while self._unsent and self._unsent[0].is_ready:
                complete = self._unsent.popleft()
                complete.push(self._last_shard)
                complete.exchange.start()

        return ready


class _Bucket:
    """Parameters whose gradients are exchanged together.

    `ready` has the ids of those whose gradient the last shard's backward has computed.
    """

    def __init__(self, world: World, shards: int, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.ready: set[int] = set()
        self.exchange = _Exchange(world, shards, parameters)

    @property
    def is_ready(self) -> bool:
        return len(self.ready) == len(self.parameters)

    def push(self, shard: int) -> None:
        # If the shard's loss does not depend on a parameter, the gradient is 0.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        self.exchange.push(shard, gradients)

    def finish(self) -> None:
        for parameter, total in zip(self.parameters, self.exchange.totals(), strict=True):
            parameter.grad = total
        self.ready.clear()


class _MovedBuffers:
    """Buffers that a forward moves (running statistics) and frozen parameters (a mean teacher's).

    They are the same before each shard. After all shards they move by the mean over the shards.
    Statistics are thus per shard, as they are per process under torch's DistributedDataParallel.
    Integers, such as a count of batches, move by the mean rounded down. Flags have no mean, and a
    buffer with an infinity is a mask: such buffers are restored after each shard.
    """

    def __init__(self, world: World, shards: int, slots: Sequence[Slot]) -> None:
        self._shards, self._first_shard = shards, world.owned(shards)[0]
        filled = [(home, name) for home, name in slots if home[name] is not None]
        self._slots = sorted(filled, key=lambda slot: not _has_a_mean(_buffer(slot)))
        self._moving = sum(_has_a_mean(_buffer(slot)) for slot in filled)  # these come first
        self._before: list[Tensor] = []
        self._groups: list[_Group] = []
        types = dict.fromkeys(_buffer(slot).dtype for slot in self._slots[: self._moving])
        for dtype in types:
            indices = [i for i in range(self._moving) if _buffer(self._slots[i]).dtype == dtype]
            likes = [_buffer(self._slots[i]) for i in indices]
            self._groups.append(_Group(indices, _Exchange(world, shards, likes)))

    @torch.no_grad()
    def begin(self, shard: int) -> None:
        if shard == self._first_shard:
            self._before = [_buffer(slot).clone() for slot in self._slots]
        else:
            for slot, before in zip(self._slots, self._before, strict=True):
                _buffer(slot).copy_(before)

    @torch.no_grad()
    def end(self, shard: int) -> None:
        for group in self._groups:
            now = [_buffer(self._slots[i]) for i in group.indices]
            group.exchange.push(
                shard, list(torch._foreach_sub(now, [self._before[i] for i in group.indices]))
            )

    def start(self) -> None:
        for group in self._groups:
            group.exchange.start()

    def add(self) -> None:
        for group in self._groups:
            group.exchange.add()

    @torch.no_grad()
    def finish(self) -> None:
        for group in self._groups:
            for i, total in zip(group.indices, group.exchange.totals(), strict=True):
                whole = not (total.is_floating_point() or total.is_complex())
                mean = (
                    torch.div(total, self._shards, rounding_mode="floor")
                    if whole
                    else total / self._shards
                )
                _buffer(self._slots[i]).copy_(self._before[i] + mean)
        for slot, before in list(zip(self._slots, self._before, strict=True))[self._moving :]:
            _buffer(slot).copy_(before)


@dataclass
class _Group:
    """Buffers of one type, by the indices of their slots."""

    indices: list[int]
    exchange: "_Exchange"


def _buffer(slot: Slot) -> Tensor:
    home, name = slot
    buffer: Tensor = home[name]
    return buffer


def _has_a_mean(buffer: Tensor) -> bool:
    return buffer.dtype in _ADDABLE and buffer.numel() > 0 and bool(torch.isfinite(buffer).all())


class _Exchange:
    """The sums of lists of tensors over all shards.

    The phases are `push` for each shard of this rank, `start`, `add` and `totals`. If each rank
    owns one subtree, the exchange moves about the bytes of a ring all-reduce.
    """

    def __init__(self, world: World, shards: int, likes: Sequence[Tensor]) -> None:
        """Allocate buffers for sums of the shapes of `likes`, which have one type and device."""
        self._world, self._shards, self._likes = world, shards, likes
        self._own = TreeSum(shards, _add_lists)
        self._nodes = [
            subtrees(world.owned_by(rank, shards), shards) for rank in range(world.world_size)
        ]
        self._alone: list[Tensor] = []
        self._transfer: Transfer | None = None
        if world.world_size == 1:
            return
        step = _ALIGNMENT_BYTES // likes[0].element_size()
        sizes = [-(-like.numel() // step) * step for like in likes]
        self._slice = -(-sum(sizes) // (world.world_size * step)) * step
        width = self._slice * world.world_size
        own = len(self._nodes[world.rank])
        new = likes[0].new_zeros
        self._sent_MN = new((own, width))
        self._received = new(sum(map(len, self._nodes)) * self._slice)
        self._total_N = new(width)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]

        def views(flat_N: Tensor) -> list[Tensor]:
            return [
                flat_N[start : start + like.numel()].view(like.shape)
                for start, like in zip(starts, likes, strict=True)
            ]

        self._sent_views = [views(row_N) for row_N in self._sent_MN]
        self._total_views = views(self._total_N)

    @torch.no_grad()
    def push(self, shard: int, tensors: list[Tensor]) -> None:
        """Add the tensors of the next shard of this rank; the sum takes them over."""
        self._own.push((0, shard), tensors)

    @torch.no_grad()
    def start(self) -> None:
        """Send each rank its slice of the subtrees of this rank."""
        waiting, self._own.waiting = self._own.waiting, []
        if self._world.world_size == 1:
            ((_root, self._alone),) = waiting
            return
        for views, (_node, tensors) in zip(self._sent_views, waiting, strict=True):
            torch._foreach_copy_(views, tensors)
        world_size, slice_ = self._world.world_size, self._slice
        sent = self._sent_MN.view(len(waiting), world_size, slice_).transpose(0, 1).contiguous()
        counts = [len(nodes) * slice_ for nodes in self._nodes]
        self._transfer = self._world.all_to_all(
            self._received, sent.view(-1), counts, [len(waiting) * slice_] * world_size
        )

    @torch.no_grad()
    def add(self) -> None:
        """Add this rank's slice of all subtrees, and send the sum to all ranks."""
        if self._transfer is None:
            return
        self._transfer.wait()
        tree: TreeSum[Tensor] = TreeSum(self._shards, lambda left, right: left.add_(right))
        nodes = [node for nodes in self._nodes for node in nodes]
        for node, part in zip(nodes, self._received.split(self._slice), strict=True):
            tree.push(node, part)
        ((_root, total),) = tree.waiting
        self._transfer = self._world.all_gather(self._total_N, total)

    def totals(self) -> list[Tensor]:
        """Return the sums with the shapes and layouts of `likes`, valid until the next `start`."""
        if self._transfer is None:
            return self._alone
        self._transfer.wait()
        self._transfer = None
        pairs = zip(self._total_views, self._likes, strict=True)
        return [
            view if like.is_contiguous() else torch.empty_like(like).copy_(view)
            for view, like in pairs
        ]


def _grouped(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Return the parameters in buckets of one type, in about the order of a backward."""
    group: list[nn.Parameter] = []
    size = 0
    for parameter in reversed(parameters):
        if group and (size + parameter.nbytes > _BUCKET_BYTES or parameter.dtype != group[0].dtype):
            yield group
            group, size = [], 0
        group.append(parameter)
        size += parameter.nbytes
    if group:
        yield group


def _add_lists(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(left, right)
    return left
