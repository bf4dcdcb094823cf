"""Put back the buffers, the parameters and the mode of a model after code that may change them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Slot(NamedTuple):
    """A place in which a module keeps a tensor: the dict `home` of the module, and its `key`.

    `name` is the tensor's name in the model.
    """

    home: dict[str, Any]
    key: str
    name: str

    @property
    def tensor(self) -> Tensor | None:
        found: Tensor | None = self.home[self.key]
        return found


def buffer_slots(model: nn.Module) -> list[Slot]:
    """Return the slots of all buffers, such as running statistics and caches."""
    return _slots(list(model.named_modules()), "_buffers")


def parameter_slots(model: nn.Module) -> list[Slot]:
    """Return the slots of all parameters."""
    return _slots(list(model.named_modules()), "_parameters")


def _slots(modules: Sequence[tuple[str, nn.Module]], kind: str) -> list[Slot]:
    return [
        Slot(home, key, f"{path}.{key}" if path else key)
        for path, owner in modules
        for home in [getattr(owner, kind)]
        for key in home.keys()  # noqa: SIM118 - the dicts of torch.jit have no iterator
    ]


# A tensor's id, its version and its address, to find out whether it was written. The version counts
# the writes that torch records. torch does not record a write through `.data`, and an assignment to
# `.data` changes the address.
Mark = tuple[int, int, int]


def mark(slot: Slot) -> Mark:
    """Return a mark of the tensor in `slot`, which changes with most writes."""
    tensor = slot.tensor
    if tensor is None:
        return 0, 0, 0
    return id(tensor), tensor._version, local(tensor).data_ptr()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's share of a tensor that FSDP has divided, or the tensor itself."""
    share: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return share


class Kept:
    """The tensors in some slots, and a copy of their values."""

    def __init__(self, slots: Sequence[Slot], on_host: bool = False) -> None:
        """Copy the values, to the CPU if they are kept `on_host`."""
        self._slots = [(slot, slot.tensor) for slot in slots]
        self._tensors = [local(tensor) for _, tensor in self._slots if tensor is not None]
        self._values = [
            tensor.detach().to("cpu" if on_host else tensor.device, copy=True)
            for tensor in self._tensors
        ]
        self._marks = self._marks_now()

    def _marks_now(self) -> list[Mark]:
        return [mark(slot) if slot.key in slot.home else (0, 0, 0) for slot, _ in self._slots]

    def put_back_written(self) -> None:
        """Put back all tensors if torch has recorded that one of them was written."""
        if self._marks_now() != self._marks:
            self.put_back()
            self._marks = self._marks_now()

    @torch.no_grad()
    def put_back(self) -> None:
        """Put each tensor back in its slot, with its old values."""
        for slot, tensor in self._slots:
            if slot.key not in slot.home or slot.tensor is not tensor:
                slot.home[slot.key] = tensor
        for tensor, values in zip(self._tensors, self._values, strict=True):
            if tensor.shape != values.shape:  # resized in place
                tensor.data = values.to(tensor.device, copy=True)
        if self._tensors:  # torch refuses an empty list
            # Through `.data`, the marks of tensors that were not written stay the same.
            torch._foreach_copy_([tensor.data for tensor in self._tensors], self._values)


@contextlib.contextmanager
def left_alone(model: nn.Module) -> Iterator[list[str]]:
    """Collect the names of the buffers and parameters that the body changes.

    A write in place through `.data` is not found.
    """
    modules = list(model.named_modules())
    slots = [*_slots(modules, "_buffers"), *_slots(modules, "_parameters")]
    marks = [mark(slot) for slot in slots]
    changed: list[str] = []
    yield changed
    changed += [slot.name for slot, old in zip(slots, marks, strict=True) if mark(slot) != old]


@contextlib.contextmanager
def evaluating(model: nn.Module, on_host: bool) -> Iterator[Callable[[], None]]:
    """Run the body in evaluation mode, then put back the mode, the buffers and the parameters.

    Yield a function that puts back the buffers and the parameters. Call it before each batch, so
    that each batch begins with the same values.

    With `on_host`, the parameters are copied to the CPU. Otherwise the copies of trained parameters
    take the place of their gradients on the GPU. Frozen parameters have no gradients, so their
    copies are always on the CPU.
    """
    was_training = model.training
    before = _kept(model, on_host)
    model.eval()
    # Some modules change weights if their mode changes, as LoRA does.
    changes = any(type(module).train is not nn.Module.train for module in model.modules())
    buffers, *parameters = _kept(model, on_host) if changes else before

    def put_back() -> None:
        buffers.put_back()
        for kept in parameters:
            kept.put_back_written()

    try:
        yield put_back
    finally:
        model.train(was_training)
        for kept in before:
            kept.put_back()


def _kept(model: nn.Module, on_host: bool) -> list[Kept]:
    """Return copies of the buffers, the trained parameters and the frozen parameters."""
    modules = list(model.named_modules())
    trained, frozen = list[Slot](), list[Slot]()
    for slot in _slots(modules, "_parameters"):
        if (tensor := slot.tensor) is not None:
            (trained if tensor.requires_grad else frozen).append(slot)
    buffers = _slots(modules, "_buffers")
    return [Kept(buffers), Kept(trained, on_host), Kept(frozen, on_host=True)]
