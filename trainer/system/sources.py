"""Find the source files of the user's code that this process has loaded.

If one of them changes, the bits of a training may change.
"""

import functools
import hashlib
import os
import sys
import sysconfig
import weakref
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

_CHECKOUT = Path(__file__).parents[2]
_OUR_TASKS = str(_CHECKOUT / "trainer" / "tasks") + os.sep
_LIBRARY_FOLDERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))

# Modules that are not the user's, by name. There are thousands, and `loaded_sources` is called at
# each digest and checkpoint.
_of_libraries: dict[str, ModuleType] = {}

# The digest of a file when its module, function or class was first seen. If the file is edited
# while the process runs, the process still computes with the version that it has loaded.
_seen: "weakref.WeakKeyDictionary[Any, str | None]" = weakref.WeakKeyDictionary()


def loaded_sources() -> dict[str, str]:
    """Return `{module: SHA-256 of its file}` for each loaded module that is the user's.

    These are the modules outside the standard library, site-packages and Trainbox, and Trainbox's
    own tasks. Code that was loaded without an entry in `sys.modules` is listed as `owner.name`.
    """
    loaded = sys.modules.copy()
    modules = [
        (name, module) for name, module in loaded.items() if module is not _of_libraries.get(name)
    ]
    modules = [(name, module) for name, module in modules if _is_module(module)]
    found: dict[str, str] = {}
    files = {str(vars(module).get("__file__")) for _, module in modules} | {"None"}
    for name, module in modules:
        if name in ("__main__", "__mp_main__"):
            continue
        if _add(found, name, module, vars(module).get("__file__")):
            _add_unregistered(found, name, module, files)
        else:
            _of_libraries[name] = module
    return found


def is_users_module(name: str) -> bool:
    """Return whether `loaded_sources` lists the module `name`."""
    module = sys.modules.get(name)
    file = vars(module).get("__file__") if _is_module(module) else None
    return isinstance(file, str) and _is_the_users(file)


def located_sources(names: Iterable[str]) -> dict[str, str]:
    """Return the digests of the files from which an import of `names` would load them.

    Names without a file are left out. Nothing is imported.
    """
    found = {}
    for name in names:
        if (file := _located(name)) is not None and (digest := _digest(file, None)) is not None:
            found[name] = digest
    return found


def _is_module(value: Any) -> bool:
    return isinstance(value, ModuleType)


def _add(found: dict[str, str], name: str, value: Any, file: Any) -> bool:
    """Add the digest of `file`, which defines `value`, and return whether it is the user's."""
    if not isinstance(file, str) or not _is_the_users(file):
        return False
    if value not in _seen:
        _seen[value] = _digest(file, vars(value).get("__loader__") if _is_module(value) else None)
    if (digest := _seen[value]) is not None:
        found[name] = digest
    return True


def _add_unregistered(
    found: dict[str, str], owner: str, module: ModuleType, files: set[str]
) -> None:
    """Add the values in `module` that come from files of no module in `sys.modules`.

    `importlib.util.spec_from_file_location` creates such modules.
    """
    for name, value in list(vars(module).items()):
        for file in _files_of(value):
            if file not in files:
                files.add(file)
                if _add(found, f"{owner}.{name}", value, file) and _is_module(value):
                    _add_unregistered(found, f"{owner}.{name}", value, files)


def _files_of(value: Any) -> Iterator[str]:
    if isinstance(value, ModuleType):
        yield str(vars(value).get("__file__"))
    elif isinstance(value, FunctionType):
        yield value.__code__.co_filename
    elif isinstance(value, type):
        # Copy the values, because another thread may add to the class.
        for function in list(vars(value).values()):
            if isinstance(function, FunctionType):
                yield function.__code__.co_filename


@functools.cache
def _is_the_users(file: str) -> bool:
    """Return whether neither `file` nor the target of its symlinks is in a library."""
    # Symlinks are followed only if the path decides nothing: there are thousands of files.
    for absolute in (os.path.abspath, os.path.realpath):
        path = absolute(file)
        if path.startswith(_OUR_TASKS):
            return True
        if path.startswith(_libraries()) or any(folder in path for folder in _LIBRARY_FOLDERS):
            return False
    return True


@functools.cache
def _libraries() -> tuple[str, ...]:
    standard = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    ours = [str(_CHECKOUT / name) for name in ("trainer", "entrypoint", "trainbox")]
    return tuple(
        path + os.sep
        for folder in [*standard, *ours]
        for path in (folder, os.path.realpath(folder))
    )


def _digest(file: str, loader: Any) -> str | None:
    """Return the SHA-256 of `file`, or None if it cannot be read.

    A file in an archive is read by `loader`.
    """
    try:
        data = Path(file).read_bytes()
    except OSError:
        try:
            data = loader.get_data(file)
        except (AttributeError, OSError):
            return None
    return hashlib.sha256(data).hexdigest()


def _located(name: str) -> str | None:
    """Return the file from which an import of the module `name` would load it, or None."""
    parts, path = name.split("."), None
    for end, part in enumerate(parts, start=1):
        inside = [str(Path(folder) / part) for folder in (sys.path if path is None else path)]
        try:
            spec = PathFinder.find_spec(".".join(parts[:end]), path)
        except (ImportError, ValueError):
            return None
        except KeyError:  # a namespace package, whose parent would have to be loaded
            path = inside
            continue
        if spec is None:
            return None
        if end == len(parts):
            return spec.origin if spec.has_location else None
        if spec.submodule_search_locations is None:
            return None
        path = list(spec.submodule_search_locations)
    return None
