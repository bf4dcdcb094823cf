"""What the installed torch is built for, read from its files: importing it takes seconds."""

import importlib.util
import mmap
import re
from functools import cache
from pathlib import Path

from entrypoint.system.cgroup import file_text

_ONE = rb"(?:sm|compute)_[0-9]{2,}[af]?"
_FLAGS = re.compile(rb"\0(" + _ONE + rb"(?: " + _ONE + rb")*)\0")


@cache
def torch_cuda() -> str | None:
    """Return the CUDA version that the installed torch is built for, or None."""
    folder = _torch_folder()
    text = file_text(folder / "version.py") if folder else ""
    match = re.search(r"^cuda\b[^=]*= *['\"]([\d.]+)['\"]", text, re.M)
    return match[1] if match else None


@cache
def torch_architectures() -> tuple[str, ...]:
    """Return the GPU architectures that the installed torch is built for.

    The tuple is empty if torch is built without CUDA, or if its library does not show them. The
    library has torch.cuda.get_arch_list() as one constant text (`CUDA_ARCH_FLAGS`).
    """
    folder = _torch_folder()
    if folder is None or torch_cuda() is None:
        return ()
    try:
        with (
            (folder / "lib" / "libtorch_python.so").open("rb") as library,
            mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ) as contents,
        ):
            found = _FLAGS.search(contents)
            return tuple(found[1].decode().split()) if found else ()
    except (OSError, ValueError):  # no such file, or an empty one
        return ()


def _torch_folder() -> Path | None:
    found = importlib.util.find_spec("torch")
    return Path(found.origin).parent if found is not None and found.origin is not None else None
