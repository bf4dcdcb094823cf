"""What a script is started from: a commit, the changes since, and the texts that it lacks."""

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from entrypoint.script.target import Target
from entrypoint.script.working_copies import is_run
from entrypoint.system.revision import repository, revision
from trainbox.disclosure.secret_rule import without_secrets
from trainbox.files.build_info import git
from trainbox.files.regular_files import open_regular, read_bytes, replacing
from trainbox.folders.record_folder import DIFF, TEXTS
from trainbox.processes.streams import message

_MOST_BYTES = 2**20  # of all texts together; a larger file is data
_SETTINGS = (".yaml", ".yml", ".toml", ".json", ".jsonnet", ".cfg", ".ini", ".conf", ".gin")
_CODE = (".py", ".pyx", ".sh", ".c", ".cc", ".cpp", ".h", ".hpp", ".cu", ".cuh", ".jinja")


@dataclass(frozen=True)
class Sources:
    """The sources of one start.

    Attributes:
        revision: the commit of the script's repository, or None.
        digests: the SHA-256 of the script, of `git diff HEAD`, and of each untracked text.
        texts: what the commit lacks, without secrets in settings.
    """

    revision: str | None
    digests: Mapping[str, str]
    texts: Mapping[str, bytes]

    def changed(self, manifest: Mapping[str, Any]) -> list[str]:
        """Return the names of what differs from the last start, which `manifest` has."""
        if not (before := manifest["sources"]):
            return []
        differing = {**before, **self.digests}.items() - (before.items() & self.digests.items())
        names = {name for name, _ in differing}
        return sorted(names | ({"revision"} if manifest["revision"] != self.revision else set()))

    def write(self, run: Path) -> None:
        """Write the texts to the run folder, the short ones first, up to 1 MiB in all.

        A failure is only printed.
        """
        left = _MOST_BYTES
        for name, text in sorted(self.texts.items(), key=lambda item: len(item[1])):
            copy = run / TEXTS / name.lstrip("/")
            try:
                if (left := left - len(text)) < 0:
                    raise OSError("more than 1 MiB")
                copy.parent.mkdir(parents=True, exist_ok=True)
                with replacing(copy) as file:
                    file.write(text)
            except OSError as error:
                lost = error.strerror or error
                message(f"{run / TEXTS} lacks {name} and longer files ({lost})")
                return


def sources_of(target: Target) -> Sources:
    """Return the sources of a start of `target`. Without git, they are the script alone."""
    folder = target.folder
    root = repository(folder)
    diff = git(root, "diff", "--no-ext-diff", "--no-color", "HEAD") if root else None
    digests, texts = dict[str, str](), dict[str, bytes]()

    def add(name: str, text: bytes) -> None:
        digests[name] = hashlib.sha256(text).hexdigest()
        texts[name] = _without_secrets(text) if name.endswith(_SETTINGS) else text

    if root and diff:
        text = f"{diff}\n".encode(errors="surrogateescape")
        digests[DIFF], texts[DIFF] = hashlib.sha256(text).hexdigest(), _diff_without_secrets(text)
    for path, name in _untracked(root) if root else ():
        with contextlib.suppress(OSError, ValueError):
            add(name, read_bytes(path, _MOST_BYTES))
    if script := _script(target):
        name = str(script.relative_to(root or folder))
        with contextlib.suppress(OSError, ValueError):
            with open_regular(script) as file:
                digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
            if (
                diff is None
                or git(script.parent, "ls-files", "--error-unmatch", script.name) is None
            ):
                add(name, read_bytes(script, _MOST_BYTES))
    return Sources(revision(folder), digests, texts)


def _script(target: Target) -> Path | None:
    """Return the file of the script, or None for a module that is not in the current folder."""
    if not target.is_module:
        return Path(target.name).absolute()
    module = Path.cwd().joinpath(*target.name.split("."))
    files = (module.with_suffix(".py"), module / "__main__.py")
    return next((path for path in files if path.is_file()), None)


def _untracked(root: Path) -> list[tuple[Path, str]]:
    """Return the code and the settings in the repository that git neither tracks nor ignores.

    Each has its path and its name in the repository.
    """

    @cache
    def is_foreign(folder: Path) -> bool:
        is_environment = (folder / "pyvenv.cfg").exists()
        return folder != root and (is_environment or is_run(folder) or is_foreign(folder.parent))

    names = (git(root, "ls-files", "--others", "--exclude-standard", "-z") or "").split("\0")
    found = [(root / name, name) for name in names if name.endswith((*_SETTINGS, *_CODE))]
    return [(path, name) for path, name in found if not is_foreign(path.parent)]


def _diff_without_secrets(diff: bytes) -> bytes:
    lines, is_of_settings = list[bytes](), False
    for line in diff.splitlines(keepends=True):
        if line.startswith(b"diff --git "):
            is_of_settings = line.decode(errors="replace").rstrip('"\n').endswith(_SETTINGS)
        lines.append(_without_secrets(line) if is_of_settings else line)
    return b"".join(lines)


def _without_secrets(text: bytes) -> bytes:
    lines = text.decode(errors="replace").splitlines(keepends=True)
    return "".join(map(without_secrets, lines)).encode()
