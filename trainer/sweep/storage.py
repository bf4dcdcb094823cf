"""Open the file or the database of a study, and report damage with the position."""

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from trainbox.contract.errors import StorageFailure, WrongUse
from trainbox.contract.parsing import parse_json
from trainbox.contract.record_folder import STUDY
from trainbox.contract.secret_rule import without_secrets
from trainbox.contract.storage import storage_failure as file_failure

_LOCK_GRACE_S = 10
_TRIES = 4
_STORAGE_ERRORS = (OSError, optuna.exceptions.StorageInternalError)
# The errors that Optuna raises for content that it did not write.
DAMAGE = (AssertionError, AttributeError, KeyError, TypeError, ValueError)
_LINE_START = b'{"op_code":'
_CREATE_TRIAL = 4  # Optuna's code of this operation; the codes 5 to 9 change a trial


def open_storage(url: str | None, folder: Path, read_only: bool = False) -> BaseStorage:
    """Open the database at `url`, or a journal in `folder`, which may be on a network file system.

    Raises:
        WrongUse: the database cannot be opened.
        StorageFailure: the database or the journal is damaged.
    """
    if url is not None:
        return _open_database(url)
    return _open_journal(folder.absolute() / STUDY, read_only)


def _open_journal(path: Path, read_only: bool) -> BaseStorage:
    if path.exists() and not path.is_file():
        raise StorageFailure(f"{path} is not a file: remove it, or choose another --name")
    lock = JournalFileOpenLock(str(path), grace_period=_LOCK_GRACE_S)
    backend = _Journal(path, lock)
    # A crash in the middle of a write leaves part of a line, and Optuna would append to it.
    if read_only:
        _check_journal(path, path.read_bytes())
    else:
        lock.acquire()
        try:
            os.truncate(path, _check_journal(path, path.read_bytes()))
        finally:
            lock.release()
    # Optuna now applies all lines.
    try:
        return JournalStorage(backend)
    except DAMAGE as error:
        raise damage(path, repr(error), backend.line) from error


class _Journal(JournalFileBackend):
    """An Optuna journal that reports which line it cannot read."""

    def __init__(self, path: Path, lock: JournalFileOpenLock) -> None:
        super().__init__(str(path), lock_obj=lock)
        self._path, self.line = path, 0

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        self.line = log_number_from
        try:
            for log in super().read_logs(log_number_from):
                self.line += 1
                yield log
        except ValueError as error:
            raise damage(self._path, str(error), self.line + 1) from error


def _check_journal(path: Path, content: bytes) -> int:
    """Parse each line of a journal, and return the end of the last complete line in bytes.

    Optuna does not parse the last line. It also skips a line about an unknown trial, so a lost line
    could hide the result of a trial. This is a pure function: `path` is only for the message.

    Raises:
        StorageFailure: a line is damaged.
    """
    *lines, end = content.split(b"\n")
    trials = 0
    for number, line in enumerate(lines, 1):
        try:
            log = parse_json(line)
            trials += log["op_code"] == _CREATE_TRIAL
            unknown = _CREATE_TRIAL < log["op_code"] < 10 and not 0 <= log["trial_id"] < trials
        except (KeyError, TypeError, ValueError) as error:
            raise damage(path, repr(error), number) from error
        if unknown:
            raise damage(path, f"no earlier line starts trial {log['trial_id']}", number)
    # A crash in the middle of a write leaves part of a line, or zeros.
    if not (end.startswith(_LINE_START) or _LINE_START.startswith(end) or not end.strip(b"\0")):
        raise damage(path, "not a line of a journal", len(lines) + 1)
    return sum(len(line) + 1 for line in lines)


def damage(found_in: str | Path, reason: str, line: int | None = None) -> StorageFailure:
    """Return the failure for a damaged database, or for a damaged journal and its line."""
    return StorageFailure(
        f"{found_in} is damaged{'' if line is None else f' in line {line}'} ({reason}): restore it "
        "from a backup, or start a new sweep with another --name"
    )


def _open_database(url: str) -> BaseStorage:
    """Open the database at `url`. Try again while another process creates the tables."""
    for tries_left in reversed(range(_TRIES)):
        try:
            return RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
        except Exception as error:
            reason = _reason(error)
            if type(reason) is sqlite3.DatabaseError:
                raise _failure(error, url) from error
            if tries_left and not isinstance(error, ImportError | ValueError):
                time.sleep(1)  # another process may be creating the tables
                continue
            first_line = (str(reason) or type(reason).__name__).splitlines()[0]
            remedy = "give a URL of SQLAlchemy, as in postgresql://host/study"
            if isinstance(reason, ModuleNotFoundError) and reason.name:
                remedy = f"install the package {reason.name}, which talks to this database"
            raise WrongUse(
                f"--storage {without_password(url)} cannot be opened ({first_line}): {remedy}"
            ) from error
    raise AssertionError


@contextlib.contextmanager
def storage_failures(url: str | None, folder: Path) -> Iterator[None]:
    """Raise the errors of a study's file or database as StorageFailure."""
    try:
        yield
    except _STORAGE_ERRORS as error:
        raise _failure(error, url or folder) from error


def _failure(error: Exception, location: str | Path) -> StorageFailure:
    """Return the failure for `error` of the study in a folder or at a URL."""
    reason = _reason(error)
    shown = getattr(error, "filename", None) or without_password(str(location))
    # This class itself means damage. Its subclasses mean a locked, missing or full database.
    if type(reason) is sqlite3.DatabaseError:
        return damage(shown, str(reason))
    if isinstance(reason, OSError):
        return file_failure(Path(location), reason)
    cure = "free some space, or choose another --runs-dir"
    if isinstance(location, str):
        cure = "check the database and the network, and repeat the command"
    return StorageFailure(f"{shown} cannot be written ({str(reason).splitlines()[0]}): {cure}")


def _reason(error: Exception) -> BaseException:
    """Return the error of the database driver, which Optuna and SQLAlchemy wrap."""
    cause = error.__cause__ or error
    return getattr(cause, "orig", None) or cause


def without_password(url: str) -> str:
    """Return the address of a database without its password."""
    return without_secrets(url.rpartition("@")[2])
