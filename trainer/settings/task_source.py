"""Which file an import of a task takes: a task's own modules never come in place of the standard
library, torch or Trainbox.
"""

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from trainer.errors import WrongUse


def check_name(path: Path) -> None:
    """Refuse a task file that cannot be imported under its name without taking another module's
    place.

    Raises:
        WrongUse: the name has a dot, or belongs to another module.
    """
    if "." in path.stem:
        raise WrongUse(
            f"task file {path} has a dot in its name: rename it, as in "
            f"{path.stem.replace('.', '_')}.py"
        )
    if winner := _winner(path.stem, path, path.parent):
        raise WrongUse(f"task file {path} has the name of {winner}: rename the file")


def make_importable(folder: Path | None = None) -> None:
    """Append `folder` and the current folder to sys.path: last, so that nothing in them shadows a
    library.
    """
    for place in (folder, Path()):
        if place is not None and str(place.resolve()) not in sys.path:
            sys.path.append(str(place.resolve()))


def overruled(place: Path | str) -> Iterator[str]:
    """Yield a line for each module beside a task that an import of the task does not take, since a
    library has its name.

    `place` is the task's file, or its dotted module, which is looked for in the current folder.
    """
    if isinstance(place, str):
        name = place.partition(".")[0]
        if (own := _module_in(Path(), name)) and (winner := _winner(name, own, Path())):
            yield f"task {place} is taken from {winner}, not from {own}: rename {own} to use it"
        return
    waiting, seen = [place], {place}
    for file in waiting:  # it grows meanwhile
        for name in sorted(_imported(file)):
            own = _module_in(place.parent, name)
            if own is None or own in seen:
                continue
            seen.add(own)
            if winner := _winner(name, own, place.parent):
                yield f"`import {name}` in {file} takes {winner}, not {own}: rename {own} to use it"
            else:
                waiting.append(own)


def _module_in(folder: Path, name: str) -> Path | None:
    """The file that defines the module `name` in `folder`, if there is one."""
    return next(
        (file for file in (folder / name / "__init__.py", folder / f"{name}.py") if file.is_file()),
        None,
    )


def _imported(file: Path) -> set[str]:
    """The top-level names of the modules that `file` imports; none if it cannot be parsed, which
    its import reports.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return set()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def _winner(name: str, own: Path, folder: Path) -> str | None:
    """What `import name` takes where `folder`, which has the module as `own`, is last in sys.path;
    None if that is `own`.
    """
    if name in sys.stdlib_module_names:
        return f"the standard library's module {name}"
    file = getattr(sys.modules.get(name), "__file__", None)
    if name not in sys.modules and (
        spec := PathFinder.find_spec(name, [*sys.path, str(folder.resolve())])
    ):
        file = spec.origin
    if file is not None and Path(file).resolve() == own.resolve():
        return None
    return f"the module {name}" + (f" ({file})" if file else "")
