"""A fingerprint of the Python state that checkpoints leave out."""

import contextvars
import ctypes
import hashlib
import itertools
import os
import pickle
import random
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from trainer.run.digest import tensor_digest
from trainer.system.sources import is_users_module, loaded_sources

ENVIRONMENT = "the environment"
GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)
_PLAIN = (type(None), bool, int, float, complex, str)
# Objects of these modules have addresses and counters of their own, and no state of a user.
_OPAQUE = ("torch._", "torch.cuda.", "torch.distributed.", "torch.utils.hooks", "trainer.")
_OF_MODULES = vars(nn.Module()).keys() | {"_flat_weights", "_flat_weight_refs"}
_MOST_BYTES = 2**22  # of a larger tensor or array, every k-th slice is read
_SHOWN = 60  # the most characters of a value in a message


class Part(NamedTuple):
    """One attribute.

    Attributes:
        shown: Its value for a message, or "" if it is long.
        owner: The user's class or module that has it, or "".
        is_saved: Whether the object that has it decides itself what checkpoints save.
    """

    digest: str
    shown: str
    kind: type
    owner: str = ""
    is_saved: bool = False


_NOTHING = Part("", "", object)


def fingerprint(
    task: Any, model: nn.Module, optimizer: Optimizer, datasets: Mapping[str, Any]
) -> dict[str, Part]:
    """Return the parts of the state outside checkpoints, by name.

    These are the attributes and hooks of the model's modules and tensors, of the task and of the
    optimizer, the order of the modules and of the optimizer's parameters, the tensors that share
    memory, the values in the user's classes and modules, the numbers, tensors and generators of
    `datasets`, and the environment. A part has all that can be reached from it except other parts.
    """
    owners = _of_users(task, optimizer, *model.modules(), *datasets.values())
    optimizers = {"optimizer": optimizer}
    optimizers |= {f"optimizer.{n}": each for n, each in enumerate(getattr(optimizer, "parts", ()))}
    roots = owners | optimizers | {"a task": task}
    roots |= {f"module {path}": module for path, module in model.named_modules()}
    names = {id(root): name for name, root in roots.items()}
    states = [model.state_dict(), *(v for v in optimizer.state.values() if isinstance(v, dict))]
    saved = {_memory(v) for state in states for v in state.values() if isinstance(v, Tensor)}
    found = dict[str, Part]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python will not pickle iterators of itertools for ever
        for name, value, owner, is_saved in _parts(task, model, optimizers, datasets, owners):
            shown = repr(value) if type(value) in _PLAIN else ""
            # Two parts may have the same name.
            digest = _Pickler(names, saved).digest(value) + found.get(name, _NOTHING).digest
            shown = shown if len(shown) < _SHOWN else ""
            found[name] = Part(digest, shown, type(value), owner, is_saved)
    return found


def _parts(
    task: Any,
    model: nn.Module,
    optimizers: Mapping[str, Optimizer],
    datasets: Mapping[str, Any],
    owners: Mapping[str, Any],
) -> Iterator[tuple[str, Any, str, bool]]:
    """Yield the name, the value, the owner and `is_saved` of each part."""
    for path, module in model.named_modules():
        has_extra = type(module).get_extra_state is not nn.Module.get_extra_state
        for name, value, is_tensor in _of_module(f"{path}." if path else "", module):
            yield name, value, "", has_extra and not is_tensor
    for name, value in _relations(model, optimizers["optimizer"]).items():
        yield name, value, "", False
    for path, each in optimizers.items():
        # A resume does not load the state of one of several optimizers by its own method.
        has_own = len(optimizers) == 1 and type(each).state_dict is not Optimizer.state_dict
        for name, value in _of_torch(each).items():
            if name not in ("state", "param_groups", "defaults"):
                yield f"{path}.{name}", value, "", has_own
    for name, value in _attributes(task).items():
        yield f"{type(task).__name__}.{name}", value, "", False
    for name, value in _of_datasets(datasets, set()):
        yield name, value, "", False
    for owner, values in owners.items():
        for name, value in list(_variables(values).items()):
            if not _is_loaded(value):  # an import changes nothing
                yield f"{owner}.{name}", value, owner, False
    # torch sets a variable of its own when it loads its compiler, as a profile does.
    variables = {name for name in os.environ if not name.startswith("TORCHINDUCTOR_")}
    yield ENVIRONMENT, [(name, os.environ[name]) for name in sorted(variables)], "", False


def _relations(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return what relates the parts of a model and its optimizer, which save them by name."""
    state, named = model.state_dict(keep_vars=True), dict(model.named_parameters())
    first = dict[int, str]()
    shared = {
        name: first.setdefault(_memory(value), name)
        for name, value in state.items()
        if isinstance(value, Tensor) and _memory(value) > 0
    }
    names = {id(parameter): name for name, parameter in named.items()}
    groups = [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
    return {
        "the order of the modules": [p for p, _ in model.named_modules(remove_duplicate=False)],
        "the tensors that share memory": {a: b for a, b in shared.items() if a != b},
        "the parameters of the optimizer": groups,
    }


def _of_datasets(datasets: Mapping[str, Any], seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers, tensors and generators of datasets, and of the datasets in them.

    `seen` has the ids of datasets that are left out.
    """
    for owner, dataset in datasets.items():
        if id(dataset) in seen:
            continue
        seen.add(id(dataset))
        own = _attributes(dataset)
        yield from (
            (f"{owner}.{name}", value)
            for name, value in own.items()
            if isinstance(value, (int, float, Tensor, numpy.ndarray, *GENERATORS))
        )
        inner = {f"{owner}.{n}": value for n, value in own.items() if isinstance(value, Dataset)}
        yield from _of_datasets(inner, seen)


def _of_module(prefix: str, module: nn.Module) -> Iterator[tuple[str, Any, bool]]:
    """Yield the name and the value of each part of `module`, and whether it is a tensor of it."""
    own = _of_torch(module)
    yield from ((prefix + name, own[name], False) for name in own.keys() - _OF_MODULES)
    yield f"{prefix}__class__", _kind_of(module), False
    for name, tensor in (own["_parameters"] | own["_buffers"]).items():
        if tensor is not None:
            is_saved = name not in own["_non_persistent_buffers_set"]
            yield prefix + (f"{name}.attributes" if is_saved else name), tensor, True


def _of_users(*parts: Any) -> dict[str, Any]:
    """Return the user's modules, and the classes in them and of `parts`, by name."""
    users = {name: sys.modules[name] for name in loaded_sources() if name in sys.modules}
    owners = [base for part in parts for base in type(part).__mro__]
    owners += [value for module in users.values() for value in vars(module).values()]
    classes = [c for c in owners if isinstance(c, type) and c.__module__ in users]
    return {f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes} | users


def _kind_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _reduced(_kind: str) -> None:
    """Stand for an object in a pickle, which is never loaded."""


class _Pickler(pickle.Pickler):
    """Digests what an object contains, also where pickle would refuse it or write an address.

    It writes the names of the objects with the ids `names`, and not the content of `saved` memory.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        saved: set[int],
        elements: dict[int, tuple[Any, str]] | None = None,
    ) -> None:
        self._names, self._saved, self._sha256 = names, saved, hashlib.sha256()
        # The elements of sets and their digests, by id. An element may be in many sets.
        self._elements = {} if elements is None else elements
        super().__init__(types.SimpleNamespace(write=self._sha256.update))

    def digest(self, value: Any) -> str:
        """Return the SHA-256 of `value`, of its class alone if it cannot be read."""
        try:
            self.dump(value)
        except Exception:  # noqa: BLE001 - of any object's own code
            return type(value).__qualname__
        return self._sha256.hexdigest()

    def persistent_id(self, value: Any) -> Any:
        """Return what to write of texts and sets, which must not depend on addresses.

        pickle writes a text once, so a text from a checkpoint would differ from one in the source.
        """
        if type(value) is str:
            return value.encode(errors="surrogatepass")
        if type(value) not in (set, frozenset):
            return None
        for element in value:
            if id(element) not in self._elements:
                self._elements[id(element)] = element, ""  # until its digest is known
                inner = _Pickler(self._names, self._saved, self._elements)
                self._elements[id(element)] = element, inner.digest(element)
        return "set", sorted(self._elements[id(element)][1] for element in value)

    def reducer_override(self, value: Any) -> Any:
        if value is _reduced:
            return NotImplemented
        kind = _kind_of(value)
        if id(value) in self._names:
            content: Any = self._names[id(value)]
        elif _is_loaded(value) or (isinstance(value, type) and not _is_users(value)):
            content = value.__name__
        elif isinstance(value, type | types.ModuleType):  # made in a function
            content = _variables(value)
        elif isinstance(value, Tensor):
            content = _of_tensor(value, self._saved)
        elif isinstance(value, nn.Module | Optimizer):
            content = _of_torch(value)
        else:
            read = next((r for known, r in _READ.items() if isinstance(value, known)), None)
            if read is None:
                read = (lambda _: ()) if kind.startswith(_OPAQUE) else _reduction
            content = read(value)
            if _is_users(type(value)) or content is None:
                content = content, _attributes(value), type(value)
        return _reduced, (kind,), content


def _is_loaded(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and value.__name__ in sys.modules


def _is_users(kind: type) -> bool:
    return is_users_module(kind.__module__)


def _variables(owner: Any) -> dict[str, Any]:
    """Return the variables of a class or a module, without those of Python and torch's compiler."""
    return {name: value for name, value in vars(owner).items() if not name.startswith("__")}


def _reduction(value: Any) -> Any:
    """Return what pickle would write of an object, or None if it would refuse the object."""
    if isinstance(value, set | frozenset):  # of a user's class
        return set(value)
    try:
        parts = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - such as a lock
        return None
    return parts if isinstance(parts, str) else [*parts[:3], *(list(p or ()) for p in parts[3:5])]


def _of_array(value: Any) -> Any:
    numbers = value.tolist() if value.dtype.hasobject else _sampled(value).tobytes()
    return value.shape, str(value.dtype), numbers


def _of_function(value: types.FunctionType) -> Any:
    """Return the code of a user's function, and what it keeps between calls."""
    # A decorator gives its function the name of another module.
    if not is_users_module(value.__globals__.get("__name__", "")):
        return value.__qualname__
    return value.__code__, value.__defaults__, value.__kwdefaults__, value.__closure__, vars(value)


def _of_generator(value: Any) -> Any:
    frame = value.gi_frame
    return (frame.f_lasti, dict(frame.f_locals), value.gi_yieldfrom) if frame else ()


def _of_tensor(tensor: Tensor, saved: set[int]) -> Any:
    """Return the numbers of a tensor, unless a checkpoint has them, its attributes and hooks."""
    share = local(tensor.detach())
    if share.is_quantized:
        share = share.dequantize()
    elif share.layout != torch.strided:
        share = share.to_dense()
    readable = not share.is_meta and _memory(tensor) not in saved
    numbers = tensor_digest(_sampled(share)) if readable else ""
    kinds = ("backward", "post_accumulate_grad")
    hooks = [getattr(tensor, f"_{kind}_hooks", None) or {} for kind in kinds]
    own = {n: v for n, v in vars(tensor).items() if not n.startswith("_dynamo")}  # of a compiler
    own |= {"requires_grad": tensor.requires_grad, "grad": tensor.grad if tensor.is_leaf else None}
    listed = [hook for numbered in hooks for hook in numbered.values()]
    strides = share.stride() if share.layout == torch.strided else ()
    return tuple(tensor.shape), strides, str(tensor.dtype), numbers, own, listed


def _of_torch(value: nn.Module | Optimizer) -> dict[str, Any]:
    """Return the attributes, and the hooks under new numbers, because each process counts them."""
    own = _attributes(value)
    named = [name for name, part in own.items() if "_hooks" in name and isinstance(part, dict)]
    hooks = [hook for name in named for hook in own.pop(name).values()]
    return own | {f"hook {number}": hook for number, hook in enumerate(hooks)}


# What to write of objects that pickle refuses, or of which it writes an address or a number.
_READ: dict[Any, Callable[[Any], Any]] = {
    numpy.ndarray: _of_array,
    torch.Generator: lambda value: value.get_state().tolist(),
    itertools.count: repr,
    ctypes.Array | ctypes.Structure | memoryview: bytes,
    contextvars.ContextVar: lambda value: [value.get(None)],
    types.MappingProxyType: dict,
    types.CodeType: lambda value: (value.co_code, value.co_consts, value.co_names),
    types.FunctionType: _of_function,
    types.CellType: lambda value: () if value == types.CellType() else [value.cell_contents],
    types.MethodType: lambda value: (value.__func__, value.__self__),
    types.BuiltinMethodType: lambda value: (value.__name__, value.__self__),
    types.GeneratorType: _of_generator,
    weakref.ref: lambda value: value(),
    staticmethod | classmethod: lambda value: [value.__func__],
    property: lambda value: (value.fget, value.fset, value.fdel),
}


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, also those in slots."""
    state = object.__getstate__(value)
    in_slots = state[1] if isinstance(state, tuple) else {}
    return {**in_slots, **getattr(value, "__dict__", {})}


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


def local(tensor: Tensor) -> Tensor:
    """Return this rank's share of a divided tensor, or the tensor itself."""
    share: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return share
