"""The source files of a user's project that a script imports, with their digests."""

import contextlib
import hashlib
import modulefinder
from collections.abc import Sequence
from pathlib import Path

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
    finder = modulefinder.ModuleFinder(path=[str(folder) for folder in folders])
    # Python itself reports a module that is not valid, if the script imports it.
    with contextlib.suppress(SyntaxError, ValueError, OSError, RecursionError, ImportError):
        finder.run_script(str(file))
    names = [getattr(module, "__file__", None) for module in finder.modules.values()]
    return {Path(name).resolve() for name in names if name}
