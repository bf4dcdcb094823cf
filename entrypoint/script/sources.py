"""The source and text files of a project that a script opens, with their digests."""

import contextlib
import hashlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entrypoint.script import opened
from entrypoint.script.folder import ScriptFolder
from entrypoint.system.revision import committed, repository, revision
from trainbox.contract.errors import StorageFailure
from trainbox.contract.files import read_bytes, replacing
from trainbox.contract.record_folder import BOARD, MANIFEST, TEXTS
from trainbox.contract.secret_rule import without_secrets
from trainbox.contract.storage import writing
from trainbox.contract.streams import message

_MOST_BYTES = 2**20  # of a file, and of all texts of a start; a larger file is data
_MOST_FILES = 1000
_SETTLED_S = 1.0


class Sources:
    """The files that the script has opened, as they were when it opened them first."""

    def __init__(
        self,
        folder: ScriptFolder,
        roots: Sequence[Path],
        manifest: dict[str, Any],
        work: Path | None = None,
    ) -> None:
        """Record the files below one of `roots` in the `manifest` of the run in `folder`.

        A file in `work`, a copy of the current folder, counts as the file there.
        """
        self._folder, self._run, self._roots = folder, folder.path, roots
        self._manifest, self._work = manifest, work
        self._here = Path.cwd() if work else None  # the script may remove it
        self._part, self._left, self._new_s = b"", _MOST_BYTES, math.inf
        self._digests: dict[str, str] = {}
        self._own = repository(roots[1])
        # The repository of each folder, what is in its commit, and those whose commit lacks a file.
        self._repositories: dict[Path, Path | None] = {}
        self._committed: dict[Path, frozenset[str]] = {}
        self._dirty = set[Path]()

    def install(self, folder: Path) -> None:
        """Let each Python that is started with `folder` in PYTHONPATH report its files."""
        found = (*self._roots, self._work or self._roots[0])
        roots = "\0".join(os.path.join(root, "") for root in found)  # noqa: PTH118
        with writing(folder, "set TMPDIR to a folder on another disk"):
            (folder / opened.COPY).write_bytes(Path(opened.__file__).read_bytes())
            (folder / opened.ROOTS).write_text(roots, encoding="utf-8", errors="surrogateescape")

    def take(self, data: bytes) -> None:
        """Take what the ranks have written to the pipe."""
        *names, self._part = (self._part + data).split(b"\0")
        for name in names:
            self.add(Path(os.fsdecode(name)))

    def look(self) -> None:
        """Write the manifest when no other new file has come for a second."""
        if time.monotonic() - self._new_s > _SETTLED_S:
            self._new_s = math.inf
            self.record()
            with contextlib.suppress(StorageFailure):  # it is reported at the end of the start
                self._folder.write_json(MANIFEST, self._manifest)

    def record(self) -> None:
        """Put the digests and the commit of each repository in the manifest."""
        known = self._manifest["sources"]
        self._manifest["sources"] = dict(sorted({**known, **self._digests}.items()))
        self._manifest["revision"] = revision(self._roots[1], self._own in self._dirty)
        others = {*self._committed} - {self._own}
        if found := {str(path): revision(path, path in self._dirty) for path in sorted(others)}:
            self._manifest["revisions"] = found

    def add(self, path: Path) -> None:
        """Add a file that the script has opened, or show it in the run's TensorBoard."""
        if opened.EVENTS in path.name:
            _link(path, self._run, self._roots)
            return
        if path.suffix == ".pyc":  # Python has the source in its cache
            is_beside = path.parent.name != "__pycache__"  # with PYTHONPYCACHEPREFIX
            folder = path.parent if is_beside else path.parent.parent
            path = folder / f"{path.name.partition('.')[0]}.py"
        if self._work and self._here and path.is_relative_to(self._work):
            path = self._here / path.relative_to(self._work)
        name = _name(path, self._roots)
        is_known = name in self._digests or len(self._digests) >= _MOST_FILES
        if is_known or path.is_relative_to(self._run):
            return
        try:
            data = read_bytes(path, _MOST_BYTES)
        except (OSError, ValueError):
            return
        self._digests[name] = hashlib.sha256(data).hexdigest()
        self._new_s = time.monotonic()
        if not self._is_committed(path.parent, data):
            self._keep(name, data)

    def _is_committed(self, folder: Path, data: bytes) -> bool:
        """Return whether the commit of the repository with `folder` has a file with this content.

        A file outside of all repositories makes no commit dirty: `sources/` has it.
        """
        if folder not in self._repositories:
            self._repositories[folder] = repository(folder)
        if (found := self._repositories[folder]) is None:
            return False
        if found not in self._committed:
            self._committed[found] = committed(found)
        blob = b"blob %d\0%b" % (len(data), data)
        hashes = (hashlib.sha1(blob, usedforsecurity=False), hashlib.sha256(blob))
        has_it = any(digest.hexdigest() in self._committed[found] for digest in hashes)
        self._dirty |= set() if has_it else {found}
        return has_it

    def _keep(self, name: str, data: bytes) -> None:
        """Write a copy of the file to the run folder, without secrets unless it is code."""
        if self._left <= 0:
            return
        if name.endswith(opened.SETTINGS):
            lines = data.decode(errors="replace").splitlines(keepends=True)
            data = "".join(map(without_secrets, lines)).encode()
        self._left -= len(data)
        copy = self._run / TEXTS / name.lstrip("/")
        try:
            if self._left < 0:
                raise OSError("more than 1 MiB")
            copy.parent.mkdir(parents=True, exist_ok=True)
            with replacing(copy) as file:
                file.write(data)
        except OSError as error:
            self._left = 0
            message(f"{self._run / TEXTS} lacks {name} and later files ({error.strerror or error})")


def roots_of(folder: Path, search_path: Sequence[str]) -> list[Path]:
    """Return the folders of the project of a script in `folder`, its repository first.

    Some clusters put a folder of installed packages in PYTHONPATH, which is left out.
    """
    own = [Path(entry).absolute() for entry in search_path if not entry.endswith("-packages")]
    folder = folder.absolute()
    return [repository(folder) or folder, folder, folder.resolve(), *own]


def changed(recorded: Mapping[str, str], roots: Sequence[Path]) -> list[str]:
    """Return the names of the recorded files that have another content now, in order."""
    found = []
    for name, digest in recorded.items():
        for root in roots:
            with contextlib.suppress(OSError, ValueError):
                now = hashlib.sha256(read_bytes(root / name, _MOST_BYTES)).hexdigest()
                found += [name] if now != digest else []
                break
    return sorted(found)


def _name(path: Path, roots: Sequence[Path]) -> str:
    root = next((root for root in roots if path.is_relative_to(root)), None)
    return str(path.relative_to(root) if root else path)


def _link(path: Path, run: Path, roots: Sequence[Path]) -> None:
    """Link a file of TensorBoard that is outside of the run folder.

    A link to its folder could lead back to the run.
    """
    if path.is_relative_to(run):
        return
    link = run / BOARD / _name(path.parent, roots).strip("/").replace("/", "-") / path.name
    with contextlib.suppress(OSError):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(path, link.parent))
