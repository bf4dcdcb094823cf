"""Copies of the user's current folder, in which the trainings of a drill run."""

import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from entrypoint.drill.folder import BYTECODE, Version, version_of

_MOST_BYTES, _MOST_FILES = 2**30, 20_000  # of a copy; a drill makes three or more of them
_LEFT_OUT = (".git", BYTECODE)


class UserFolder:
    """The user's current folder, which a drill copies and never changes.

    Folders that are not writable are linked. Virtual environments and what is too large to copy
    are left out. `messages` names what is too large.
    """

    def __init__(self, path: Path, drill: Path) -> None:
        """Decide what to copy. `drill` is the folder of the drill, which may be below `path`."""
        self.path, self._drill = path, drill
        self.messages: list[str] = []
        self._links, self._excluded = set[str](), set[str]()
        bytes_left, files_left = _MOST_BYTES, _MOST_FILES
        for size, files, name in sorted((*self._size(path), path.name) for path in path.iterdir()):
            if not files:  # `_walk` leaves it out
                continue
            if not any(os.access(found, os.W_OK) for found in self._walk(path / name)):
                self._links.add(name)
            elif size > bytes_left or files > files_left:
                self._excluded.add(name)
                self.messages.append(
                    f"{name} is left out, as it is too large to copy ({_MOST_BYTES >> 30} GiB or "
                    f"{_MOST_FILES} files): if the script needs it, make it read-only or give a "
                    "path outside of the current folder"
                )
            else:
                bytes_left, files_left = bytes_left - size, files_left - files
        self._versions = self._now()

    def copy(self, folder: Path, excluded: Collection[str]) -> None:
        """Copy the folder without the files `excluded`."""
        folder.mkdir()
        for name in self._links:
            (folder / name).symlink_to((self.path / name).resolve())
        for path in self._copied():
            name = str(path.relative_to(self.path))
            if path.is_dir():
                (folder / name).mkdir()
            elif name not in excluded:
                shutil.copy2(path, folder / name)

    def changed(self) -> list[str]:
        """Return the files that were changed or made since the begin of the drill."""
        now = self._now()
        return sorted(
            name
            for name in now.keys() | self._versions.keys()
            if now.get(name) != self._versions.get(name)
        )

    def replaced(self, argument: str, folder: Path) -> str:
        """Return a script's argument with the path of the folder replaced by that of its copy."""
        return re.sub(rf"{re.escape(str(self.path))}(?=/|$)", lambda _: str(folder), argument)

    def _now(self) -> dict[str, Version]:
        found = ((path, version_of(path)) for path in self._copied() if not path.is_dir())
        return {str(path.relative_to(self.path)): version for path, version in found if version}

    def _copied(self) -> Iterator[Path]:
        for path in self.path.iterdir():
            if path.name not in self._links | self._excluded:
                yield from self._walk(path)

    def _size(self, path: Path) -> tuple[int, int]:
        """Return the bytes and the number of files of an entry, or more than the limits."""
        size = files = 0
        for found in self._walk(path):
            size, files = size + found.stat().st_size, files + 1
            if size > _MOST_BYTES or files > _MOST_FILES:
                break
        return size, files

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
