"""Copies of the user's current folder, in which the trainings of a drill run."""

import os
import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from entrypoint.drill.folder import BYTECODE, Version, version_of
from trainbox.contract.errors import StorageFailure

_MOST_BYTES, _MOST_FILES = 2**30, 20_000  # of an entry; a drill makes three or more copies
_LEFT_OUT = (".git", BYTECODE)


class UserFolder:
    """The user's current folder, which a drill copies and never changes.

    Entries that are not writable are linked. Virtual environments and entries that are too large
    are left out, and `messages` names these. The files `excluded` are not copied either.
    """

    def __init__(self, path: Path, drill: Path) -> None:
        """Decide what to copy. `drill` is the folder of the drill, which may be below `path`."""
        self.path, self._drill = path, drill
        self.messages, self.excluded = list[str](), set[str]()
        self._links, self._not_copied = list[Path](), set[Path]()
        for top in path.iterdir():
            if not any(os.access(found, os.W_OK) for found in self._walk(top)):
                self._links += islice(self._walk(top), 1)  # nothing if it is left out
            elif self._is_too_large(top):
                self.messages.append(
                    f"{top.name} is left out, as it is too large to copy ({_MOST_BYTES >> 30} GiB "
                    f"or {_MOST_FILES} files): if the script needs it, make it read-only or give a "
                    "path outside of the current folder"
                )
            else:
                continue
            self._not_copied.add(top)
        self._versions = self._now()

    def copy(self, folder: Path) -> None:
        """Copy the folder to `folder`, which does not exist yet.

        Raises:
            StorageFailure: a file cannot be read or written.
        """
        try:
            folder.mkdir()
            for path in self._links:
                (folder / path.name).symlink_to(path.resolve())
            for name, version in self._now().items():
                if version is None:
                    (folder / name).mkdir()
                elif name not in self.excluded:
                    shutil.copy2(self.path / name, folder / name)
        except OSError as error:
            raise StorageFailure(
                f"the current folder cannot be copied to {folder} ({error}): set TMPDIR to a "
                "folder with more space, or start the drill where only the project is"
            ) from error

    def changed(self) -> list[str]:
        """Return the files that were changed or made since the begin of the drill."""
        changed = self._now().items() ^ self._versions.items()
        return sorted({name for name, version in changed if version})

    def replaced(self, argument: str, folder: Path) -> str:
        """Return a script's argument with the path of the folder replaced by that of its copy."""
        return re.sub(rf"{re.escape(str(self.path))}(?=/|$)", lambda _: str(folder), argument)

    def _now(self) -> dict[str, Version | None]:
        """Return the version of each file to copy, and None for folders."""
        return {
            str(path.relative_to(self.path)): None if path.is_dir() else version_of(path)
            for top in self.path.iterdir()
            if top not in self._not_copied
            for path in self._walk(top)
        }

    def _is_too_large(self, top: Path) -> bool:
        found = [*islice(self._walk(top), _MOST_FILES + 1)]
        return len(found) > _MOST_FILES or sum(path.stat().st_size for path in found) > _MOST_BYTES

    def _walk(self, top: Path) -> Iterator[Path]:
        """Yield the folders and the readable files at and below `top`, a folder before its files.

        Links are followed, because a script could write through them.
        """
        if top.name in _LEFT_OUT or top == self._drill or not os.access(top, os.R_OK):
            return
        if top.is_file():
            yield top
        elif top.is_dir() and not (top / "pyvenv.cfg").exists():
            yield top
            for path in top.iterdir():
                yield from self._walk(path)
