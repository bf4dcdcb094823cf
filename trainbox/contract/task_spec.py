"""Find the source of a task by its name, without importing it."""

from pathlib import Path

from trainbox.contract.errors import WrongUse
from trainbox.contract.hints import nearest
from trainbox.contract.streams import message
from trainbox.contract.task_modules import check_name, overruled

TASKS_FOLDER = Path(__file__).parents[2] / "trainer" / "tasks"


def built_in_tasks() -> list[str]:
    """Return the names of the built-in tasks, sorted."""
    return sorted(path.stem for path in TASKS_FOLDER.glob("*.py") if path.stem != "__init__")


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
        if spec.endswith(".py"):
            raise WrongUse(f"task {spec} does not name the class: write {spec}:CLASS")
        names = nearest(spec, built_in_tasks(), f"use {', '.join(built_in_tasks())}")
        raise WrongUse(
            f"no task {spec!r}: {names} (a task of your own is file.py:Class or module:Class)"
        )
    if not class_name.isidentifier():
        raise WrongUse(
            f"task {spec}: {class_name!r} is not a class name: write file.py:Class or module:Class"
        )
    if not source.endswith(".py"):
        if not all(part.isidentifier() for part in source.split(".")):
            raise WrongUse(
                f"task {spec}: {source!r} is neither a .py file nor a module: write "
                "file.py:Class or module:Class"
            )
        return source, class_name
    if not Path(source).is_file():
        raise WrongUse(
            f"task {spec}: no file {source} in the current folder ({Path.cwd()}): check the path"
        )
    check_name(Path(source))
    return Path(source), class_name


def warn_of_overruled_imports(spec: str) -> None:
    """Warn of imports of a task that load another module than the user's file of that name."""
    source, _ = locate(spec)
    for line in overruled(source):
        message(line)
