"""Find the parameters that a forward writes, although only the optimizer should update them."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from trainbox.errors import WrongUse
from trainer.parallel.buffers import Mark, Slot, mark, parameter_slots


class WrittenParameters:
    """The parameters of a model that is trained in several shards, watched in every forward.

    A forward must not change trained parameters. It may change frozen ones, such as the weights of
    a mean teacher. torch does not record a write through `.data`, so the values are compared as
    well: in the first forward, and in the forward after each `look_again`.
    """

    def __init__(self, model: nn.Module) -> None:
        slots = [slot for slot in parameter_slots(model) if slot.tensor is not None]
        self._frozen = [slot for slot in slots if not _parameter(slot).requires_grad]
        self._trained = [slot for slot in slots if _parameter(slot).requires_grad]
        self._begin: dict[str, Mark] = {}
        self._end: dict[str, Mark] = {}
        self._looks, self._looked = True, False
        # The values of frozen parameters before the first forward: after its first change, a
        # parameter's old values are needed. They are on the CPU, because few models ever need them.
        # Parameters that change between forwards, such as an average of the weights, are left out.
        self._of_frozen: dict[str, Tensor] = {}
        # The trained parameters whose values are compared in each forward, because a forward has
        # written them without a change, as clamp_ may do.
        self._compared: list[Slot] = []
        self._before: list[tuple[Slot, Tensor]] = []
        self._frozen_before: list[tuple[Slot, Tensor]] = []
        self._found = set[str]()  # the frozen parameters that forwards of this step have changed

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
        self._found -= set(names)

    @torch.no_grad()
    def begin(self) -> None:
        """Note the parameters before a forward."""
        compared = self._trained if self._looks else self._compared
        self._before = [(slot, _parameter(slot).detach().clone()) for slot in compared]
        frozen = self._frozen if self._looks else ()
        self._frozen_before = [(slot, _on_host(slot)) for slot in frozen]
        if not self._looked:
            self._of_frozen = {slot.name: values for slot, values in self._frozen_before}
        self._begin = {slot.name: mark(slot) for slot in (*self._trained, *self._frozen)}
        for name in {slot.name for slot in self._frozen} - self._found:
            if self._end.get(name, self._begin[name]) != self._begin[name]:
                self._of_frozen.pop(name, None)

    @torch.no_grad()
    def end(self) -> list[tuple[Slot, Tensor]]:
        """Return the frozen parameters that this forward has changed.

        Each has its values from before its first change, on the device of the parameter.

        Raises:
            WrongUse: The forward has changed or unfrozen a parameter.
        """
        self._end = {slot.name: mark(slot) for slot in (*self._trained, *self._frozen)}
        written = {name for name, now in self._end.items() if now != self._begin[name]}
        for slot, before in self._before:
            if not torch.equal(_parameter(slot), before):
                raise WrongUse(
                    f"a forward changes the trained parameter {slot.name}, and with shards the "
                    "bits would depend on the number of processes: compute the changed weight "
                    "without writing it, as torch.nn.utils.parametrize does, or train on one "
                    "process with --shards 1"
                )
        compared = {slot.name for slot in self._compared}
        self._compared = [slot for slot in self._trained if slot.name in written | compared]
        unseen = {
            slot.name
            for slot, before in self._frozen_before
            if slot.name not in written and not torch.equal(_on_host(slot), before)
        }
        moved = []
        for slot in self._frozen:
            if _parameter(slot).requires_grad:
                raise WrongUse(
                    f"a forward unfreezes the parameter {slot.name}, whose gradient is not added "
                    "over the shards: leave it unfrozen in build_model()"
                )
            if slot.name in (written | unseen) - self._found:
                moved.append((slot, self._old(slot, slot.name in unseen)))
                self._found.add(slot.name)
        self._looks, self._looked = False, True
        return moved

    def _old(self, slot: Slot, unseen: bool) -> Tensor:
        """Return the values of a frozen parameter before its first change.

        Raises:
            WrongUse: The parameter may have changed before without a record of torch, or it also
                changes between forwards.
        """
        if unseen and self._looked:
            raise WrongUse(
                f"a forward has changed the frozen parameter {slot.name} through .data, which "
                "torch does not record, and with shards the bits would depend on the number of "
                "processes: change it under torch.no_grad() instead, as in parameter.lerp_(...)"
            )
        if slot.name not in self._of_frozen:
            raise WrongUse(
                f"a forward changes the frozen parameter {slot.name}, which also changes between "
                "forwards, and with shards the bits would depend on the number of processes: "
                "change it only in the forward, or only in a hook of the optimizer"
            )
        return self._of_frozen[slot.name].to(_parameter(slot).device, copy=True)


def _parameter(slot: Slot) -> Tensor:
    parameter = slot.tensor
    assert parameter is not None
    return parameter


def _on_host(slot: Slot) -> Tensor:
    return _parameter(slot).detach().to("cpu", copy=True)
