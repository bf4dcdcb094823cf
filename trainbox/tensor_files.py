"""Read the files of torch.save and safetensors without running code from them."""

import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from trainbox.files.regular_files import open_regular


def read_tensor_file(path: Path, mapped: bool = False) -> Any:
    """Return what is in a .safetensors file, or in any other file, which torch.save wrote.

    Tensors are on the CPU. They are read from a file of torch.save when they are used, if they are
    `mapped`.

    Raises:
        MemoryError: the tensors do not fit in memory.
        OSError: the file is missing, unreadable or not a regular file.
        ValueError: the file is damaged, of another program, or has more than tensors and plain
            values. The text is the reason, and names a class that the file has.
    """
    open_regular(path).close()
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings(action="ignore"):  # of sparse tensors and of other formats
            # torch maps no file whose path is not Unicode, as with another encoding of the locale.
            mapped = mapped and os.fspath(path).encode(errors="replace") == os.fsencode(path)
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except SafetensorError as error:
        raise ValueError("it is damaged, or not a safetensors file") from error
    # torch raises many types for a file that it cannot read, also KeyError and EOFError.
    except Exception as error:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno):
            raise
        if "allocate memory" in str(error):
            raise MemoryError(f"{path} does not fit in memory") from error
        raise ValueError(_reason(str(error))) from error


def _reason(text: str) -> str:
    """Return our reason for an error of torch, whose texts propose to run the code in the file."""
    found = re.search(r"[Uu]nsupported (?:global: GLOBAL|GLOBAL|class) (\S+)", text)
    if found is not None:
        return f"it has an object of {found[1]}, and only tensors, numbers and texts are read"
    if "TorchScript" in text:
        return "it has a program of TorchScript, and only tensors, numbers and texts are read"
    return "it is damaged, or torch.save did not write it"
