"""The operations of a training step: what a CUDA graph of the step would repeat."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # torch documents no other path

from trainbox.errors import text_of
from trainbox.tensor_trees import tensors_in
from trainer.checks.fingerprint import sampled_digest

T = TypeVar("T")
# This argument may differ between steps: a graph reads the learning rate from a tensor.
_FREE_ARGUMENT = "lr"
_LONG = 60
_OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Op(NamedTuple):
    """One operation.

    Attributes:
        name: The name in torch, such as `aten.mul.Tensor`.
        memory: Where each tensor among its arguments is from, with its type and its strides.
        numbers: The other arguments.
        problem: Why a graph cannot repeat it, or "".
    """

    name: str
    memory: tuple[str, ...]
    numbers: tuple[str, ...]
    problem: str


class OpTrace(TorchDispatchMode):
    """Notes the operations of one step, in one or several parts. It never raises an error.

    Each step has its tensors at other addresses. So a tensor is identified by the origin of its
    memory: the operation of this step that has made it, its number among the inputs of the step,
    or, for memory from before the step, the address.
    """

    supports_higher_order_operators = True  # they run, and are reported as not comparable

    def __init__(self, device: torch.device, state: Iterable[Tensor]) -> None:
        """Trace a step on `device`. A checkpoint has the tensors `state`."""
        super().__init__()
        self.ops: list[Op] = []
        self.problem = ""
        self._inputs = set[int]()
        self._device, self._state = device, {_address(tensor) for tensor in state}
        self._places: dict[int, str] = {}
        # `_outside` has the addresses from before the step that are not in `state`: for each, the
        # first operation that reads it, and a digest of its values at this time. `_written` has the
        # addresses that operations write.
        self._outside: dict[int, tuple[str, str]] = {}
        self._written = set[int]()

    def give(self, tensors: Sequence[Tensor | None], what: str) -> None:
        """Name the memory of `tensors` by `what` and a number, as each step has other addresses."""
        for number, tensor in enumerate(tensors):
            if tensor is not None:
                place = f"{what} {number}"
                self._looked_at(lambda t=tensor, p=place: self._place_at(t, p), place)  # type: ignore[misc]

    def _place_at(self, tensor: Tensor, place: str) -> None:
        self._places[_address(tensor)] = place

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if getattr(func, "namespace", "") == "profiler":  # marks of the optimizer for a profile
            return func(*args, **named)
        op = self._looked_at(lambda: self._before(func, args, named), str(func))
        result = func(*args, **named)
        self._looked_at(lambda: self._after(func, op, result), str(func))
        return result

    def _looked_at(self, look: Callable[[], T], name: str) -> T | None:
        """Return what `look` returns, or note that the operation `name` cannot be compared."""
        try:
            return look()
        except Exception as error:  # noqa: BLE001 - of unusual tensors, in many places of torch
            cause = text_of(error).partition("\n")[0]
            self.problem = self.problem or f"{name} cannot be compared ({cause})"
            return None

    def _before(self, func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Op:
        """Describe an operation before it runs."""
        arguments = func._schema.arguments
        given = {**dict(zip([a.name for a in arguments], args, strict=False)), **named}
        given.pop(_FREE_ARGUMENT, None)
        tensors = tensors_in(given)
        if func is torch.ops.aten.lift_fresh.default:  # a tensor of numbers of Python
            self._places[_address(tensors[0])] = f"the literal {sampled_digest(tensors[0])}"
        memory = tuple(map(self._place, tensors))
        numbers = tuple(f"{name}={_plain(value)}" for name, value in given.items())
        for tensor in tensors:
            self._look_at(tensor, str(func))
        for argument in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._written.update(map(_address, tensors_in(given.get(argument.name))))
        self._inputs = set(map(_address, tensors))
        problem = next(filter(None, map(self._problem_of, tensors)), "")
        return Op(str(func), memory, numbers, problem)

    def _after(self, func: Any, op: Op | None, result: Any) -> None:
        """Note an operation, with the memory of its result."""
        if op is None:
            return
        made = tensors_in(result)
        for number, tensor in enumerate(made):
            if _address(tensor) not in self._inputs:
                self._places[_address(tensor)] = f"result {number} of op {len(self.ops) + 1}"
        if _OF_VALUES & set(func.tags) or (op.memory and not made and result is not None):
            op = op._replace(problem="needs the values of a tensor on the host")
        elif op.memory and any(t.device != self._device and t.device.type == "cpu" for t in made):
            op = op._replace(problem=op.problem or "copies a tensor to the host")
        self.ops.append(op)

    def _place(self, tensor: Tensor) -> str:
        address = _address(tensor)
        place = self._places.get(address) or ("" if address == 0 else f"address {address}")
        layout = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        return f"{place} {layout}"

    def _look_at(self, tensor: Tensor, name: str) -> None:
        """Note the values of a tensor from before the step that a checkpoint does not have."""
        address = _address(tensor)
        if address not in self._places and address not in self._state:
            what = f"op {len(self.ops) + 1} {_short(name)}"
            self._outside.setdefault(address, (what, sampled_digest(tensor)))

    def _problem_of(self, tensor: Tensor) -> str:
        is_literal = not tensor.dim() and _address(tensor) in self._places
        is_of_host = tensor.device.type == "cpu" and self._device.type != "cpu"
        reads_host = is_of_host and not is_literal
        return "reads memory of the host" if reads_host else ""

    def difference(self, later: "OpTrace") -> str:
        """Return why a graph of this step cannot compute the `later` one, or ""."""
        if problem := self.problem or later.problem:
            return problem
        for number, (one, other) in enumerate(zip(self.ops, later.ops, strict=False), start=1):
            if found := _difference(number, one, other):
                return found
        if len(self.ops) != len(later.ops):
            return f"one step has {len(self.ops)} ops, and another has {len(later.ops)}"
        # What the operations of the first step have written, the graph writes too.
        for address, (what, digest) in later._outside.items():
            before = self._outside.get(address, ("", ""))[1]
            if before != digest and address not in self._written:
                return f"{what} reads other values in each step"
        return ""


def _difference(number: int, one: Op, other: Op) -> str:
    name = f"op {number} {_short(one.name)}"
    if problem := one.problem or other.problem:
        return f"{name} {problem}"
    if one.name != other.name:
        return f"op {number} is {one.name} in one step and {other.name} in another"
    if one.memory != other.memory:
        return f"{name} has a tensor of another shape or place in each step"
    for before, after in zip(one.numbers, other.numbers, strict=False):
        if before != after:
            values = f"{before.partition('=')[2]}, {after.partition('=')[2]}"
            shown = f" ({values})" if len(values) < _LONG else ""
            return f"{name} has another number in each step{shown}"
    return ""


def _short(name: str) -> str:
    """Return the name of an operation without its overload: `aten.add` for `aten.add.Tensor`."""
    return name.rpartition(".")[0] or name


def _plain(value: Any) -> str:
    """Return the text of an argument without its tensors and generators."""
    if isinstance(value, Tensor | torch.Generator):
        return type(value).__name__
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    return repr(value)


def _address(tensor: Tensor) -> int:
    if tensor.layout != torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()
