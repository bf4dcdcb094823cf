"""A fingerprint of the Python state that checkpoints leave out."""

import functools
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

from trainer.run.digest import tensor_digest
from trainer.system.sources import is_users_module, loaded_sources

GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)
_PLAIN = (type(None), bool, int, float, complex, str)
# Objects of these modules have addresses and counters of their own, and no state of a user.
_OPAQUE = ("torch._", "torch.cuda.", "torch.distributed.", "torch.utils.hooks", "trainer.")
_NO_STATE = (types.ModuleType, types.BuiltinFunctionType, type)
_OF_MODULES = frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs"}
_OF_OPTIMIZERS = frozenset({"state", "param_groups", "defaults"})
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_MOST_BYTES = 2**22  # of a larger tensor or array, every k-th number is read
_SHOWN = 60  # the most characters of a value in a message


class Part(NamedTuple):
    """The digest of one attribute, its value for a message or "" if it is long, and its class."""

    digest: str
    shown: str
    kind: type


def fingerprint(
    task: Any, model: nn.Module, optimizer: torch.optim.Optimizer, datasets: Mapping[str, Any]
) -> dict[str, Part]:
    """Return the parts of the state outside checkpoints, by name.

    These are the attributes and hooks of the model's modules and tensors, of the task and of the
    optimizer, the values in the user's classes and modules, the numbers and generators of
    `datasets`, and the environment. A part has all that can be reached from it except other parts.
    """
    roots = {id(part): str(number) for number, part in enumerate([task, optimizer])}
    roots |= {id(module): f"module {path}" for path, module in model.named_modules()}
    states = [model.state_dict(), *optimizer.state.values()]
    saved = {_storage(v) for state in states for v in state.values() if isinstance(v, Tensor)}
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python will not pickle iterators of itertools for ever
        for name, value in _parts(task, model, optimizer, datasets, saved):
            shown = repr(value) if type(value) in _PLAIN else ""
            digest = _digest(value, roots, saved)
            found[name] = Part(digest, shown if len(shown) < _SHOWN else "", type(value))
    return found


def _parts(
    task: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    datasets: Mapping[str, Any],
    saved: set[int],
) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each part."""
    for path, module in model.named_modules():
        prefix, own = f"{path}." if path else "", _of_torch(module)
        yield from ((prefix + name, own[name]) for name in own.keys() - _OF_MODULES)
        hooks = [hook for name in own if "_hooks" in name for hook in own[name]]
        yield from ((f"{prefix}hook {number}", hook) for number, hook in enumerate(hooks))
        for name, tensor in {**own["_parameters"], **own["_buffers"]}.items():
            if tensor is not None and _storage(tensor) not in saved:
                yield prefix + name, tensor
            elif tensor is not None:
                yield f"{prefix}{name}.attributes", _extras(tensor)
    yield from ((f"{type(task).__name__}.{n}", v) for n, v in _attributes(task).items())
    own = _of_torch(optimizer)
    yield from ((f"optimizer.{name}", own[name]) for name in own.keys() - _OF_OPTIMIZERS)
    for owner, dataset in datasets.items():
        for name, value in _attributes(dataset).items():
            if isinstance(value, (int, float, *GENERATORS)):
                yield f"{owner}.{name}", value
    users = {name: sys.modules[name] for name in loaded_sources() if name in sys.modules}
    owners = [type(part) for part in (task, optimizer, *model.modules(), *datasets.values())]
    classes = dict.fromkeys(base for owner in owners for base in owner.__mro__)
    named = {c.__name__: c for c in classes if c.__module__ in users} | users
    for owner, values in named.items():
        for name, value in list(vars(values).items()):
            if not name.startswith("__") and not isinstance(value, _NO_STATE):
                yield f"{owner}.{name}", value
    # torch sets a variable of its own when it loads its compiler, as a profile does.
    names = [name for name in sorted(os.environ) if not name.startswith("TORCHINDUCTOR_")]
    yield "the environment", [(name, os.environ[name]) for name in names]


def _digest(value: Any, roots: Mapping[int, str], saved: set[int]) -> str:
    """Return the SHA-256 of `value`, of its class alone if it cannot be read."""
    sink = _Sink()
    try:
        _Pickler(sink, roots, saved).dump(value)
    except Exception:  # noqa: BLE001 - of any object's own code
        return type(value).__qualname__
    return sink.sha256.hexdigest()


class _Sink:
    """A file that keeps only the SHA-256 of what is written."""

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return len(data)


def _reduced(_kind: str) -> None:
    """Stand for an object in a pickle, which is never loaded."""


class _Pickler(pickle.Pickler):
    """Writes what an object contains, also where pickle would refuse it or write an address."""

    def __init__(self, sink: _Sink, roots: Mapping[int, str], saved: set[int]) -> None:
        super().__init__(sink)
        self._roots, self._saved = roots, saved

    def persistent_id(self, value: Any) -> Any:
        """Return what to write of texts and sets, which must not depend on addresses.

        pickle writes a text once, so a text from a checkpoint would differ from one in the source.
        """
        if type(value) is str:
            return value.encode(errors="surrogatepass")
        if type(value) not in (set, frozenset):
            return None
        return "set", sorted(_digest(element, self._roots, self._saved) for element in value)

    def reducer_override(self, value: Any) -> Any:
        if value is _reduced:
            return NotImplemented
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if id(value) in self._roots:
            return _reduced, (self._roots[id(value)],)
        if isinstance(value, _NO_STATE):
            return _reduced, (f"{kind} {getattr(value, '__qualname__', value.__name__)}",)
        state = self._state(value)
        if state is not NotImplemented:
            return _reduced, (kind,), state
        try:
            return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except Exception:  # noqa: BLE001 - such as a lock
            return _reduced, (kind,), (_attributes(value),)

    def _state(self, value: Any) -> Any:
        """Return what to write instead of `value`, or NotImplemented if pickle knows."""
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if read := next((read for kind, read in _READ.items() if isinstance(value, kind)), None):
            return read(value)
        module = type(value).__module__
        if is_users_module(module):
            items = list(value.items()) if isinstance(value, dict) else ()
            items = list(value) if isinstance(value, list | tuple | set | frozenset) else items
            return _attributes(value), items
        return () if f"{module}.".startswith(_OPAQUE) else NotImplemented

    def _of_tensor(self, tensor: Tensor) -> Any:
        """Return the numbers of a tensor, unless a checkpoint has them, and its attributes."""
        share = local(tensor.detach())
        readable = share.layout == torch.strided and not share.is_meta and not share.is_quantized
        numbers = tensor_digest(_sampled(share)) if readable else ""
        numbers = "saved" if _storage(tensor) in self._saved else numbers
        return tuple(tensor.shape), str(tensor.dtype), numbers, _extras(tensor)


def _array(value: Any) -> Any:
    numbers = value.tolist() if value.dtype.hasobject else _sampled(value).tobytes()
    return value.shape, str(value.dtype), numbers


def _function(value: types.FunctionType) -> Any:
    """Return what a function of a user keeps between calls."""
    own = (value.__defaults__, value.__kwdefaults__, value.__closure__, vars(value))
    return value.__qualname__, own if is_users_module(value.__module__) else ()


def _generator(value: Any) -> Any:
    frame = value.gi_frame
    return (frame.f_lasti, dict(frame.f_locals), value.gi_yieldfrom) if frame else ()


# What to write of objects that pickle refuses, or of which it writes an address or a number.
_READ: dict[Any, Callable[[Any], Any]] = {
    numpy.ndarray: _array,
    torch.Generator: lambda value: (value.get_state().tolist(),),
    itertools.count: lambda value: (repr(value),),
    types.FunctionType: _function,
    types.CellType: lambda value: () if value == types.CellType() else (value.cell_contents,),
    types.MethodType: lambda value: (value.__func__, value.__self__),
    functools.partial: lambda value: (value.func, value.args, value.keywords),
    types.GeneratorType: _generator,
    weakref.ref: lambda value: (value(),),
    nn.Module | torch.optim.Optimizer: lambda value: (_of_torch(value),),
}


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, also those in slots."""
    listed = (vars(cls).get("__slots__", ()) for cls in type(value).__mro__)
    names = [name for slots in listed for name in ([slots] if isinstance(slots, str) else slots)]
    in_slots = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {**in_slots, **getattr(value, "__dict__", {})}


def _of_torch(value: nn.Module | torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes, with the hooks as lists, because each process numbers them."""
    hidden = ("param_groups", "defaults") if isinstance(value, torch.optim.Optimizer) else ()
    own = [(name, part) for name, part in vars(value).items() if name not in hidden]
    return {n: list(v.values()) if "_hooks" in n and isinstance(v, dict) else v for n, v in own}


def _extras(tensor: Tensor) -> Any:
    """Return the attributes and the hooks of a tensor."""
    hooks = [getattr(tensor, name, None) or {} for name in _TENSOR_HOOKS]
    own = {n: v for n, v in vars(tensor).items() if not n.startswith("_dynamo")}  # of a compiler
    return own, [hook for numbered in hooks for hook in numbered.values()]


def _sampled(values: Any) -> Any:
    """Return the numbers of a tensor or an array, or every k-th of them if it is large."""
    step = -(-values.nbytes // _MOST_BYTES)
    return values.reshape(-1)[::step] if step > 1 else values


def _storage(tensor: Tensor) -> int:
    """Return the address of the tensor's memory, which its views have too; 0 if it has none."""
    share = local(tensor)
    has_memory = share.layout == torch.strided and not share.is_meta
    return share.untyped_storage().data_ptr() if has_memory else 0


def local(tensor: Tensor) -> Tensor:
    """Return this rank's share of a divided tensor, or the tensor itself."""
    share: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return share
