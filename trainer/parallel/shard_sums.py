"""The sums of tensors over all shards, exchanged as bytes between the ranks."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.parallel.tree import TreeSum, subtrees
from trainer.parallel.world import Transfer, World

# As torch allocates: kernels may add in another order if a tensor starts at another offset.
_ALIGNMENT_BYTES = 512


class Exchange:
    """The sums of lists of tensors over all shards.

    The phases are `push` for each shard of this rank, `start`, `add` and `totals`. If each rank
    owns one subtree, the exchange moves about the bytes of a ring all-reduce. Tensors of several
    types travel together as bytes.
    """

    def __init__(self, world: World, shards: int, likes: Sequence[Tensor]) -> None:
        """Allocate buffers for sums of the shapes and types of `likes`, which have one device.

        Tensors of one type are next to each other.
        """
        self._world, self._shards, self._likes = world, shards, likes
        self._own = TreeSum(shards, _add_lists)
        self._nodes = [
            subtrees(world.owned_by(rank, shards), shards) for rank in range(world.world_size)
        ]
        self._alone: list[Tensor] = []
        self._transfer: Transfer | None = None
        if world.world_size == 1:
            return

        # Each rank adds one slice of the bytes. Tensors and slices begin at multiples of 512 bytes,
        # so no element is cut in two.
        sizes = [_aligned(like.nbytes) for like in likes]
        starts = list(itertools.accumulate(sizes, initial=0))
        self._slice = _aligned(-(-starts[-1] // world.world_size))
        self._ranges = _type_ranges(likes, starts, world.rank * self._slice, self._slice)
        width, own = self._slice * world.world_size, len(self._nodes[world.rank])

        def new(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.uint8, device=likes[0].device)

        def views(flat_N: Tensor) -> list[Tensor]:
            return [
                _like(flat_N[start : start + like.nbytes].view(like.dtype), like)
                for start, like in zip(starts, likes, strict=False)
            ]

        self._sent_MN, self._total_N = new(own, width), new(width)
        self._received_N = new(sum(map(len, self._nodes)) * self._slice)
        self._sent_views = [views(row_N) for row_N in self._sent_MN]
        self._total_views = views(self._total_N)

    @torch.no_grad()
    def push(self, shard: int, tensors: list[Tensor]) -> None:
        """Add the tensors of this rank's next shard. The sum may use their memory."""
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
            self._received_N, sent.view(-1), counts, [len(waiting) * slice_] * world_size
        )

    @torch.no_grad()
    def add(self) -> None:
        """Add this rank's slice of all subtrees, and send the sum to all ranks."""
        if self._transfer is None:
            return
        self._transfer.wait()
        tree = TreeSum(self._shards, _add_lists)
        nodes = [node for nodes in self._nodes for node in nodes]
        parts = self._received_N.split(self._slice)
        for node, part_N in zip(nodes, parts, strict=True):
            tree.push(node, [part_N[begin:end].view(dtype) for dtype, begin, end in self._ranges])
        # Each addition changes its left operand, so the first part has the sum.
        self._transfer = self._world.all_gather(self._total_N, parts[0])

    def totals(self) -> list[Tensor]:
        """Return the sums with the shapes and layouts of `likes`, valid until the next `start`."""
        if self._transfer is None:
            return self._alone
        self._transfer.wait()
        self._transfer = None
        pairs = zip(self._total_views, self._likes, strict=True)
        return [
            view if view.stride() == like.stride() else torch.empty_like(like).copy_(view)
            for view, like in pairs
        ]


def _like(flat_N: Tensor, like: Tensor) -> Tensor:
    """Return a view with the shape of `like`, and its order in memory if that has no gaps."""
    if like.is_contiguous(memory_format=torch.channels_last):  # pictures are copied in one piece
        return flat_N.as_strided(like.shape, like.stride())
    return flat_N.view(like.shape)


def _aligned(size: int) -> int:
    """Return the smallest multiple of the alignment that is at least `size` bytes."""
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _type_ranges(
    likes: Sequence[Tensor], starts: Sequence[int], first: int, size: int
) -> list[tuple[torch.dtype, int, int]]:
    """Return the types in the `size` bytes from `first` on, each with its begin and end there.

    `starts` has the first byte of each tensor of `likes`, and the end of the last.
    """
    ends: dict[torch.dtype, tuple[int, int]] = {}
    for like, (start, end) in zip(likes, itertools.pairwise(starts), strict=True):
        ends[like.dtype] = (ends.get(like.dtype, (start, end))[0], end)
    within = [
        (dtype, max(start - first, 0), min(end - first, size))
        for dtype, (start, end) in ends.items()
    ]
    return [(dtype, begin, end) for dtype, begin, end in within if begin < end]


def _add_lists(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    if left:  # a slice may have only padding
        torch._foreach_add_(left, right)
    return left
