"""Report the text files that a script opens. Python imports a copy of this module at its start.

The copy is `sitecustomize.py` in the folder of the pipes, the first one in PYTHONPATH. It works
with Python 3.8 and newer, needs only `os` and `sys`, and never raises an error in the script.
"""

import os
import sys

PIPE, ROOTS, COPY = "opened", "roots", "sitecustomize.py"
SETTINGS = (".yaml", ".yml", ".toml", ".json", ".jsonnet", ".cfg", ".ini", ".conf", ".gin", ".txt")
_TEXTS = (
    *SETTINGS,
    *(".py", ".pyc", ".pyx", ".sh", ".c", ".cc", ".cpp", ".h", ".hpp", ".cu", ".cuh", ".jinja"),
)
EVENTS = ".tfevents."  # in the names of TensorBoard's files, which are reported when written


def is_reported(path: str, flags: int, roots: "tuple[str, ...]") -> bool:
    """Return whether the file `path`, opened with `flags`, belongs to the project in `roots`."""
    if flags & os.O_ACCMODE != os.O_RDONLY:
        return EVENTS in path
    # The standard library and the packages of an environment in the project's folder.
    is_installed = "/lib/python" in path or "-packages/" in path
    return path.endswith(_TEXTS) and path.startswith(roots) and not is_installed


def _watch(folder: str) -> None:
    """Write the name of each such file to the pipe, once."""
    pipe, seen = os.path.join(folder, PIPE), set()  # noqa: PTH118 - pathlib takes milliseconds
    with open(os.path.join(folder, ROOTS), encoding="utf-8") as file:  # noqa: PTH118, PTH123
        roots = tuple(file.read().split("\0"))

    def hook(event: str, arguments: "tuple[object, ...]") -> None:
        if event != "open" or isinstance(arguments[0], int):
            return
        try:
            path, flags = os.fsdecode(arguments[0]), arguments[2]  # type: ignore[arg-type]
            if not path.endswith(_TEXTS) and EVENTS not in path:
                return
            if sys.pycache_prefix and path.startswith(sys.pycache_prefix):
                path = path[len(sys.pycache_prefix) :]
            path = os.path.abspath(path)  # noqa: PTH100
            if path in seen or not is_reported(path, flags, roots):  # type: ignore[arg-type]
                return
            seen.add(path)
            # A descriptor that stays open could be closed by the script, and its number used again.
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.set_blocking(descriptor, True)
                os.write(descriptor, os.fsencode(path) + b"\0")
            finally:
                os.close(descriptor)
        except Exception:  # noqa: BLE001, S110 - such as a pipe whose reader has gone
            pass

    sys.addaudithook(hook)


def _import_next(folder: str) -> None:
    """Import the `sitecustomize` that Python would have imported without this one."""
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    own = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, own)


if __name__ == "sitecustomize":
    try:  # noqa: SIM105 - contextlib takes milliseconds
        _watch(os.path.dirname(__file__))  # noqa: PTH120
    except OSError:  # `trainbox run` has ended
        pass
    _import_next(os.path.dirname(__file__))  # noqa: PTH120
