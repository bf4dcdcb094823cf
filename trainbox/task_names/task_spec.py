"""Find the source of a task by its name, and which files its imports load, without importing it.

A task's own modules never replace modules of the standard library, torch or Trainbox.
"""

import ast
import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

from trainbox.disclosure.suggested_commands import command, nearest
from trainbox.errors import WrongUse
from trainbox.processes.streams import message

_MOST_FILES = 100  # that are searched for a class
TASKS_FOLDER = Path(__file__).parents[2] / "trainer" / "tasks"


def built_in_tasks() -> list[str]:
    """Return the names of the built-in tasks, sorted."""
    return sorted(path.stem for path in TASKS_FOLDER.glob("*.py") if path.stem != "__init__")


def is_task(word: str) -> bool:
    """Return whether a word on the command line names a task, and not a folder or a script."""
    return ".py:" in word or word in built_in_tasks()


def locate(spec: str) -> tuple[Path | str, str]:
    """Return the source of a task and the name of its class.

    `spec` is a built-in task such as `digits`, `file.py:Class` or `module:Class`. The source is a
    file or a dotted module.

    Raises:
        WrongUse: the task or the file does not exist, the file has the name of another module, or
            the spec has another form.
    """
    source, colon, class_name = spec.rpartition(":")
    if not colon:
        if spec in built_in_tasks():
            return TASKS_FOLDER / f"{spec}.py", "".join(
                word.capitalize() for word in spec.split("_")
            )
        raise _no_task(spec)
    if not class_name.isidentifier():
        raise WrongUse(
            f"task {spec}: {class_name!r} is not a class name: write file.py:Class or module:Class"
        )
    if not source.endswith(".py"):
        file = source.removesuffix(":").removesuffix(".py") + ".py"
        if not source.replace(".", "").isidentifier() and os.path.isfile(file):  # noqa: PTH113
            raise WrongUse(f"no task {spec!r}: did you mean {file}:{class_name}?")
        if not all(part.isidentifier() for part in source.split(".")):
            raise WrongUse(
                f"task {spec}: {source!r} is neither a .py file nor a module: write "
                "file.py:Class or module:Class"
            )
        return source, class_name
    _check_exists(spec, source)
    check_name(Path(source))
    return Path(source), class_name


def _check_exists(spec: str, source: str) -> None:
    if not Path(source).is_file():
        raise WrongUse(
            f"task {spec}: no file {source} in the current folder ({Path.cwd()}): check the path"
        )


def _no_task(spec: str) -> WrongUse:
    """Return the failure for `spec`, which is no built-in task and has no colon."""
    if spec.endswith(".py"):
        _check_exists(spec, spec)
        classes = _classes(Path(spec))
        named = " or ".join(f"{spec}:{name}" for name in classes[-3:]) or f"{spec}:CLASS"
        return WrongUse(
            f"task {spec} does not name the class: write {named}; a script is started by "
            f"`{command('run', spec)}`"
        )
    if spec.endswith(".ipynb"):
        return WrongUse(
            f"{spec} is a notebook: make a script of it with `jupyter nbconvert --to script {spec}`"
        )
    # os.path.isfile never raises, also for a name that is no path.
    if os.path.isfile(f"{spec}/config.json"):  # noqa: PTH113
        return WrongUse(
            f"{spec} is the folder of a run, not a task: the command that started a run resumes "
            f"it, and --config {spec} starts another run with its settings"
        )
    file = f"{spec}.toml" if os.path.isfile(f"{spec}.toml") else spec  # noqa: PTH113
    if file.endswith((".toml", ".json")):
        return WrongUse(f"{file} is a file of settings, not a task: write --config {file}")
    if spec == "help":
        hint = "write --help"
    elif spec in ("list", "ls", "status"):
        hint = f"`{command('runs')}` lists runs and sweeps, and `{command('tasks')}` lists tasks"
    elif meant := _written_as(spec):
        hint = f"did you mean {meant}?"
    else:
        names = nearest(spec, built_in_tasks(), f"use {', '.join(built_in_tasks())}")
        hint = f"{names} (a task of your own is file.py:Class or module:Class)"
    return WrongUse(f"no task {spec!r}: {hint}")


def _written_as(spec: str) -> str:
    """Return the task that `spec` may mean, as in my_tasks/rings.py:Rings for Rings, or ""."""
    module, _, last = spec.rpartition(".")
    if module and last.isidentifier() and os.path.isfile(f"{module.replace('.', '/')}.py"):  # noqa: PTH113 - never raises
        return f"{module}:{last}"
    beside = [*Path().glob("*.py"), *Path().glob("*/*.py")] if spec.isidentifier() else []
    found = (file for file in sorted(beside)[:_MOST_FILES] if spec in _classes(file))
    return next((f"{file}:{spec}" for file in found), "")


def _classes(file: Path) -> list[str]:
    """Return the names of the classes in a file that have a base, as each task has."""
    body = _parsed(file).body
    return [node.name for node in body if isinstance(node, ast.ClassDef) and node.bases]


def only_defined_tasks(file: Path) -> list[str]:
    """Return the tasks of a file that does nothing but define them, or [] if it may do more.

    Values may be computed, such as the weights of a generator of data.
    """
    if "trainbox" not in _imported(file):
        return []
    body, tasks = _parsed(file).body, list[str]()
    own = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.ClassDef):
            bases = {base.attr if isinstance(base, ast.Attribute) else "" for base in node.bases}
            bases |= {base.id for base in node.bases if isinstance(base, ast.Name)}
            tasks += [node.name] if bases & {"Task", "Classification", *tasks} else []
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            if names & own:  # such as result = main()
                return []
        elif not (is_text or isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)):
            return []
    return tasks


def _parsed(file: Path) -> ast.Module:
    """Return the code of a file. If it cannot be parsed, the module is empty.

    The import of the file reports the error.
    """
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return ast.Module([], [])


def warn_of_overruled_imports(spec: str) -> None:
    """Warn of imports of a task that load another module than the user's file of that name."""
    source, _ = locate(spec)
    for line in _overruled(source):
        message(line)


def check_name(path: Path) -> None:
    """Check that a task file can be imported under its name without replacing another module.

    Raises:
        WrongUse: the name has a dot, or another module has this name.
    """
    if "." in path.stem:
        raise WrongUse(
            f"task file {path} has a dot in its name: rename it, as in "
            f"{path.stem.replace('.', '_')}.py"
        )
    if winner := _winner(path.stem, path, path.parent):
        raise WrongUse(f"task file {path} has the name of {winner}: rename the file")


def make_importable(folder: Path | None = None) -> None:
    """Append `folder` and the current folder to sys.path.

    They come last, so that their modules do not shadow a library.
    """
    for added in (folder, Path()):
        if added is not None:
            keep_namespaces(added)
        if added is not None and str(added.resolve()) not in sys.path:
            sys.path.append(str(added.resolve()))


def keep_namespaces(folder: Path) -> None:
    """Load the namespaces of installed packages that a module in `folder` would replace.

    Such a namespace has no __init__.py, as `google`. Python takes a module of this name in any
    folder of sys.path before it.
    """
    own = str(folder.resolve())
    installed = [place for place in sys.path if place != own]
    files = {file.stem for file in folder.glob("*.py")}
    for name in files | {file.parent.name for file in folder.glob("*/__init__.py")}:
        spec = None if name in sys.modules else PathFinder.find_spec(name, installed)
        if spec is not None and spec.loader is None:
            sys.modules[name] = module_from_spec(spec)


def _overruled(task: Path | str) -> Iterator[str]:
    """Yield a warning for each module next to a task that a library of the same name replaces.

    `task` is the task's file, or its dotted module in the current folder.
    """
    if isinstance(task, str):
        name = task.partition(".")[0]
        if (own := _module_in(Path(), name)) and (winner := _winner(name, own, Path())):
            yield f"task {task} is loaded from {winner}, not from {own}: rename {own} to use it"
        return
    waiting, seen = [task], {task}
    for file in waiting:  # the loop body appends to this list
        for name in sorted(_imported(file)):
            own = _module_in(task.parent, name)
            if own is None or own in seen:
                continue
            seen.add(own)
            if winner := _winner(name, own, task.parent):
                yield f"`import {name}` in {file} loads {winner}, not {own}: rename {own} to use it"
            else:
                waiting.append(own)


def _module_in(folder: Path, name: str) -> Path | None:
    """Return the file that defines the module `name` in `folder`, or None."""
    return next(
        (file for file in (folder / name / "__init__.py", folder / f"{name}.py") if file.is_file()),
        None,
    )


def _imported(file: Path) -> set[str]:
    """Return the top-level names of the modules that `file` imports."""
    found = set()
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def _winner(name: str, own: Path, folder: Path) -> str | None:
    """Return the module that `import name` loads instead of the file `own`, or None.

    `folder` contains `own` and is last in sys.path.
    """
    if name in sys.stdlib_module_names:
        return f"the standard library's module {name}"
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
    else:
        spec = PathFinder.find_spec(name, [*sys.path, str(folder.resolve())])
        if spec is None:  # `own` is not written yet
            return None
        file = spec.origin
    if file is not None and Path(file).resolve() == own.resolve():
        return None
    return f"the module {name}" + (f" ({file})" if file else "")
