"""The folder of a run in an object storage, which is any file system of fsspec."""

import contextlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainbox.contract.errors import NetworkFailure, WrongUse
from trainbox.contract.mirror_url import OPTION, check_url
from trainbox.contract.secret_rule import without_secrets
from trainer.run import mirror_plan
from trainer.run.mirror_plan import MARKER, Marker

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_LONGEST_REASON = 300


class Storage:
    """The folder of one run in an object storage. `place` names it for messages."""

    def __init__(self, url: str, name: str) -> None:
        """Use the folder `name` below `url`.

        Raises:
            WrongUse: The URL is wrong, its scheme is unknown, its package is not installed, or the
                package lacks a login.
            NetworkFailure: The storage cannot be opened.
        """
        check_url(url)
        import fsspec

        # The listing must be new each time, and no other code may share the connection.
        self._fs: AbstractFileSystem
        try:
            self._fs, root = fsspec.url_to_fs(
                url, skip_instance_cache=True, use_listings_cache=False
            )
        except Exception as error:  # file systems raise errors of all kinds
            text = f"{OPTION}: {without_secrets(url)} cannot be opened ({reason(error)})"
            if isinstance(error, ValueError) or is_refused_login(error):
                raise WrongUse(
                    f"{text}: check the URL and the login of the storage's package"
                ) from error
            raise NetworkFailure(
                f"{text}: check the URL, and give the same command again"
            ) from error
        if hasattr(self._fs, "auto_mkdir"):
            self._fs.auto_mkdir = True  # a folder on a disk; object storages do not have folders
        self._root = f"{root.rstrip('/')}/{name}"
        self.place = without_secrets(f"{url.rstrip('/')}/{name}")

    def steps(self) -> dict[int, bool]:
        """Return whether each step is complete."""
        try:
            found = self._fs.find(self._root)
        except FileNotFoundError:
            return {}
        return mirror_plan.stored_steps(path.removeprefix(f"{self._root}/") for path in found)

    def marker(self, step: int) -> Marker:
        """Return the marker of `step`.

        Raises:
            ValueError: It is damaged.
            FileNotFoundError: It was removed.
        """
        text = self._fs.cat_file(self._path(step, MARKER)).decode()
        return mirror_plan.parse_marker(text, step)

    def put_file(self, path: Path, step: int, name: str, moved: Callable[[], None]) -> None:
        """Copy the file at `path`, and call `moved` after each part."""
        self._fs.put_file(str(path), self._path(step, name), callback=_callback(moved))

    def put(self, data: bytes, step: int, name: str) -> None:
        self._fs.pipe_file(self._path(step, name), data)

    def get_file(self, step: int, name: str, path: Path, moved: Callable[[], None]) -> None:
        """Copy a file to `path`, and call `moved` after each part."""
        self._fs.get_file(self._path(step, name), str(path), callback=_callback(moved))

    def refuse_unwritable(self) -> None:
        """Raise WrongUse if the bucket is missing or refuses access.

        Other failures may pass, and are logged when the first checkpoint is copied.
        """
        path = f"{self._root}/probe"
        try:
            self._fs.pipe_file(path, b"")
            self._fs.rm_file(path)
        except Exception as error:  # file systems raise errors of all kinds
            missing = isinstance(error, FileNotFoundError) or _has_status(error, 404)
            if missing or is_refused_login(error):
                raise WrongUse(
                    f"{OPTION}: {self.place} cannot be written ({reason(error)}): create the "
                    "bucket, and allow this login to read, write and remove in it"
                ) from error

    def owner(self, complete: Collection[int]) -> tuple[str | None] | None:
        """Return (run_id,) of the newest intact marker of the `complete` steps, or None.

        A run of an earlier version has the id None.
        """
        for step in sorted(complete, reverse=True):
            with contextlib.suppress(ValueError):
                return (self.marker(step).run_id,)
        return None

    def remove(self, step: int) -> None:
        """Remove the checkpoint of `step`, its marker first."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(step, MARKER))
        folder = self._path(step, "").rstrip("/")
        # fsspec's rm would take *, ? and [ in the path as a pattern of other folders.
        for path in self._fs.find(folder):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(path)
        # Only file systems with folders need this. Another process may have written into them.
        for path in (f"{folder}/checkpoints", folder):
            with contextlib.suppress(OSError, NotImplementedError):
                self._fs.rmdir(path)

    def _path(self, step: int, name: str) -> str:
        return f"{self._root}/{mirror_plan.folder_name(step)}/{name}"


def refuse_another_run(storage: Storage, complete: Collection[int], run_id: str | None) -> None:
    """Raise WrongUse if the `complete` steps in the storage are not of the run `run_id`."""
    if (owner := storage.owner(complete)) not in (None, (run_id,)):
        raise WrongUse(
            f"{storage.place} has another run, with the id {owner[0]!r} instead of {run_id!r}: "
            "choose another --run name or another --mirror"
        )


def is_refused_login(error: BaseException) -> bool:
    """Return whether the storage or its package misses or refuses a login.

    s3fs raises PermissionError, adlfs errors of Azure with a `status_code`, and gcsfs either an
    error with a `code` or an OSError whose text is all that names the cause.
    """
    return (
        isinstance(error, PermissionError)
        or "Credential" in type(error).__name__
        or _has_status(error, 401, 403)
        or str(error).startswith("Forbidden: ")
    )


def _has_status(error: BaseException, *statuses: int) -> bool:
    return any(getattr(error, name, None) in statuses for name in ("status_code", "code"))


def reason(error: BaseException) -> str:
    """Return the error in one short line without secrets."""
    text = without_secrets(" ".join(str(error).split()))[:_LONGEST_REASON]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _callback(moved: Callable[[], None]) -> Any:
    """Return a callback of fsspec that calls `moved` after each part of a file."""
    from fsspec.callbacks import Callback

    class Moved(Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            moved()

        def absolute_update(self, value: int) -> None:
            moved()

    return Moved()
