"""Report an exception of a task's own code in one line: the task, the method, the line, the fix."""

import errno
import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from trainbox.errors import ExitCode, Failure, StorageFailure, WrongUse, text_of
from trainbox.folders.write_failures import disk_is_full
from trainbox.task import Task
from trainer.task_remedies import remedy

_TRAINER = Path(__file__).parent
_OURS = (_TRAINER, _TRAINER.parent / "trainbox")
_LIBRARIES = tuple(
    sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

# The same command would raise these errors again. Other errors of the system may be temporary.
_LASTING = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)

# A failed device, driver or loader process may raise in any method. The task is not the cause.
_OF_THE_MACHINE = re.compile(
    r"(?i)(cuda|cublas|cudnn|nccl|hip|mps)[ _](error|status)|^DataLoader worker \(pid"
)

# The first line of an error in a traceback. Lines of the frames begin with a space.
_AFTER_FRAMES = re.compile(r"^ .*\n([\w.]+(?:: .*)?)$", re.MULTILINE)
_OF_THE_SYSTEM = re.compile(r"\w+: \[Errno (\d+)\] (.*?)(?:: '(.*)')?")

# An argument without others, such as batch in model(batch).
_ALONE = re.compile(r"\w\((\w+)\)")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_LONGEST = 500  # characters of an error; the message has a remedy and a path after it
_LONGEST_LINE = 150  # characters of each line after the first one


class _Frame(NamedTuple):
    """One line of a traceback.

    Attributes:
        owner: The object of the method, if it is known.
        given: The name and the value of the argument that the line gives to a function alone, as
            `batch` in model(batch), or ("", None).
    """

    file: str
    line: int
    function: str
    owner: Any = None
    given: tuple[str, Any] = ("", None)

    @property
    def is_ours(self) -> bool:
        """Whether the file belongs to Trainbox, but not to a built-in task."""
        path = Path(self.file)
        return any(map(path.is_relative_to, _OURS)) and not path.is_relative_to(_TRAINER / "tasks")

    @property
    def is_the_users(self) -> bool:
        """Whether the file belongs to a task: neither to Trainbox nor to a library."""
        return (
            not self.is_ours and Path(self.file).is_file() and not self.file.startswith(_LIBRARIES)
        )

    def __str__(self) -> str:
        path = Path(self.file)
        if path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())
        return f"{path}:{self.line}"


def mistake_of(error: Exception, task: str, log: Path | None) -> Failure | None:
    """Return the failure to report for `error`, or None if the task's code did not raise it.

    `task` is the name of the task, and `log` is the file with the traceback, if there is one.
    """
    text = text_of(error)
    of_the_machine = _OF_THE_MACHINE.search(text.partition("\n")[0])
    if of_the_machine and "device-side assert" not in text:
        return None
    frames = [*_frames(error.__traceback__), *_frames_in(text)]
    method = _method(frames)
    if method is None and "device-side assert" in text:
        method = "a step"  # the GPU computes later, so the error is raised anywhere after the task
    if method is None:
        return None
    own = [frame for frame in frames if frame.is_the_users]
    found = _found(method, error, own)
    cure = remedy(found, _called(frames)) or "fix the task"
    message = f"task {task}: {found}: {cure}"
    if log is not None:
        message += f"; traceback in {log}"
    source = original_error(error)
    if disk_is_full(source):
        return StorageFailure(message)
    if isinstance(error, _LASTING) or getattr(source, "errno", None) == errno.EROFS:
        return WrongUse(message)
    code = ExitCode.UNEXPECTED if isinstance(error, OSError) else ExitCode.WRONG_USE
    return Failure(message, exit_code=code)


def import_mistake(error: Exception, spec: str, source: Path | str) -> WrongUse:
    """Return the failure to report for `error`, which the import of `source` raised.

    `source` is the task's file or dotted module.
    """
    own = [frame for frame in _frames(error.__traceback__) if frame.is_the_users]
    if "cannot inherit non-frozen dataclass" in text_of(error):
        return WrongUse(
            f"task {spec}: a class in its file is not frozen ({own[-1]}): write "
            "@dataclass(frozen=True) above it"
        )
    if "attempted relative import with no known parent package" in text_of(error):
        return WrongUse(
            f"task {spec}: a file has no package, so its relative imports fail ({own[-1]}): give "
            "the task as package.module:Class, in the parent folder of the package"
        )
    again = f"python {source}" if isinstance(source, Path) else f"python -m {source}"
    if isinstance(source, Path) and source.parent not in (Path(), Path.cwd()):
        again = f"PYTHONPATH=. {again}"  # a task's file imports from the current folder as well
    found = _found("its import", error, own)
    return WrongUse(
        f"task {spec}: {found}: {remedy(found) or 'fix it'} (`{again}` shows the traceback)"
    )


def _found(method: str, error: Exception, own: list[_Frame]) -> str:
    """Return what the `method` raised, with the last of the user's `own` frames and the notes."""
    # A task adds a note, such as on the form of the model's inputs.
    where = [*map(str, own[-1:]), *getattr(error, "__notes__", ())]
    where += filter(None, [_whole_batch(own)])
    source = original_error(error)
    file = source.filename if isinstance(source, FileNotFoundError) else None
    if isinstance(file, str) and not Path(file).is_absolute():
        where.append(f"relative to the current folder {Path.cwd()}")
    place = f" ({'; '.join(where)})" if where else ""
    return f"{method} raised {_in_one_line(error)}{place}"


def _frames(found: TracebackType | None) -> Iterator[_Frame]:
    for frame, line in traceback.walk_tb(found):
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        # If the first argument has an attribute of this name, this is a method and its self.
        owner = first if hasattr(type(first), code.co_name) else None
        name = _ALONE.search(linecache.getline(code.co_filename, line))
        given = (name[1], frame.f_locals.get(name[1])) if name else ("", None)
        yield _Frame(code.co_filename, line, code.co_name, owner, given)


def _whole_batch(own: list[_Frame]) -> str:
    """Return a description of the batch that a task gives to its model without unpacking, or "".

    The last of the user's `own` frames has the same value, so no layer has computed it.
    """
    for frame in own:
        name, value = frame.given
        values = list(value.values()) if isinstance(value, dict) else value
        if (
            isinstance(frame.owner, Task)
            and own[-1].given[1] is value
            and isinstance(values, tuple | list)
            and all(hasattr(part, "shape") for part in values)
        ):
            what = ", ".join(map(str, value)) if isinstance(value, dict) else len(values)
            return f"{name} is a {type(value).__name__} of {what}"
    return ""


def _called(frames: list[_Frame]) -> str:
    """Return what the last of the user's frames has called, such as `forward cross_entropy`.

    A constructor has the name of its class, such as `MSELoss.__init__`.
    """
    names: list[str] = []
    for frame in frames:
        is_constructor = frame.function == "__init__" and frame.owner is not None
        kind = f"{type(frame.owner).__name__}." if is_constructor else ""
        names = [] if frame.is_the_users else [*names, f"{kind}{frame.function}"]
    return " ".join(names)


def _frames_in(text: str) -> Iterator[_Frame]:
    """Yield the frames of the traceback in the message of an error in a worker or a replica."""
    for file, line, function in re.findall(r'File "(.+)", line (\d+), in (\S+)', text):
        yield _Frame(file, int(line), function)


def _method(frames: list[_Frame]) -> str | None:
    """Return the outermost method or part of the task among `frames`, or None."""
    methods = [f"{frame.function}()" for frame in frames if isinstance(frame.owner, Task)]
    return next(filter(None, [*methods, *map(_part_of_a_task, frames)]), None)


def _part_of_a_task(frame: _Frame) -> str | None:
    """Return the part of a task that `frame` belongs to, if it is not one of its methods."""
    # torch is not imported at the top, because the import of a task's file may fail before it.
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

    owner, name = frame.owner, f"{frame.function}()"
    if Path(frame.file).match("torch/utils/data/_utils/collate.py"):
        return "the batch of its examples"
    if isinstance(owner, Dataset):
        return (
            f"{type(getattr(owner, 'dataset', None) if frame.is_ours else owner).__name__}.{name}"
        )
    if frame.is_ours and frame.function == "drawn_figures":  # calls what figures() returned
        return "figures()"
    if isinstance(owner, Optimizer):
        return f"{type(owner).__name__}.step()"
    # The frames of a loader worker have no owner.
    if frame.is_ours and frame.function == "__getitem__":
        return "the dataset's __getitem__()"
    return (
        name if Path(frame.file).match("torch/autograd/__init__.py") or frame.is_the_users else None
    )


def original_line(error: BaseException) -> str:
    """Return the error of a loader worker or a replica, such as `ValueError: bad value`.

    torch raises it with the traceback as its message. This is the first line after the frames; it
    is empty for all other errors.
    """
    found = _AFTER_FRAMES.findall(text_of(error)) if text_of(error).startswith("Caught ") else []
    return found[-1] if found else ""


def original_error(error: BaseException) -> BaseException:
    """Return the error of the system that a loader worker raised, of which torch keeps the text.

    All other errors are returned unchanged.
    """
    found = _OF_THE_SYSTEM.fullmatch(original_line(error))
    return OSError(int(found[1]), found[2], found[3]) if found else error


def _shortened(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."


def _in_one_line(error: Exception) -> str:
    """Return the error in one line, such as `ValueError: bad value`."""
    lines = [line.strip() for line in text_of(error).splitlines()] or [""]
    # If the first line ends with a colon, the next lines have what is wrong, such as names of keys.
    if lines[0].endswith(":"):
        lines[0] = " ".join([lines[0], *map(_shortened, lines[1:])])
    first = lines[0].rstrip(". ")
    line = original_line(error) or f"{type(error).__name__}: {first}".removesuffix(": ")
    line = _COLOUR.sub("", line)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
