"""The source files of a user's project that a script imports, with their digests."""

import contextlib
import hashlib
import modulefinder
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from entrypoint.script.target import Target


def source_digests(target: Target, folders: Sequence[Path]) -> dict[str, str]:
    """Return the SHA-256 of each source file in `folders` that the target imports.

    The keys are paths, relative to the first of `folders` that has the file. Nothing is executed,
    so imports by a computed name are not found.
    """
    files = {target.file.resolve()}
    if target.is_python and target.file.suffix != ".pyc":
        files |= _imported(target.file, folders)
    roots = [folder.resolve() for folder in folders]
    found: dict[str, str] = {}
    for file in sorted(files):
        root = next((root for root in roots if file.is_relative_to(root)), None)
        name = str(file.relative_to(root) if root else file)
        try:
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError:  # a program that may be executed, but not read
            found[name] = "unreadable"
    return found


def _imported(file: Path, folders: Sequence[Path]) -> set[Path]:
    finder = _Finder(path=[str(folder) for folder in folders])
    # Python itself reports a module that is not valid, if the script imports it.
    with contextlib.suppress(SyntaxError, ValueError, OSError, RecursionError, ImportError):
        finder.run_script(str(file))
    names = [getattr(module, "__file__", None) for module in finder.modules.values()]
    return {Path(name).resolve() for name in names if name}


# What modulefinder calls _PKG_DIRECTORY: `load_package` is called with the path.
_PACKAGE = 5


class _Finder(modulefinder.ModuleFinder):
    """A finder that knows packages without `__init__.py`, at which its base class fails."""

    def find_module(self, name: str, path: Any, parent: Any = None) -> Any:
        if path is not None or name not in sys.builtin_module_names:
            spec = PathFinder.find_spec(name, path or self.path)
            if spec is not None and spec.origin is None and spec.submodule_search_locations:
                folders = list(spec.submodule_search_locations)
                return None, folders, ("", "", _PACKAGE)
        return super().find_module(name, path, parent)

    def load_package(self, fqname: str, pathname: Any) -> Any:
        if not isinstance(pathname, list):
            return super().load_package(fqname, pathname)
        package = self.add_module(fqname)
        setattr(package, "__path__", pathname)  # noqa: B010 - the stub does not have it
        return package
