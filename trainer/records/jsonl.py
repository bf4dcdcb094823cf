"""Read metrics.jsonl and digests.jsonl of a run: a line is a JSON object with a step and a kind."""

import errno
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainbox.errors import StorageFailure, WrongUse
from trainbox.files.entries import step_of
from trainbox.files.parsing import parse_object
from trainbox.files.regular_files import read_bytes
from trainbox.folders.lease import is_leased

_Problem = Callable[[dict[str, Any], dict[str, Any] | None], str | None]

# Keys that each entry of metrics.jsonl already has. A resume and `verify` read them.
KEYS_OF_ENTRIES = ("kind", "step", "epoch", "time_unix_s")
DIGESTS = ("model", "optimizer", "order")
_NOT_VALUES = {"kind", "step", "time_unix_s"}
_KINDS = ("start", "step", "checkpoint", "resume")


def entry_problem(entry: Mapping[str, Any], _before: object = None) -> str | None:
    """Return what is wrong with an entry, or None."""
    step = step_of(entry)
    if step is None or step < 0:
        return f"step {entry.get('step')!r} is not a whole number from 0"
    return None if isinstance(entry.get("kind"), str) else "it has no kind"


def digest_problem(entry: dict[str, Any], before: dict[str, Any] | None) -> str | None:
    """Return what is wrong with an entry of digests.jsonl after the entry `before`, or None."""
    if problem := entry_problem(entry):
        return problem
    wrong = [name for name in DIGESTS if not _is_digest(entry.get(name), 64)]
    for name in ("tensors", "saved") if entry["kind"] == "checkpoint" else ("tensors",):
        if isinstance(parts := entry.get(name), dict):
            wrong += [f"{name}.{part}" for part, x in parts.items() if not _is_digest(x, 16)]
        else:
            wrong += [name]
    if entry["kind"] not in _KINDS:
        wrong += ["kind"]
    if wrong:
        return f"{wrong[0]} is missing or malformed"
    # A resume records the digests of its step, which may already be recorded. A checkpoint may be
    # written after later steps.
    if entry["kind"] == "checkpoint" or before is None:
        return None
    if entry["step"] < before["step"] + (entry["kind"] != "resume"):
        return f"step {entry['step']} comes after step {before['step']}"
    return None


def read_entries(path: Path, problem_of: _Problem = entry_problem) -> list[dict[str, Any]]:
    """Return the valid entries of a file, or none if it is missing.

    Damaged lines are skipped, such as the incomplete last line after a crash.

    Raises:
        StorageFailure: The file cannot be read.
    """
    try:
        return [entry for entry, problem in _lines(path, problem_of) if not problem]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageFailure(
            f"{path} cannot be read ({error.strerror}): restore it, or move it away"
        ) from error


def read_all_entries(path: Path, problem_of: _Problem = entry_problem) -> list[dict[str, Any]]:
    """Return the entries of a file in which each line is valid.

    Raises:
        WrongUse: The file cannot be read, or a line is damaged.
    """
    try:
        lines = list(_lines(path, problem_of))
    except OSError as error:
        raise WrongUse(
            f"{path} cannot be read ({error.strerror}): name the folder of a run"
        ) from error
    if damage := _damage(path, lines):
        raise WrongUse(
            f"{damage}: restore the file, or, if the run was killed, repair the file by resuming "
            "the run with the same command"
        )
    return [entry for entry, _ in lines]


def damaged_line(path: Path) -> str | None:
    """Return which line of metrics.jsonl of a run is damaged, or None.

    A process that trains may be writing the last line.
    """
    try:
        return None if is_leased(path.parent) else _damage(path, _lines(path, entry_problem))
    except OSError:
        return None  # each reader of the entries reports this


def _damage(path: Path, lines: Iterable[tuple[object, str | None]]) -> str | None:
    for number, (_, problem) in enumerate(lines, 1):
        if problem:
            return f"line {number} of {path} is damaged ({problem})"
    return None


def _lines(path: Path, problem_of: _Problem) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yield the entry of each line, and what is wrong with it.

    `problem_of(entry, valid entry before)` returns what is wrong, or None.
    """
    try:
        *lines, rest = read_bytes(path).split(b"\n")
    except ValueError as error:
        raise OSError(errno.EFBIG, str(error)) from error
    before = None
    for line in lines:
        try:
            entry = parse_object(line.decode())
            problem = problem_of(entry, before)
        except ValueError as error:
            entry, problem = {}, str(error)
        before = before if problem else entry
        yield entry, problem
    if rest:
        yield {}, "incomplete"


def _is_digest(value: object, digits: int) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is not None


def numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an entry as `kind/name`.

    The numbers of a list `name_each` are named `kind/name/0` and so on.
    """
    flat: dict[str, Any] = {}
    for name, value in entry.items():
        if name.endswith("_each") and isinstance(value, list):
            flat |= {f"{name.removesuffix('_each')}/{i}": each for i, each in enumerate(value)}
        elif name not in _NOT_VALUES:
            flat[name] = value
    kind = entry.get("kind", "train")
    return {
        f"{kind}/{tag}": number for tag, number in flat.items() if isinstance(number, int | float)
    }
