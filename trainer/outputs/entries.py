"""Tensors, columns and numbers of a file, with the bits by which they are compared."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The names that lead to an entry, such as ("model", "0.weight"). A text that joins them could be
# the same for two entries.
Key = tuple[Any, ...]

# Python's types, NumPy's type for them, and the largest integer that it has exactly.
_NUMBERS = (
    ({bool}, np.bool_, 1),
    ({int}, np.int64, 2**63 - 1),
    ({int, float}, np.float64, 2**53),
)


@dataclass(frozen=True)
class Entry:
    """A tensor, a column, a number or a text of a file.

    `kind` is the type in the file. `values` may have a wider type. `bits` has the same shape, and
    compares them bit by bit.
    """

    kind: str
    values: NDArray[Any]
    bits: NDArray[Any]

    @property
    def is_numeric(self) -> bool:
        """Whether the values are numbers."""
        return self.values.dtype.kind in "biufc"


def entry_of_array(array: NDArray[Any]) -> Entry:
    """Return the entry of a NumPy array of any type without Python objects."""
    return Entry(str(array.dtype), array, array.view(f"V{array.itemsize}"))


def entry_of_value(value: Any) -> Entry:
    """Return the entry of a number, of a list of numbers, or of any other value as text."""
    numbers = value if isinstance(value, list) else [value]
    kinds = {type(number) for number in numbers}
    for types, dtype, largest in _NUMBERS:
        if kinds and kinds <= types and all(_fits(number, largest) for number in numbers):
            return entry_of_array(np.array(value, dtype))
    texts = np.array(list(map(repr, value)) if isinstance(value, list) else repr(value), np.str_)
    return Entry("text", texts, texts)


def _fits(number: float, largest: int) -> bool:
    return isinstance(number, float) or abs(number) <= largest


def leaves(tree: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield the key and the value of each leaf of nested dicts, lists and tuples.

    A list of numbers is one leaf.
    """
    if isinstance(tree, Mapping) and tree:
        for name, part in tree.items():
            yield from leaves(part, (*key, name))
    elif isinstance(tree, list | tuple) and any(not isinstance(part, int | float) for part in tree):
        for index, part in enumerate(tree):
            yield from leaves(part, (*key, index))
    else:
        yield key, list(tree) if isinstance(tree, tuple) else tree


def digest(entries: Mapping[Key, Entry]) -> str:
    """Return the SHA-256, in hex, of the keys, types, shapes and bytes of all entries."""
    whole = hashlib.sha256()
    for key in sorted(entries, key=repr):
        kind, bits = entries[key].kind, entries[key].bits
        whole.update(f"{key!r} {kind} {bits.shape} {bits.nbytes}\n".encode())
        whole.update(bits.tobytes())
    return whole.hexdigest()
