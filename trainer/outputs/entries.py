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

    `bits` are its bytes. `numbers` has the same values as numbers, or is None for text.
    """

    kind: str
    shape: tuple[int, ...]
    bits: NDArray[np.uint8]
    numbers: NDArray[Any] | None = None


def entry_of_array(array: NDArray[Any]) -> Entry:
    """Return the entry of a NumPy array of any type without Python objects."""
    if array.dtype.kind not in "biufc":
        bits = np.frombuffer(array.tobytes(), np.uint8)
        return Entry(str(array.dtype), array.shape, bits)
    bits = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return Entry(str(array.dtype), array.shape, bits, array)


def entry_of_value(value: Any) -> Entry:
    """Return the entry of a number, of a list of numbers, or of any other value as text."""
    numbers = value if isinstance(value, list) else [value]
    shape = (len(value),) if isinstance(value, list) else ()
    kinds = {type(number) for number in numbers}
    for types, dtype, largest in _NUMBERS:
        if kinds and kinds <= types and all(_fits(number, largest) for number in numbers):
            return entry_of_array(np.array(value, dtype))
    return Entry("text", shape, np.frombuffer(repr(value).encode("utf-8", "replace"), np.uint8))


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
        entry = entries[key]
        whole.update(f"{key!r} {entry.kind} {entry.shape} {entry.bits.size}\n".encode())
        whole.update(entry.bits.data)
    return whole.hexdigest()
