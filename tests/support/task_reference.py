"""Write the docstrings of `Task` and `Classification` to docs/reference/task.md.

    python -P -m tests.support.task_reference

A test compares the page with the docstrings.
"""

import inspect
import re
import textwrap
from pathlib import Path

from trainbox import Classification, Task

PAGE = Path(__file__).parents[2] / "docs/reference/task.md"
_BEGIN, _END = "## Methods of a task\n", "## Example weights\n"


def reference() -> str:
    """Return the section of the methods: the docstring of each public method, in order."""
    parts = [_BEGIN, _text(inspect.getdoc(Task) or "")]
    for kind in (Task, Classification):
        if kind is Classification:
            parts += ["## Methods of a classification\n", _text(inspect.getdoc(kind) or "")]
        for name, method in vars(kind).items():
            if inspect.isfunction(method) and not name.startswith("_") and method.__doc__:
                _, *parameters = inspect.signature(method).parameters
                heading = f"### `{name}({', '.join(parameters)})`\n"
                parts += [heading, _text(inspect.getdoc(method) or "")]
    return "\n".join(parts)


def _text(docstring: str) -> str:
    """Return paragraphs of Markdown. The errors are a sentence."""
    body, _, errors = docstring.partition("\nRaises:\n")
    paragraphs = [" ".join(part.split()) for part in body.split("\n\n") if part.strip()]
    for name, text in re.findall(r"^ *(\w+): ((?:.|\n(?! *\w+: ))+)", errors, re.MULTILINE):
        paragraphs.append(f"Raises `{name}`: {' '.join(text.split())}")
    filled = [textwrap.fill(part, 100, break_on_hyphens=False) for part in paragraphs]
    return "\n\n".join(filled) + "\n"


def main() -> None:
    """Replace the section of the page."""
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.partition(_BEGIN)[0], page.partition(_END)[2]
    PAGE.write_text(before + reference() + "\n" + _END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
