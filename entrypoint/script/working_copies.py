"""Copies of the user's current folder, for trainings that must not share the files they write."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from trainbox.errors import StorageFailure
from trainbox.folders.lease import LEASE
from trainbox.folders.record_folder import CONFIG, LOGS, MANIFEST, is_sweep

WORK = "work"  # the name of a copy
BYTECODE = "__pycache__"
# The limits of an entry for a drill, and of the whole copy for a trial of a sweep.
_MOST_BYTES, _MOST_FILES = 2**30, 20_000
_LEFT_OUT = (".git", BYTECODE)
_EVENTS = ".tfevents."  # in the names of TensorBoard's files


@dataclass(frozen=True)
class Version:
    """A version of a file; each write changes it."""

    inode: int
    size: int
    time_ns: int


def version_of(path: Path) -> Version | None:
    """Return the version of a file, or None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return Version(found.st_ino, found.st_size, found.st_mtime_ns)


class UserFolder:
    """The user's current folder, which is copied and never changed.

    Entries that are not writable, and runs of Trainbox, are linked. Virtual environments, git's
    folder and TensorBoard's files are left out. Entries that are too large are named in `messages`:
    they are left out, or linked. The files `excluded` are not copied either.
    """

    def __init__(self, path: Path, drill: Path | None = None) -> None:
        """Decide what to copy.

        A `drill` has its own folder, which may be below `path`, and leaves out what is too
        large. A trial of a sweep links this.
        """
        self.path, self._drill = path, drill
        self.messages, self.excluded = list[str](), set[str]()
        self._links, self._not_copied = list[Path](), set[Path]()
        files, size = _MOST_FILES, _MOST_BYTES  # what may still be copied
        for top in sorted(path.iterdir(), key=_breadth):
            if not any(os.access(found, os.W_OK) for found in self._walk(top)):
                self._links += islice(self._walk(top), 1)  # nothing if it is left out
            elif drill is None and top.name.startswith(".") and top.is_dir():
                self._links.append(top)  # such as .cache in a home
            else:
                walked = [*islice(self._walk(top), files + 1)]
                versions = map(version_of, walked)
                top_size = sum(version.size for version in versions if version)
                if len(walked) <= files and top_size <= size:
                    if drill is None:
                        files, size = files - len(walked), size - top_size
                    continue
                self.messages.append(self._too_large(top.name))
                self._links += [] if drill else [top]
            self._not_copied.add(top)
        self._versions = self._now()

    def copy(self, folder: Path) -> None:
        """Copy the folder to `folder`. A file there that is newer is kept: a script has written it.

        Raises:
            StorageFailure: a file cannot be read or written.
        """
        try:
            folder.mkdir(exist_ok=True)
            for path in self._links:
                _link(path, folder / path.name)
            for path in self._entries():
                name = str(path.relative_to(self.path))
                if is_run(path):
                    _link(path, folder / name)
                elif path.is_dir():
                    (folder / name).mkdir(exist_ok=True)
                elif name not in self.excluded:
                    _copy(path, folder / name)
        except OSError as error:
            cure = "set TMPDIR to a folder with more space" if self._drill else "make space"
            raise StorageFailure(
                f"the current folder cannot be copied to {folder} ({error}): {cure}, or start "
                "where only the project is"
            ) from error

    def remove_unchanged(self, folder: Path) -> None:
        """Remove from the copy `folder` what the script has not changed. What it wrote remains."""
        for name, folders, files in os.walk(folder, topdown=False):
            for path in (Path(name, entry) for entry in (*files, *folders)):
                users = self.path / path.relative_to(folder)
                # A folder in which the script has written something stays, and what is missing.
                with contextlib.suppress(OSError):
                    if path.is_dir() and not path.is_symlink():
                        users.stat()
                        path.rmdir()
                    elif path.samefile(users) or _content(path) == _content(users):
                        path.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()

    def changed(self) -> list[str]:
        """Return the files that were changed or made since the begin of the drill."""
        changed = self._now().items() ^ self._versions.items()
        return sorted({name for name, version in changed if version})

    def replaced(self, argument: str, folder: Path) -> str:
        """Return a script's argument with the folder's path replaced by the path of its copy."""
        return re.sub(rf"{re.escape(str(self.path))}(?=/|$)", lambda _: str(folder), argument)

    def _entries(self) -> Iterator[Path]:
        for top in self.path.iterdir():
            if top not in self._not_copied:
                yield from self._walk(top)

    def _now(self) -> dict[str, Version | None]:
        """Return the version of each file to copy, and None for folders."""
        return {
            str(path.relative_to(self.path)): None if path.is_dir() else version_of(path)
            for path in self._entries()
        }

    def _too_large(self, name: str) -> str:
        limits = f"({_MOST_BYTES >> 30} GiB or {_MOST_FILES} files)"
        if self._drill:
            return (
                f"{name} is left out, as it is too large to copy {limits}: if the script needs it, "
                "make it read-only or give a path outside of the current folder"
            )
        return (
            f"{name} is too large to copy for each trial {limits}, so all trials share it: let the "
            "script only read it"
        )

    def _walk(self, top: Path) -> Iterator[Path]:
        """Yield the folders and the readable files at and below `top`, a folder before its files.

        Links are followed, because a script could write through them. A run is yielded without its
        files, which other processes of Trainbox may write at any time.
        """
        if top.name in _LEFT_OUT or top == self._drill or not os.access(top, os.R_OK):
            return
        if top.is_file():
            if _EVENTS not in top.name:  # a reader would show old curves as curves of the copy
                yield top
        elif top.is_dir() and not (top / "pyvenv.cfg").exists():
            yield top
            if not is_run(top):
                with contextlib.suppress(FileNotFoundError):  # another process may remove it
                    for path in top.iterdir():
                        yield from self._walk(path)


def is_run(path: Path) -> bool:
    """Return whether the folder is a run of Trainbox, or a sweep."""
    if is_sweep(path):
        return True
    has_records = (path / CONFIG).is_file() and (path / MANIFEST).is_file()
    return (path / LOGS).is_dir() and (has_records or (path / LEASE).is_file())


def _link(path: Path, copy: Path) -> None:
    if not os.path.lexists(copy):
        copy.symlink_to(path.resolve())


def _copy(path: Path, copy: Path) -> None:
    copied, users = version_of(copy), version_of(path)
    if users and (copied is None or copied.time_ns < users.time_ns):
        copy.unlink(missing_ok=True)  # it may be read-only
        try:
            shutil.copy2(path, copy)
        except FileNotFoundError:
            if path.exists():  # or else another process has removed it
                raise


def _content(path: Path) -> tuple[int, int]:
    """Return the size and the time of the last write, which a copy has as well."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _breadth(path: Path) -> int:
    """Return the number of entries of a folder, and 0 for a file."""
    try:
        return len(os.listdir(path)) if path.is_dir() else 0  # noqa: PTH208 - of any size
    except OSError:
        return 0
