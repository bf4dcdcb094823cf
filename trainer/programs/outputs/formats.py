"""Read the files that a script can leave: tensors, arrays, tables and JSON."""

import csv
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trainbox.errors import WrongUse
from trainbox.files.parsing import parse_json
from trainer.programs.outputs.contents import Entry, Key, entry_of_array, entry_of_value, leaves


def read_entries(path: Path) -> dict[Key, Entry]:
    """Return the entries of a file, by the format that its suffix names.

    No Python object is loaded from the file, so reading it runs no code of it.

    Raises:
        WrongUse: the file is missing, empty or damaged, or has no finite numbers.
    """
    read, _ = FORMATS[path.suffix]
    if not path.is_file():
        raise WrongUse(
            f"{path.name} is missing in {path.parent.name}/: let the script write it below its run "
            "folder, which is TRAINBOX_RUN, and {run} in its arguments"
        )
    if path.stat().st_size == 0:
        raise WrongUse(f"{path.name} is empty: the script did not write anything into it")
    try:
        entries = read(path)
    except WrongUse:
        raise
    except Exception as error:  # the libraries raise many types for a damaged file
        raise WrongUse(
            f"{path.name} cannot be read ({_first_line(error)}): compare another file, such as the "
            "weights"
        ) from error
    if not any(entry.is_comparable for entry in entries.values()):
        raise WrongUse(
            f"{path.name} has no finite numbers: compare a file with results of the training"
        )
    return entries


def noun(path: Path) -> str:
    """Return the name of an entry of the file's format."""
    return FORMATS[path.suffix][1]


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].partition(". ")[0][:200]


def _of_tensors(path: Path) -> dict[Key, Entry]:
    import torch  # no other format needs it

    from trainbox.tensor_files import read_tensor_file

    return {
        name: _of_tensor(leaf) if isinstance(leaf, torch.Tensor) else entry_of_value(leaf)
        for name, leaf in leaves(read_tensor_file(path))
    }


def _of_tensor(tensor: Any) -> Entry:
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError("a sparse or quantized tensor cannot be compared, save it as a dense one")
    dense = tensor.detach().resolve_conj().resolve_neg()
    try:
        return entry_of_array(dense.numpy())
    except TypeError:
        # NumPy has no bfloat16, no float8 and no complex32. Single precision has all their values,
        # but not the bits of each NaN.
        values = dense.to(torch.complex64 if dense.is_complex() else torch.float32).numpy()
        bits = dense.view(getattr(torch, f"int{8 * dense.itemsize}")).numpy()
        return Entry(str(dense.dtype).removeprefix("torch."), values, bits)


def _of_npz(path: Path) -> dict[Key, Entry]:
    # np.load leaves a damaged file open if it opens the file itself.
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {(name,): entry_of_array(arrays[name]) for name in arrays.files}


def _of_npy(path: Path) -> dict[Key, Entry]:
    return {("array",): entry_of_array(np.load(path, allow_pickle=False))}


def _of_json(path: Path) -> dict[Key, Entry]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = Counter(name for name, _ in pairs)
        if repeated := [name for name, count in names.items() if count > 1]:
            raise WrongUse(
                f"{path.name} has the key {repeated[0]!r} more than once in one object, so its "
                "value is not known: write each key once"
            )
        return dict(pairs)

    tree = parse_json(path.read_text(encoding="utf-8"), unique)
    return {name: entry_of_value(leaf) for name, leaf in leaves(tree)}


def _of_csv(path: Path) -> dict[Key, Entry]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file, strict=True) if row]
    if not rows:
        return {}
    has_header = any(_number(cell) is None for cell in rows[0])
    header = rows.pop(0) if has_header else [str(number + 1) for number in range(len(rows[0]))]
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise ValueError(
                f"row {number} has {len(row)} cells, and the first line has {len(header)}"
            )
    columns = zip(*rows, strict=True) if rows else [()] * len(header)
    return {
        (name,) if header.count(name) == 1 else (name, index): _of_column(list(cells))
        for index, (name, cells) in enumerate(zip(header, columns, strict=True))
    }


def _of_column(cells: list[str]) -> Entry:
    """Return the entry of a column, as of a list in JSON. An empty cell is NaN.

    In text, 1 may be a whole number or a rounded 0.9999, so all numbers are of one kind.
    """
    numbers = [_number(cell) if cell.strip() else float("nan") for cell in cells]
    entry = entry_of_value(cells if None in numbers else numbers)
    return replace(entry, kind="number") if entry.is_numeric else entry


def _number(cell: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return None


# The suffixes, with the function that reads the format and the name of its entries.
# entrypoint/drill/compare_files.py has the same suffixes.
FORMATS: dict[str, tuple[Callable[[Path], dict[Key, Entry]], str]] = {
    ".safetensors": (_of_tensors, "tensor"),
    ".pt": (_of_tensors, "tensor"),
    ".pth": (_of_tensors, "tensor"),
    ".bin": (_of_tensors, "tensor"),
    ".npz": (_of_npz, "array"),
    ".npy": (_of_npy, "array"),
    ".csv": (_of_csv, "column"),
    ".json": (_of_json, "entry"),
}
