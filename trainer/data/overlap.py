"""Count the examples that two datasets share, as far as that is cheap."""

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from trainer.data.examples import length

# Larger datasets are not compared: this is about 0.3 s.
_MOST_BYTES, _MOST_EXAMPLES = 2**28, 2**18
# Lists of files, as in the datasets of torchvision.
_FILES = ("samples", "imgs", "images", "files", "paths")


def in_both(first: Dataset[Any], second: Dataset[Any]) -> int | None:
    """Return how many examples of `second` are in `first`, or None if this is not known.

    Examples in memory are compared by their values. Files are compared by their names, and parts of
    the same dataset by their indices. No example is read.
    """
    if length(first) == 0 or length(second) == 0:
        return 0
    one, other = _contents(first), _contents(second)
    if one is None or other is None or one[0] != other[0]:
        return None
    known = set(one[1])
    return sum(key in known for key in other[1])


def is_split(dataset: Dataset[Any]) -> bool:
    """Return whether the dataset is a part of another one, such as of a random split."""
    return isinstance(dataset, Subset)


def _contents(dataset: Any) -> tuple[Hashable, Sequence[Hashable]] | None:
    """Return what the examples of a dataset are known by, and the key of each example."""
    indices = None
    while type(dataset) is Subset:
        own = list(map(int, dataset.indices))
        indices = own if indices is None else [own[i] for i in indices]
        dataset = dataset.dataset
    count = length(dataset)
    if max(count, len(indices or ())) > _MOST_EXAMPLES:
        return None
    if isinstance(dataset, TensorDataset):
        tensors = dataset.tensors
        if indices is not None:
            tensors = tuple(tensor[indices] for tensor in tensors)
        size = sum(tensor.nbytes for tensor in tensors)
        if size > _MOST_BYTES or any(tensor.device.type != "cpu" for tensor in tensors):
            return None
        form = tuple((str(tensor.dtype), tuple(tensor.shape[1:])) for tensor in tensors)
        rows = [_rows(tensor) for tensor in tensors]
        return form, [hash(parts) for parts in zip(*rows, strict=True)]
    keys: Sequence[Hashable] = range(count)
    kind: Hashable = id(dataset)
    for name in _FILES:
        files = _names(getattr(dataset, name, None))
        if len(files) == count:
            kind, keys = "files", files
            break
    return kind, keys if indices is None else [keys[i] for i in indices]


def _rows(tensor: torch.Tensor) -> list[bytes]:
    """Return the bytes of each example."""
    whole = tensor.detach().contiguous().reshape(len(tensor), -1).view(torch.uint8).numpy()
    return [row.tobytes() for row in whole]


def _names(files: Any) -> list[str]:
    """Return the files of a list of paths, or of tuples that begin with one, or else nothing."""
    if not isinstance(files, list | tuple):
        return []
    firsts = [file[0] if isinstance(file, tuple | list) and file else file for file in files]
    return [str(first) for first in firsts if isinstance(first, str | Path)]


@dataclass(frozen=True)
class RandomState:
    """The state of the generators on the CPU, from which a dataset may draw a split."""

    torch_state: bytes
    python_state: Any
    numpy_state: Any

    @staticmethod
    def now() -> "RandomState":
        """Return the present state."""
        name, keys, *rest = numpy.random.get_state()
        state = torch.get_rng_state().numpy().tobytes()
        return RandomState(state, random.getstate(), (name, tuple(keys), *rest))

    def restore(self) -> None:
        """Continue from this state."""
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch_state), dtype=torch.uint8))
        random.setstate(self.python_state)
        name, keys, *rest = self.numpy_state
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
