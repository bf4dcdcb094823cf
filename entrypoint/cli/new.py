"""The verb `new`, which writes the file of a task or a script to change."""

import re
import shlex
from pathlib import Path

from entrypoint.cli.verb import Verb, verb
from trainbox.disclosure.suggested_commands import command
from trainbox.errors import WrongUse
from trainbox.folders.write_failures import show, writing
from trainbox.task_names.task_spec import check_name

_TEMPLATES = Path(__file__).parents[1] / "templates"


@verb("new", Verb)
def new(kind: str, path: Path) -> None:
    """Write a short working file PATH: a task, or a script with its own loop.

    Change the file, and train it with the command that is printed. `images` needs pictures in
    data/flowers/train/CLASS and data/flowers/validation/CLASS. The others make up their data.

    \b
    Examples:
      trainbox new my_tasks/mine.py
      trainbox new my_tasks/mine.py --kind regression
      trainbox new my_tasks/train.py --kind script
    """
    if path.suffix != ".py":
        stem = path.stem if path.suffix[1:].isalpha() else path.name  # not of v1.2
        meant = path.parent / f"{stem.strip('.').replace('.', '_') or 'mine'}.py"
        raise WrongUse(f"new {path}: this is not the name of a Python file: did you mean {meant}?")
    check_name(path)
    text = (_TEMPLATES / f"{kind}.py.txt").read_text(encoding="utf-8")
    with writing(path, "give another path"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise WrongUse(f"new {path}: the file exists: give the path of a new file") from None
    task = re.search(r"^class (\w+)\((?:Task|Classification)\)", text, re.MULTILINE)
    name = shlex.quote(f"{path}:{task[1]}" if task else str(path))
    show(f"written to {path}; to train it: {command('train' if task else 'run', name)}")
