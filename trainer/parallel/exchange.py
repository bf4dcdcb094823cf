"""One gradient from all shards, with the same bits on any number of ranks.

The gradient of each shard is computed alone. The shards' gradients are added along the tree of
`trainer.parallel.tree`: first on each rank the subtrees that the rank owns, then between ranks the
rest. Collectives move bytes and never add.
"""

import contextlib
import enum
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from trainbox.contract.errors import WrongUse
from trainer.data.schedule import MicroBatch
from trainer.parallel.buffers import Slot, buffer_slots
from trainer.parallel.shard_sums import Exchange
from trainer.parallel.world import World
from trainer.parallel.written_parameters import WrittenParameters
from trainer.system.elapsed import Elapsed

_BUCKET_BYTES = 8 * 2**20  # exchanged as soon as the backward has computed all its gradients
# The buckets that are still on their way to the ranks that add them when the next one is sent.
_ON_THE_WAY = 2
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
        self._owned = world.owned(shards)
        # A single shard has the sum and the mean already, so its gradients and buffers stay.
        is_single = shards == 1
        self._buckets = [
            _Bucket(world, shards, group) for group in ([] if is_single else _grouped(parameters))
        ]
        # A strategy that adds the gradients itself keeps no change of a frozen parameter.
        watches = not is_single and bool(parameters)
        self._written = WrittenParameters(module if watches else nn.Module())
        slots = [] if is_single else buffer_slots(module)
        self._moved = [_MovedBuffers(world, shards, slots)]
        # The buckets that this step has not sent yet, and those that it has not added yet. All
        # ranks send and add them in this order.
        self._unsent, self._unadded = deque(self._buckets), deque(self._buckets)
        self._phase = _Phase.COLLECT
        # The visible part of the exchange: the waits during the backward, and all that follows it.
        self.exchange_time = Elapsed(world.device)
        if world.world_size > 1:
            for bucket in self._buckets:
                for parameter in bucket.parameters:
                    parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    @property
    def still(self) -> list[str]:
        """The names of the frozen parameters that no forward has changed, if there are shards."""
        return self._written.still

    def of(
        self, micro: MicroBatch, overlaps: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context for the forward and backward of a micro-batch.

        The shards come in order, each with all its micro-batches. If `overlaps` is false, nothing
        is sent before `finish`.
        """
        # Small models would notice the time of the phases, which have nothing to add for one shard.
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
        if found := self._written.end():
            # From now on, these frozen parameters move as buffers do.
            late = _MovedBuffers(self._world, self._shards, [slot for slot, _ in found])
            values = {slot.name: old for slot, old in found}
            late.begin_late(self._owned[: self._owned.index(micro.shard)], values)
            self._moved.append(late)
        if not ends_shard:
            return

        # Add the shard's gradients and moves to those of the previous shards of this rank.
        for bucket in self._unsent:
            bucket.push(micro.shard)
        for moved in self._moved:
            moved.end(micro.shard)

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
        """Send the next bucket, and add the bucket that has been on its way for long enough.

        So the sums of the first buckets are sent back during the backward as well. A rank must not
        add a bucket as soon as it arrives: all ranks start their transfers in the same order.
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

    `ready` has the ids of those whose gradient the last shard's backward has computed.
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


class _MovedBuffers:
    """Buffers that a forward moves (running statistics) and frozen parameters (a mean teacher's).

    They are the same before each shard. After all shards they move by the mean over the shards.
    Statistics are thus per shard, as they are per process under torch's DistributedDataParallel.
    Integers, such as a count of batches, move by the mean rounded down. An element that is infinite
    or NaN before the step, such as a running minimum at its start, becomes the mean of its new
    values; so a mask stays as it is. A flag changes if it changes in any shard.
    """

    def __init__(self, world: World, shards: int, slots: Sequence[Slot]) -> None:
        self._world, self._shards = world, shards
        # Buffers of one type and rule are copied and added by one operation.
        groups: dict[tuple[torch.dtype, _Rule], list[Slot]] = {}
        for slot in slots:
            if (buffer := slot.tensor) is not None and buffer.numel():
                groups.setdefault((buffer.dtype, _rule(buffer)), []).append(slot)
        # Tensors of one type are next to each other in the exchange.
        kept = sorted(groups.items(), key=lambda item: item[0][1].order(item[0][0]))
        self._groups = [group for _, group in kept]
        self._rules = [rule for (_, rule), _ in kept]
        self._before: list[list[Tensor]] = []  # the values of each group before the step
        self._exchange: Exchange | None = None

    @torch.no_grad()
    def begin(self) -> None:
        """Note the values before the first shard of this rank."""
        self._before = [list(map(torch.empty_like, map(_buffer, g))) for g in self._groups]
        for group, before in zip(self._groups, self._before, strict=True):
            torch._foreach_copy_(before, list(map(_buffer, group)))

    def begin_late(self, earlier_shards: Sequence[int], values: Mapping[str, Tensor]) -> None:
        """Begin in a later shard of this rank. The earlier ones have left the `values` by name."""
        self._before = [[values[slot.name] for slot in group] for group in self._groups]
        for shard in earlier_shards:
            self._push(shard, [list(map(torch.zeros_like, before)) for before in self._before])

    @torch.no_grad()
    def restore(self) -> None:
        """Put back the values from before the step, for the next shard."""
        for group, before in zip(self._groups, self._before, strict=True):
            torch._foreach_copy_(list(map(_buffer, group)), before)

    @torch.no_grad()
    def end(self, shard: int) -> None:
        """Add the moves of a shard to those of this rank's earlier shards.

        Raises:
            WrongUse: A forward has changed the size of a buffer.
        """
        for group, before in zip(self._groups, self._before, strict=True):
            for slot, old in zip(group, before, strict=True):
                if (shape := _buffer(slot).shape) != old.shape:
                    raise WrongUse(
                        f"a forward changes the shape of the buffer {slot.name} from "
                        f"{tuple(old.shape)} to {tuple(shape)}: register it with its final size in "
                        "build_model()"
                    )
        self._push(
            shard,
            [
                rule.moves(list(map(_buffer, group)), before)
                for rule, group, before in zip(self._rules, self._groups, self._before, strict=True)
            ],
        )

    def _push(self, shard: int, moves: Sequence[list[Tensor]]) -> None:
        flat = list(itertools.chain.from_iterable(moves))
        if not flat:
            return
        if self._exchange is None:
            self._exchange = Exchange(self._world, self._shards, flat)
        self._exchange.push(shard, flat)

    def start(self) -> None:
        if self._exchange is not None:
            self._exchange.start()

    def add(self) -> None:
        if self._exchange is not None:
            self._exchange.add()

    @torch.no_grad()
    def finish(self) -> None:
        totals = iter(self._exchange.totals() if self._exchange is not None else [])
        for rule, group, before in zip(self._rules, self._groups, self._before, strict=True):
            own = [] if rule is _Rule.STAYS else list(itertools.islice(totals, len(group)))
            torch._foreach_copy_(list(map(_buffer, group)), rule.moved(before, own, self._shards))


class _Rule(enum.Enum):
    """What the shards do to a buffer: its moves in a shard, and its value after all shards."""

    MEAN = enum.auto()
    FROM_INFINITY = enum.auto()
    FLAG = enum.auto()
    STAYS = enum.auto()  # of a type without arithmetic

    def order(self, dtype: torch.dtype) -> tuple[bool, str]:
        """Return the sort key of buffers of this rule and type."""
        return self is _Rule.STAYS, str(torch.int32 if self is _Rule.FLAG else dtype)

    def moves(self, after: list[Tensor], before: list[Tensor]) -> list[Tensor]:
        """Return what is added over the shards."""
        match self:
            case _Rule.MEAN:
                return list(torch._foreach_sub(after, before))
            case _Rule.FROM_INFINITY:
                pairs = zip(after, before, strict=True)
                return [torch.where(old.isfinite(), new - old, new) for new, old in pairs]
            case _Rule.FLAG:
                return [(new != old).int() for new, old in zip(after, before, strict=True)]
        return []

    def moved(self, before: list[Tensor], totals: list[Tensor], shards: int) -> list[Tensor]:
        """Return the values after the step. `totals` are the sums of the moves."""
        match self:
            case _Rule.MEAN:
                return list(torch._foreach_add(before, _means(totals, shards)))
            case _Rule.FROM_INFINITY:
                bases = [old.where(old.isfinite(), 0) for old in before]
                return list(torch._foreach_add(bases, _means(totals, shards)))
            case _Rule.FLAG:
                return [old ^ (total > 0) for old, total in zip(before, totals, strict=True)]
        return before


def _rule(buffer: Tensor) -> _Rule:
    if buffer.dtype == torch.bool:
        return _Rule.FLAG
    if buffer.dtype not in _ADDABLE:
        return _Rule.STAYS
    return _Rule.MEAN if bool(torch.isfinite(buffer).all()) else _Rule.FROM_INFINITY


def _means(totals: list[Tensor], shards: int) -> list[Tensor]:
    """Return `totals`, which have one type, divided by `shards`; integers are rounded down."""
    if totals[0].is_floating_point() or totals[0].is_complex():
        return list(torch._foreach_div(totals, shards))
    flat_N = torch.cat([total.flatten() for total in totals])
    means = flat_N.div(shards, rounding_mode="floor").split([total.numel() for total in totals])
    return [mean.view(total.shape) for mean, total in zip(means, totals, strict=True)]


def _buffer(slot: Slot) -> Tensor:
    buffer = slot.tensor
    assert buffer is not None
    return buffer


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
