"""A stand-in for CUDA graphs on the CPU: it records the operations of torch and repeats them.

As module, it is `python -m trainer` with this stand-in.
"""

import runpy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainbox.tensor_trees import tensors_in
from trainer.checks import capture
from trainer.loop import graphs
from trainer.parallel.world import World

T = TypeVar("T")
_OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Recorder:
    """As `graphs.Recorder`: `record` leaves all memory and the generator as they were."""

    def __init__(self, world: World) -> None:
        assert world.device.type == "cpu"

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        generator = torch.get_rng_state()
        recording = _Recording()
        try:
            with recording:
                result = work()
        finally:
            recording.put_back()
            torch.set_rng_state(generator)
        return result, recording.replay


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ops: list[tuple[Any, Any, Any, bool, list[Tensor | None]]] = []
        self._own = set[int]()  # the memory that an operation of the recording has made
        self._written: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        if _OF_VALUES & set(func.tags):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        given_args, given_kwargs = args, kwargs or {}
        args, kwargs = _detached(args), _detached(given_kwargs)
        self._keep((args, kwargs))
        given = {_address(tensor) for tensor in tensors_in((args, kwargs))}
        result = func(*given_args, **given_kwargs)
        if torch.Tag.inplace_view in func.tags:  # later operations get the new strides
            return result
        made: list[Tensor | None] = []
        for tensor in tensors_in(result):
            is_new = _address(tensor) not in given
            made.append(tensor.detach() if is_new else None)
            if is_new:
                self._own.add(_address(tensor))
        self._ops.append((func, args, kwargs, torch.is_grad_enabled(), made))
        return result

    def _keep(self, value: Any) -> None:
        """Copy the memory from before: some operations write more than their schema names."""
        for tensor in tensors_in(value):
            address = _address(tensor)
            if address not in self._own and address not in self._written:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self._written[address] = (whole, whole.clone())

    def put_back(self) -> None:
        """Put back the memory that the recording may have written."""
        for whole, before in self._written.values():
            whole.copy_(before)

    def replay(self) -> None:
        for func, args, kwargs, with_gradients, made in self._ops:
            with torch.set_grad_enabled(with_gradients):  # an LSTM prepares its backward
                result = func(*args, **kwargs)
            for recorded, tensor in zip(made, tensors_in(result), strict=True):
                if recorded is not None:
                    recorded.copy_(tensor)


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {name: _detached(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_detached(part) for part in value)
    return value


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def install(setattr_: Callable[[Any, str, Any], None] = setattr) -> None:
    """Capture steps on the CPU by the stand-in, also in short trainings.

    `setattr_` may be the method of a `monkeypatch`.
    """
    setattr_(graphs, "Recorder", Recorder)
    setattr_(graphs, "can_record", lambda device: device.type == "cpu")
    setattr_(capture, "FEWEST_STEPS", 0)


if __name__ == "__main__":
    install()
    runpy.run_module("trainer", run_name="__main__")
