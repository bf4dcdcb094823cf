"""One gradient from all shards, with the same bits on any number of ranks.

The gradient of each shard is computed alone. The shards' gradients are added along the tree of
`trainer.parallel.tree`: first on each rank the subtrees that the rank owns, then between ranks the
rest. Collectives move bytes and never add.
"""

import contextlib
import enum
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from trainbox.errors import WrongUse
from trainer.data.schedule import MicroBatch
from trainer.parallel.buffers import buffer_slots
from trainer.parallel.moved_buffers import FirstMoves, MovedBuffers
from trainer.parallel.shard_sums import Exchange
from trainer.parallel.world import World
from trainer.parallel.written_parameters import WrittenParameters
from trainer.system.elapsed import Elapsed

_BUCKET_BYTES = 8 * 2**20  # the gradients that are sent together, when all of them are computed
# The number of buckets that are sent before the first of them is added.
_ON_THE_WAY = 2


class _Phase(enum.Enum):
    """A phase of a step."""

    # The gradients of each shard are added to the gradients of this rank's earlier shards.
    COLLECT = enum.auto()
    # The last backward of this rank sends each bucket as soon as its sum is complete.
    OVERLAP = enum.auto()


class Reduction:
    """The sum of all shards' gradients on each rank, and the mean of their changes of buffers.

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
        self._owned = world.owned(shards)
        # A single shard has the sum and the mean already, so its gradients and buffers stay.
        is_single = shards == 1
        self._buckets = [
            _Bucket(world, shards, group) for group in ([] if is_single else _grouped(parameters))
        ]
        # Without `parameters`, the strategy adds the gradients itself (fsdp), and loses changes of
        # frozen parameters.
        watches = not is_single and bool(parameters)
        self._written = WrittenParameters(module if watches else nn.Module())
        slots = [] if is_single else buffer_slots(module)
        self._moved = [MovedBuffers(world, shards, slots)]
        self._first_moves = FirstMoves(world, shards)
        # The buckets that this step has not sent yet, and the buckets that it has not added yet.
        # All ranks send and add them in this order.
        self._unsent, self._unadded = deque(self._buckets), deque(self._buckets)
        self._phase = _Phase.COLLECT
        # The visible part of the exchange: the waits during the backward, and all that follows it.
        self.exchange_time = Elapsed(world.device)
        if world.world_size > 1:
            for bucket in self._buckets:
                for parameter in bucket.parameters:
                    parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    def look_again(self) -> None:
        """Compare the values of parameters before and after the next forward."""
        self._written.look_again()

    def of(
        self, micro: MicroBatch, overlaps: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context for the forward and backward of a micro-batch.

        The shards come in order, each with all its micro-batches. If `overlaps` is false, nothing
        is sent before `finish`.
        """
        # One shard has nothing to add, and the phases would cost a small model noticeable time.
        return contextlib.nullcontext() if self._shards == 1 else self._phases(micro, overlaps)

    @contextlib.contextmanager
    def _phases(self, micro: MicroBatch, overlaps: bool) -> Iterator[None]:
        # Each shard starts with the buffers from before the step.
        ends_shard = micro.part == self._accumulation - 1
        if micro.part == 0:
            for moved in self._moved:
                moved.begin() if micro.shard == self._owned[0] else moved.restore()
        self._written.begin()

        # Only the last backward of a rank completes its sums, so only then may buckets be sent.
        ends_step = ends_shard and micro.shard == self._owned[-1]
        self._phase = _Phase.OVERLAP if overlaps and ends_step else _Phase.COLLECT
        yield
        self._first_moves.add(self._written.end())
        if not ends_shard:
            return

        # Add the shard's gradients and moves to the sums of this rank's earlier shards.
        for bucket in self._unsent:
            bucket.push(micro.shard)
        for moved in self._moved:
            moved.end(micro.shard)
        self._first_moves.end(micro.shard)

    def finish(self) -> None:
        """Exchange with the other ranks, and set each parameter's gradient and the buffers.

        Call this after the last micro-batch of a step.
        """
        if self._shards == 1:
            return
        # Send the subtrees of this rank that the backward has not sent yet.
        while self._unsent:
            self._send_next()
        with self._visible():
            # From now on, a frozen parameter that any forward has changed moves as buffers do.
            if watched := self._written.frozen:
                if (agreed := self._first_moves.agreed(watched)) is not None:
                    self._moved.append(agreed[0])
                    self._written.forget(agreed[1])
                self._first_moves = FirstMoves(self._world, self._shards)
            for moved in self._moved:
                moved.start()

            # Add the own slice of all subtrees, and send the sums to all ranks.
            for bucket in self._unadded:
                bucket.exchange.add()
            for moved in self._moved:
                moved.add()

            # Set the gradients and the buffers.
            for bucket in self._buckets:
                bucket.finish()
            for moved in self._moved:
                moved.finish()
        self._phase = _Phase.COLLECT
        self._unsent, self._unadded = deque(self._buckets), deque(self._buckets)

    def _visible(self) -> contextlib.AbstractContextManager[None]:
        return self.exchange_time() if self._world.world_size > 1 else contextlib.nullcontext()

    def _send_next(self) -> None:
        """Send the next bucket, and add the bucket that was sent `_ON_THE_WAY` buckets before.

        So the sums of the first buckets are sent back during the backward as well. A rank must not
        add a bucket as soon as it arrives, because all ranks must start their transfers in the same
        order.
        """
        self._unsent.popleft().exchange.start()
        if len(self._unadded) - len(self._unsent) > _ON_THE_WAY:
            with self._visible():
                self._unadded.popleft().exchange.add()

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
                self._unsent[0].push(self._owned[-1])
                self._send_next()

        return ready


class _Bucket:
    """Parameters whose gradients are exchanged together.

    `ready` has the ids of the parameters whose gradients the last shard's backward has computed.
    """

    def __init__(self, world: World, shards: int, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.ready: set[int] = set()
        self.exchange = Exchange(world, shards, parameters)

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
