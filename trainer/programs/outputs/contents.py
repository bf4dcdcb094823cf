"""Tensors, columns and numbers of a file, with the bits by which they are compared."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainbox.errors import WrongUse

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

    @property
    def is_comparable(self) -> bool:
        """Whether it has a finite number. After NaN, trainings are the same in any case."""
        return self.is_numeric and bool(np.isfinite(self.values).any())


def entry_of_array(array: NDArray[Any]) -> Entry:
    """Return the entry of a NumPy array of any type without Python objects."""
    return Entry(str(array.dtype), array, array.view(f"V{array.itemsize}"))


def entry_of_value(value: Any) -> Entry:
    """Return the entry of a number, of a list of numbers, or of any other value as text."""
    numbers = value if isinstance(value, list) else [value]
    kinds = {type(number) for number in numbers}
    for types, dtype, largest in _NUMBERS:
        if kinds and kinds <= types and all(type(n) is float or abs(n) <= largest for n in numbers):
            return entry_of_array(np.array(value, dtype))
    texts = np.array(list(map(repr, value)) if isinstance(value, list) else repr(value), np.str_)
    return Entry("text", texts, texts)


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


def without(entries: Mapping[Key, Entry], ignored: Sequence[str]) -> dict[Key, Entry]:
    """Return the entries that no pattern of `ignored` matches, by a part of the key or all of it.

    Raises:
        WrongUse: a pattern matches no entry, or no entry with finite numbers is left.
    """
    names = {key: {*map(str, key), ".".join(map(str, key))} for key in entries}
    kept = dict(entries)
    for pattern in ignored:
        found = [key for key in names if any(fnmatchcase(name, pattern) for name in names[key])]
        if not found:
            known = ", ".join(".".join(map(str, key)) for key in list(entries)[:8])
            raise WrongUse(f"--ignore {pattern} matches no entry: use a name such as {known}")
        for key in found:
            kept.pop(key, None)
    if not any(entry.is_comparable for entry in kept.values()):
        raise WrongUse(
            f"no finite numbers are left without --ignore {', '.join(ignored)}: ignore fewer "
            "entries"
        )
    return kept


def without_folders(entries: Mapping[Key, Entry], folders: Sequence[str]) -> dict[Key, Entry]:
    """Return the entries with the paths of `folders` replaced by `{run}`, in texts and keys."""

    def replaced(text: Any) -> Any:
        for folder in folders if isinstance(text, str) else ():
            text = text.replace(folder, "{run}")
        return text

    def replaced_in(entry: Entry) -> Entry:
        if entry.values.dtype.kind != "U":
            return entry
        texts = [replaced(text) for text in entry.values.ravel().tolist()]
        array = np.array(texts, np.str_).reshape(entry.values.shape)
        return Entry("text", array, array)

    return {tuple(map(replaced, key)): replaced_in(entry) for key, entry in entries.items()}


def digest(entries: Mapping[Key, Entry]) -> str:
    """Return the SHA-256, in hex, of the keys, types, shapes and bytes of all entries."""
    whole = hashlib.sha256()
    for key in sorted(entries, key=repr):
        kind, bits = entries[key].kind, entries[key].bits
        whole.update(f"{key!r} {kind} {bits.shape} {bits.nbytes}\n".encode())
        whole.update(bits.tobytes())
    return whole.hexdigest()
