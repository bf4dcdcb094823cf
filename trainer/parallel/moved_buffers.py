"""The buffers that the forwards of several shards change: one value from all shards."""

import enum
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from trainbox.errors import WrongUse
from trainer.parallel.buffers import Slot
from trainer.parallel.shard_sums import Exchange
from trainer.parallel.world import World

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


class MovedBuffers:
    """Tensors that forwards change: buffers (running statistics) and frozen parameters (EMA).

    Each shard begins with the values from before the step. After all shards, the mean of the
    shards' changes is added to these values. Statistics are thus per shard, as they are per process
    under torch's DistributedDataParallel. For integers, such as a count of batches, the mean is
    rounded down. An element that is infinite or NaN before the step, such as a running minimum at
    its start, becomes the mean of the shards' values, so a mask stays as it is. A bool changes if
    any shard changes it.
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

    @torch.no_grad()
    def restore(self) -> None:
        """Put back the values from before the step, for the next shard."""
        for group, before in zip(self._groups, self._before, strict=True):
            torch._foreach_copy_(list(map(_buffer, group)), before)

    @torch.no_grad()
    def end(self, shard: int) -> None:
        """Add the moves of a shard to the moves of this rank's earlier shards.

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
    """How the changes of a buffer in all shards become one value."""

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


class FirstMoves:
    """The frozen parameters that forwards change for the first time, in the shards of one step.

    A forward of one rank may change a parameter that no forward of another rank changes. So the
    ranks agree on the parameters before they exchange the moves.
    """

    def __init__(self, world: World, shards: int) -> None:
        self._world, self._shards = world, shards
        self._old: dict[str, tuple[Slot, Tensor]] = {}
        self._after: dict[tuple[int, str], Tensor] = {}

    @torch.no_grad()
    def add(self, found: Sequence[tuple[Slot, Tensor]]) -> None:
        """Add parameters, each with its values from before its first change."""
        for slot, old in found:
            self._old.setdefault(slot.name, (slot, old))

    @torch.no_grad()
    def end(self, shard: int) -> None:
        """Note the values after a shard, and put back the old ones for the next shard."""
        for name, (slot, old) in self._old.items():
            self._after[shard, name] = _buffer(slot).detach().clone()
            _buffer(slot).copy_(old)

    @torch.no_grad()
    def agreed(self, watched: Sequence[Slot]) -> tuple[MovedBuffers, list[str]] | None:
        """Return the moves of the parameters among `watched` that any rank has found, or None.

        All ranks must call this with parameters of the same names.
        """
        own = [slot.name in self._old for slot in watched]
        slots = [slot for slot, any_ in zip(watched, self._world.any_of(own), strict=True) if any_]
        if not slots:
            return None
        old = {s.name: self._old.get(s.name, (s, _buffer(s).detach().clone()))[1] for s in slots}
        moved = MovedBuffers(self._world, self._shards, slots)
        moved.begin()
        for shard in self._world.owned(self._shards):
            for slot in slots:
                _buffer(slot).copy_(self._after.get((shard, slot.name), old[slot.name]))
            moved.end(shard)
        return moved, list(old)
