"""Find the parameters that a forward writes, although only the optimizer should update them."""

import torch
from torch import Tensor, nn

from trainbox.contract.errors import WrongUse
from trainer.parallel.buffers import Mark, Slot, mark, parameter_slots


class WrittenParameters:
    """The parameters of a model that is trained in several shards, watched in every forward.

    A forward must not change trained parameters. It may change frozen ones, such as those of a mean
    teacher.
    """

    def __init__(self, model: nn.Module) -> None:
        slots = [slot for slot in parameter_slots(model) if slot.tensor is not None]
        self._frozen = [slot for slot in slots if not _parameter(slot).requires_grad]
        self._trained = [slot for slot in slots if _parameter(slot).requires_grad]
        self._marks: list[Mark] = []
        self._is_first = True
        # The values of the frozen parameters before the first forward, which their first change
        # needs. They are on the CPU, because few models ever change them.
        self._of_frozen: dict[str, Tensor] = {}
        # The trained parameters that are compared by values: all of them in the first forward, and
        # then those that a forward writes, perhaps with the same values, as clamp_ does.
        self._compared = self._trained
        self._before: list[Tensor] = []

    @property
    def still(self) -> list[str]:
        """The names of the frozen parameters that no forward has changed so far."""
        return [slot.name for slot in self._frozen]

    @torch.no_grad()
    def begin(self) -> None:
        """Note the parameters before a forward."""
        if self._is_first:
            self._of_frozen = {slot.name: _copy(slot) for slot in self._frozen}
        self._before = [_copy(slot) for slot in self._compared]
        self._marks = [mark(slot) for slot in (*self._trained, *self._frozen)]

    @torch.no_grad()
    def end(self) -> list[tuple[Slot, Tensor]]:
        """Return the frozen parameters that this forward is the first to change.

        Each has its values from before, on the device of the parameter.

        Raises:
            WrongUse: The forward has changed or unfrozen a parameter.
        """
        slots = [*self._trained, *self._frozen]
        written = {
            slot.name for slot, old in zip(slots, self._marks, strict=True) if mark(slot) != old
        }
        # Compare the values of trained parameters.
        for slot, before in zip(self._compared, self._before, strict=True):
            if not torch.equal(_parameter(slot), before):
                raise WrongUse(
                    f"a forward changes the trained parameter {slot.name}, and with shards the "
                    "bits would depend on the number of processes: compute the changed weight "
                    "without writing it, as torch.nn.utils.parametrize does, or train on one "
                    "process with --shards 1"
                )
        compared = set() if self._is_first else {slot.name for slot in self._compared}
        self._compared = [slot for slot in self._trained if slot.name in written | compared]
        # Find the frozen parameters that have moved. In the first forward, compare their values.
        moved = []
        for slot in self._frozen:
            parameter, old = _parameter(slot), self._of_frozen[slot.name]
            if parameter.requires_grad:
                raise WrongUse(
                    f"a forward unfreezes the parameter {slot.name}, whose gradient is not added "
                    "over the shards: leave it unfrozen in build_model()"
                )
            if slot.name in written or (self._is_first and not torch.equal(parameter, old)):
                moved.append((slot, self._of_frozen.pop(slot.name).to(parameter.device)))
        names = {slot.name for slot, _ in moved}
        self._frozen = [slot for slot in self._frozen if slot.name not in names]
        if self._is_first:
            self._of_frozen = {name: values.cpu() for name, values in self._of_frozen.items()}
            self._is_first = False
        return moved


def _parameter(slot: Slot) -> Tensor:
    parameter = slot.tensor
    assert parameter is not None
    return parameter


def _copy(slot: Slot) -> Tensor:
    return _parameter(slot).detach().clone()
