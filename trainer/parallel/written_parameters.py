"""Find the parameters that a forward writes, although only the optimizer should update them."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from trainbox.contract.errors import WrongUse
from trainer.parallel.buffers import Mark, Slot, mark, parameter_slots


class WrittenParameters:
    """The parameters of a model that is trained in several shards, watched in every forward.

    A forward must not change trained parameters. It may change frozen ones, such as those of a mean
    teacher. torch does not record a write through `.data`, so the values are compared as well: in
    the first forward, and in the forward after each `look_again`.
    """

    def __init__(self, model: nn.Module) -> None:
        slots = [slot for slot in parameter_slots(model) if slot.tensor is not None]
        self._frozen = [slot for slot in slots if not _parameter(slot).requires_grad]
        self._trained = [slot for slot in slots if _parameter(slot).requires_grad]
        self._marks: list[Mark] = []
        self._looks, self._looked = True, False
        # The values of the frozen parameters before the first forward, which their first change
        # needs. They are on the CPU, because few models ever change them.
        self._of_frozen: dict[str, Tensor] = {}
        # The trained parameters that each forward compares: those that a forward has written with
        # the same values, as clamp_ may do.
        self._compared: list[Slot] = []
        self._before: list[Tensor] = []

    @property
    def frozen(self) -> Sequence[Slot]:
        """The frozen parameters that no forward has changed so far."""
        return self._frozen

    def look_again(self) -> None:
        """Compare the values in the next forward."""
        self._looks = True

    def forget(self, names: Collection[str]) -> None:
        """Watch the frozen parameters `names` no longer."""
        self._frozen = [slot for slot in self._frozen if slot.name not in names]

    @torch.no_grad()
    def begin(self) -> None:
        """Note the parameters before a forward.

        Raises:
            WrongUse: A forward has changed a frozen parameter without a trace.
        """
        if self._looks:
            for slot in self._frozen:
                now = _parameter(slot).detach().cpu()
                if not torch.equal(self._of_frozen.setdefault(slot.name, now.clone()), now):
                    raise WrongUse(
                        f"a forward has changed the frozen parameter {slot.name} through .data, "
                        "which torch does not record, and with shards the bits would depend on the "
                        "number of processes: change it under torch.no_grad() instead, as in "
                        "parameter.lerp_(...)"
                    )
        self._before = [_copy(slot) for slot in (self._trained if self._looks else self._compared)]
        self._marks = [mark(slot) for slot in (*self._trained, *self._frozen)]

    @torch.no_grad()
    def end(self) -> list[tuple[Slot, Tensor]]:
        """Return the frozen parameters that this forward has changed.

        Each has its values from before the first change, on the device of the parameter.

        Raises:
            WrongUse: The forward has changed or unfrozen a parameter.
        """
        slots = [*self._trained, *self._frozen]
        written = {
            slot.name for slot, old in zip(slots, self._marks, strict=True) if mark(slot) != old
        }
        for slot, before in zip(
            self._trained if self._looks else self._compared, self._before, strict=True
        ):
            if not torch.equal(_parameter(slot), before):
                raise WrongUse(
                    f"a forward changes the trained parameter {slot.name}, and with shards the "
                    "bits would depend on the number of processes: compute the changed weight "
                    "without writing it, as torch.nn.utils.parametrize does, or train on one "
                    "process with --shards 1"
                )
        compared = {slot.name for slot in self._compared}
        self._compared = [slot for slot in self._trained if slot.name in written | compared]
        moved = []
        for slot in self._frozen:
            parameter, old = _parameter(slot), self._of_frozen[slot.name]
            if parameter.requires_grad:
                raise WrongUse(
                    f"a forward unfreezes the parameter {slot.name}, whose gradient is not added "
                    "over the shards: leave it unfrozen in build_model()"
                )
            # In the first forward, also a write through `.data` makes it a moving parameter.
            unseen = not self._looked and not torch.equal(parameter.detach().cpu(), old)
            if slot.name in written or unseen:
                moved.append((slot, old.to(parameter.device, copy=True)))
        self._looks, self._looked = False, True
        return moved


def _parameter(slot: Slot) -> Tensor:
    parameter = slot.tensor
    assert parameter is not None
    return parameter


def _copy(slot: Slot) -> Tensor:
    return _parameter(slot).detach().clone()
