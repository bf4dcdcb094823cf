"""Run the measurements of one module in a process of its own:
`python -P -m tests.gpu.program MODULE ARGUMENTS RESULTS`.

`measure(**ARGUMENTS)` of the module yields names and values. Each pair is appended to the file
RESULTS at once, so that a program that hangs or crashes keeps what it has measured.
"""

import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Measure = Callable[..., Iterable[tuple[str, Any]]]


def write_results(measure: Measure, arguments: dict[str, Any], file: Path) -> None:
    """Append one JSON line for each pair that `measure` yields."""
    with file.open("a") as lines:
        for name, value in measure(**arguments):
            lines.write(json.dumps([name, value]) + "\n")
            lines.flush()


def read_results(file: Path) -> dict[str, Any]:
    """Return the values by name; an incomplete last line is ignored."""
    text = file.read_text() if file.exists() else ""
    return dict(json.loads(line) for line in text.split("\n")[:-1])


def tried(compute: Callable[[], Any]) -> Any:
    """Return `compute()`, or its error as `{"error": ..., "traceback": ...}`."""
    try:
        return compute()
    except Exception as error:  # noqa: BLE001 - the check reports it
        text = f"{type(error).__name__}: {error}"
        return {"error": text[:2000], "traceback": traceback.format_exc()[-4000:]}


if __name__ == "__main__":
    module, arguments, results = sys.argv[1:]
    write_results(importlib.import_module(module).measure, json.loads(arguments), Path(results))
