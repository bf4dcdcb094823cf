"""Make the state of a checkpoint plain: tensors, numbers and texts, which torch reads safely."""

from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from trainbox.errors import WrongUse

# What torch.load reads without running code from the file. A subclass of these is made plain.
_NUMBERS_AND_TEXTS = (bool, int, float, complex, str, bytes)
_OTHERS = (type(None), bytearray, torch.dtype, torch.device, torch.layout)
_PLAIN = frozenset({*_NUMBERS_AND_TEXTS, *_OTHERS})


def plain_state(tree: Any, path: str, may_be_sharded: bool = False) -> Any:
    """Return `tree`, which is at `path` of a state, with plain numbers instead of NumPy's.

    Tensors `may_be_sharded` if they are gathered later.

    Raises:
        WrongUse: It has a value that could not be loaded again, or a key of another type.
    """
    if type(tree) in _PLAIN:
        return tree
    if isinstance(tree, Tensor):
        return tree if may_be_sharded else _plain_tensor(tree, path)
    if isinstance(tree, Mapping):
        return {
            _plain_key(name, path): plain_state(value, f"{path}[{name!r}]")
            for name, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        parts = [plain_state(value, f"{path}[{index}]") for index, value in enumerate(tree)]
        return parts if isinstance(tree, list) else tuple(parts)
    if isinstance(tree, set):
        return {plain_state(value, f"an element of {path}") for value in tree}
    if isinstance(tree, numpy.generic):
        tree = tree.item()
    for kind in _NUMBERS_AND_TEXTS:
        if isinstance(tree, kind):
            return _plain_type(tree, kind)
    raise WrongUse(
        f"{path} is a {type(tree).__name__}, which cannot be loaded without running code: save "
        "tensors, numbers, strings, lists and dicts, such as array.tolist() or a state_dict()"
    )


def _plain_type(value: Any, kind: type) -> Any:
    return str.__str__(value) if kind is str else kind(value)  # str() of an Enum is its name


def _plain_key(name: Any, path: str) -> Any:
    if type(name) in (str, int):
        return name
    plain = name.item() if isinstance(name, numpy.generic) else name
    if not isinstance(plain, str | int | float | bool):
        raise WrongUse(f"{path} has the key {name!r}, a {type(name).__name__}: use a string")
    return plain


def _plain_tensor(tensor: Tensor, path: str) -> Tensor:
    if hasattr(tensor, "full_tensor"):
        raise WrongUse(
            f"{path} is sharded over the ranks: gather the state first, such as with "
            "torch.distributed.checkpoint.state_dict and full_state_dict=True"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise WrongUse(f"{path} is a sparse or quantized tensor: save it as dense tensors")
    return tensor
