"""What the installed torch is built for, read from its files: importing it takes seconds."""

import importlib.util
import re
import struct
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
        found = _FLAGS.search(_constants(folder / "lib" / "libtorch_python.so"))
    except (OSError, ValueError, struct.error):
        return ()
    return tuple(found[1].decode().split()) if found else ()


def _torch_folder() -> Path | None:
    found = importlib.util.find_spec("torch")
    return Path(found.origin).parent if found is not None and found.origin is not None else None


def _constants(library: Path) -> bytes:
    """Return the section `.rodata` of a 64-bit ELF file. The whole file has 30 times its size.

    Raises:
        OSError, ValueError, struct.error: the file cannot be read, or is not such a file.
    """
    with library.open("rb") as file:
        header = file.read(64)
        if not header.startswith(b"\x7fELF\x02\x01"):
            raise ValueError(f"{library} is not a little-endian 64-bit ELF file")
        (at,) = struct.unpack_from("<Q", header, 40)
        size, count, names_index = struct.unpack_from("<HHH", header, 58)
        file.seek(at)
        table = file.read(size * count)
        # Of each section: the position of its name in the names, its offset and its size.
        sections = [
            struct.unpack_from("<I20xQQ", table, entry) for entry in range(0, size * count, size)
        ]
        _, names_at, names_size = sections[names_index]
        file.seek(names_at)
        names = file.read(names_size)
        for name, section_at, section_size in sections:
            if names[name:].startswith(b".rodata\0"):
                file.seek(section_at)
                return file.read(section_size)
    raise ValueError(f"{library} has no section .rodata")
