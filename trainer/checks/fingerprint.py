"""A fingerprint of the Python state that checkpoints leave out: one part for each attribute."""

import argparse
import contextlib
import functools
import hashlib
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from trainer.parallel.buffers import local
from trainer.records.digest import tensor_digest
from trainer.system.sources import is_users_module

# The position of a number in an attribute: the names of attributes and the keys of containers.
Position = tuple[tuple[str, Any], ...]
ATTRIBUTE, _ITEM = "attribute", "item"
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_GENERATORS: dict[type, Callable[[Any], object]] = {
    torch.Generator: lambda value: value.get_state().tolist(),
    numpy.random.Generator: lambda value: value.bit_generator.state,
    numpy.random.RandomState: lambda value: value.get_state(),
    random.Random: lambda value: value.getstate(),
}
# Objects of these modules have addresses and counters of their own, and no state of a user.
_OPAQUE = ("torch._", "torch.cuda.", "torch.distributed.", "torch.utils.hooks", "trainer.")
# Of code, only the name is read, and not what functions, classes and modules contain.
_CODE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
    weakref.ref,
    type,
)
_OF_MODULES = vars(nn.Module()).keys() | {"_flat_weights", "_flat_weight_refs"}
_MOST_BYTES = 2**22  # of a larger tensor or array, every k-th slice is read
_MOST_VALUES = 5000  # in one attribute
_MOST_ELEMENTS = 1000  # of one container
_DEEPEST = 20


class Part(NamedTuple):
    """The fingerprint of one attribute, such as `Net.calls`.

    Attributes:
        digest: The SHA-256 of the attribute's content.
        numbers: The numbers in it that the user's code may use as counts, by their position.
        is_saved: Whether a checkpoint may have the attribute, because its object has its own
            `get_extra_state()` or `state_dict()`.
    """

    digest: str
    numbers: dict[Position, int | float]
    is_saved: bool


class Owner(NamedTuple):
    """An object whose attributes are fingerprinted, and these attributes without torch's own."""

    value: Any
    attributes: dict[str, Any]
    is_saved: bool = False


def owners(
    task: Any, model: nn.Module, optimizer: Optimizer, datasets: Mapping[str, Any]
) -> dict[str, Owner]:
    """Return the objects whose state a step may use, by a name such as `Net.conv1`."""
    found = {type(task).__name__: Owner(task, _attributes(task))}
    for path, module in model.named_modules():
        name = f"{type(model).__name__}.{path}".rstrip(".")
        has_extra = type(module).get_extra_state is not nn.Module.get_extra_state
        found[name] = Owner(module, _of_module(module), has_extra)
    parts = getattr(optimizer, "parts", (optimizer,))
    for number, part in enumerate(parts):
        own = {n: v for n, v in _attributes(part).items() if n not in _of_optimizers()}
        # A resume does not load the state of one of several optimizers by its own method.
        has_own = len(parts) == 1 and type(part).state_dict is not Optimizer.state_dict
        suffix = f" {number + 1}" if len(parts) > 1 else ""
        found[f"{type(part).__name__}{suffix}"] = Owner(part, own, has_own)
    for name, dataset in datasets.items():
        found |= of_dataset(name, dataset)
    return found


@functools.cache
def _of_optimizers() -> frozenset[str]:
    """Return the names of the attributes that every optimizer of torch has.

    They are found once, because the first optimizer imports much of torch.
    """
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], 0.1)))


def of_dataset(name: str, dataset: Any) -> dict[str, Owner]:
    """Return a dataset and the datasets in it, such as the dataset of a Subset."""
    found = dict[str, Owner]()
    waiting = [(name, dataset)]
    while waiting:
        path, value = waiting.pop()
        if any(value is owner.value for owner in found.values()):
            continue
        found[path] = Owner(value, _attributes(value))
        inner = found[path].attributes.items()
        waiting += [(f"{path}.{n}", v) for n, v in inner if isinstance(v, Dataset)]
    return found


def fingerprint(found: Mapping[str, Owner], saved: Iterable[Any] = ()) -> dict[str, Part]:
    """Return the fingerprints of all attributes of the owners `found`, by name.

    Numbers, texts, containers, tensors, random generators, and objects with such attributes are
    read. Of a tensor that shares its memory with a tensor in `saved`, which checkpoints save, only
    the dtype and the shape are read.
    """
    known = {id(owner.value) for owner in found.values()}
    memory = {_memory(tensor) for tensor in saved if isinstance(tensor, Tensor)}
    parts = {}
    for name, owner in found.items():
        for attribute, value in owner.attributes.items():
            reading = _Reading(known, memory)
            reading.read((), value, is_users=True)
            digest = reading.sha256.hexdigest()
            parts[f"{name}.{attribute}"] = Part(digest, reading.numbers, owner.is_saved)
    return parts


def set_numbers(
    found: Mapping[str, Owner], wanted: Mapping[str, Mapping[Position, int | float]]
) -> None:
    """Set numbers in attributes of the owners `found` to the values `wanted`.

    `wanted` has them by the name of the attribute and the position of the number in it.
    """
    for name, positions in wanted.items():
        owner, _, attribute = name.rpartition(".")
        for position, number in positions.items():
            # The attribute, or what is in it, may be missing in a new object.
            with contextlib.suppress(AttributeError, KeyError, IndexError, TypeError):
                holder, steps = found[owner].value, ((ATTRIBUTE, attribute), *position)
                for step in steps[:-1]:
                    holder = _get(holder, step)
                _set(holder, steps[-1], number)


def _get(holder: Any, step: tuple[str, Any]) -> Any:
    kind, key = step
    return getattr(holder, key) if kind == ATTRIBUTE else holder[key]


def _set(holder: Any, step: tuple[str, Any], number: int | float) -> None:
    kind, key = step
    if kind == _ITEM:
        holder[key] = type(holder[key])(number)  # such as a number of NumPy
        return
    kind_of_number: Any = type(getattr(holder, key, number))
    value = kind_of_number(number)
    if hasattr(holder, "__dict__") and key not in getattr(type(holder), "__slots__", ()):
        vars(holder)[key] = value  # a task is frozen
    else:
        object.__setattr__(holder, key, value)


class _Reading:
    """Reads one attribute into a digest, which does not depend on addresses."""

    def __init__(self, known: set[int], memory: set[int]) -> None:
        """Leave out the content of objects with the ids `known`.

        Of tensors at the addresses `memory`, read only the dtype and the shape.
        """
        self._known, self._memory, self._left = set(known), memory, _MOST_VALUES
        self._kept: list[Any] = []  # so that no id is used again
        self.sha256 = hashlib.sha256()
        self.numbers = dict[Position, int | float]()

    def read(self, position: Position, value: Any, is_users: bool) -> None:
        """Read `value` at `position`; note its numbers if the object or container `is_users`."""
        self._left -= 1
        if self._left < 0 or len(position) > _DEEPEST:
            return
        self._write(type(value).__qualname__)
        if isinstance(value, numpy.generic) or type(value) in _PLAIN:
            plain = value.item() if isinstance(value, numpy.generic) else value
            self._write(repr(plain))
            if is_users and type(plain) in (int, float):
                self.numbers[position] = plain
        elif isinstance(value, Tensor):
            self._write(_of_tensor(value, self._memory))
        elif isinstance(value, numpy.ndarray):
            self._write(f"{value.dtype} {value.shape}")
            if not value.dtype.hasobject:
                self.sha256.update(_sampled(value).tobytes())
        elif (state := _generator_state(value)) is not None:
            self._write(repr(state))
        elif isinstance(value, _CODE):
            self._write(getattr(value, "__qualname__", ""))
        elif id(value) not in self._known:
            self._known.add(id(value))
            self._kept.append(value)
            inside = []
            with contextlib.suppress(Exception):  # of the object's own code
                inside = list(_inside(value, is_users))
            for step, part, inner in inside:
                self._write(repr(step))
                self.read((*position, step), part, inner)

    def _write(self, text: str) -> None:
        self.sha256.update(text.encode(errors="surrogatepass") + b"\0")


def _inside(value: Any, is_users: bool) -> Iterator[tuple[tuple[str, Any], Any, bool]]:
    """Yield what is in a container or an object: its position, its value, and if it `is_users`.

    Only numbers in the user's own objects and containers are ever set to other values.
    """
    if isinstance(value, Mapping):
        for key, part in _some(list(value.items())):
            known = key if type(key) in _PLAIN else type(key).__qualname__
            yield (_ITEM, known), part, is_users
    elif isinstance(value, list | tuple | deque):
        for index, part in _some(list(enumerate(value))):
            yield (_ITEM, index), part, is_users and not isinstance(value, tuple)
    elif isinstance(value, set | frozenset):
        texts = sorted(repr(part) for part in value if type(part) in _PLAIN)
        yield (_ITEM, ""), " ".join([str(len(value)), *_some(texts)]), False
    if not type(value).__module__.startswith(_OPAQUE):
        own = is_users and _is_users(type(value))
        for name, part in _attributes_of(value).items():
            yield (ATTRIBUTE, name), part, own


def _some(elements: list[Any]) -> list[Any]:
    """Return the elements, or every k-th and the last one if there are many."""
    step = -(-len(elements) // _MOST_ELEMENTS)
    return elements if step <= 1 else [*elements[::step], *elements[-1:]]


def _is_users(kind: type) -> bool:
    # A scheduler of torch counts the steps of the user's training.
    of_users = (LRScheduler, types.SimpleNamespace, argparse.Namespace)
    return is_users_module(kind.__module__) or issubclass(kind, of_users)


def _attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that is not an owner."""
    if isinstance(value, nn.Module):
        own: dict[str, dict[str, Any]] = vars(value)
        return _of_module(value) | own["_parameters"] | own["_buffers"] | own["_modules"]
    return _attributes(value)


def _of_module(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes, without its hooks and the tensors that checkpoints have.

    The wrapper that torch.compile returns has only attributes of torch.
    """
    if type(module).__module__.startswith("torch._"):
        return {"__class__": type(module)}
    own = _attributes(module)
    loose = own.get("_non_persistent_buffers_set", ())
    found = {name: value for name, value in own.items() if name not in _OF_MODULES}
    found |= {name: buffer for name, buffer in own.get("_buffers", {}).items() if name in loose}
    parameters = dict(own.get("_parameters", {}))
    trained = [name for name, p in parameters.items() if p is not None and p.requires_grad]
    return found | {"__class__": type(module), "requires_grad": trained}


def _generator_state(value: Any) -> object | None:
    return next(
        (read(value) for kind, read in _GENERATORS.items() if isinstance(value, kind)), None
    )


def _of_tensor(tensor: Tensor, saved: set[int]) -> str:
    """Return a digest of a tensor.

    If a checkpoint has its numbers, or if it has none (on `meta`), return its dtype and its shape.
    """
    share = local(tensor.detach())
    if share.is_quantized:
        share = share.dequantize()
    elif share.layout != torch.strided:
        share = share.to_dense()
    if share.is_meta or _memory(share) in saved:
        return f"{tensor.dtype} {tuple(tensor.shape)}"
    return tensor_digest(_sampled(share))


def sampled_digest(tensor: Tensor) -> str:
    """Return a digest of a tensor; of a tensor above 4 MiB, of about 4 MiB of its slices."""
    return _of_tensor(tensor, set())


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, also attributes in slots."""
    in_slots: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # some objects of compiled code have no such state
        state = object.__getstate__(value)
        in_slots = state[1] if isinstance(state, tuple) else {}
    own: dict[str, Any] = {**in_slots, **getattr(value, "__dict__", {})}
    return own


def _sampled(values: Any) -> Any:
    """Return a view of a tensor or an array, with every k-th slice if it is large."""
    step = -(-values.nbytes // _MOST_BYTES)
    if step <= 1:
        return values
    longest = max(range(values.ndim), key=values.shape.__getitem__)
    return values[(slice(None),) * longest + (slice(None, None, step),)]


def _memory(tensor: Tensor) -> int:
    """Return the address of the tensor's memory, which its views have too, or -1 without any."""
    share = local(tensor)
    has_memory = share.layout == torch.strided and not share.is_meta
    return share.untyped_storage().data_ptr() if has_memory else -1
