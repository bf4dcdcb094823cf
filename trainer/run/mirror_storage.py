"""The copies of a run's checkpoints in an object storage, which is any file system of fsspec.

Each checkpoint has its own folder, laid out like the run's folder. So a file is never replaced
while an older checkpoint needs it. The marker appears last, so a copy with a marker is complete:

    step-00000800/checkpoints/step-00000800.pt    and .json, its sidecar
    step-00000800/config.json ...                 the records at the time of the copy
    step-00000800/complete.json                   the marker, with the digest of each file
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainbox.contract.errors import Failure, NetworkFailure, WrongUse
from trainbox.contract.files import read_bytes
from trainbox.contract.mirror_url import OPTION, check_url
from trainbox.contract.parsing import parse_object
from trainbox.contract.record_folder import CONFIG, MANIFEST, METRICS
from trainbox.contract.secret_rule import without_secrets
from trainbox.contract.sidecar import FIRST_CHECKPOINT, checkpoint_path, damage
from trainer.run.run_folder import DIGESTS

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

MARKER = "complete.json"
_NEEDED_RECORDS = (CONFIG, MANIFEST)
# They make a resumed run whole. Some do not exist at the first checkpoint.
RECORDS = (*_NEEDED_RECORDS, METRICS, DIGESTS, FIRST_CHECKPOINT)
_LONGEST_REASON = 300


def checkpoint_names(step: int) -> tuple[str, str]:
    """Return the names of the checkpoint's tensors and of its sidecar, relative to the run."""
    folder = Path("checkpoints")
    return str(checkpoint_path(folder, step, ".pt")), str(checkpoint_path(folder, step))


class Storage:
    """The copies of the run in the folder `run`. `place` names the storage for messages."""

    def __init__(self, url: str, run: Path) -> None:
        """Use the folder below `url` with the run's name.

        Raises:
            WrongUse: The URL is wrong or in the folder of the runs, its scheme is unknown, its
                package is not installed, or the package lacks a login.
            NetworkFailure: The storage cannot be opened.
        """
        check_url(url, run.parent)
        import fsspec

        self.run, self.place = run, without_secrets(f"{url.rstrip('/')}/{run.name}")
        # The listing must be new each time, and no other code may share the connection.
        self._fs: AbstractFileSystem
        try:
            self._fs, root = fsspec.url_to_fs(
                url, skip_instance_cache=True, use_listings_cache=False
            )
        except Exception as error:  # file systems raise errors of all kinds
            raise self.failure(error) from error
        if hasattr(self._fs, "auto_mkdir"):
            self._fs.auto_mkdir = True  # a folder on a disk; object storages do not have folders
        self._root = f"{root.rstrip('/')}/{run.name}"

    def steps(self) -> dict[int, bool]:
        """Return whether each step is complete."""
        found: dict[int, bool] = {}
        for path in self._fs.find(self._root):
            folder, _, name = path.removeprefix(f"{self._root}/").partition("/")
            if match := re.fullmatch(r"step-([0-9]{8,})", folder):
                step = int(match[1])
                found[step] = found.get(step, False) or name == MARKER
        return found

    def refuse_unwritable(self) -> None:
        """Raise WrongUse if the bucket is missing or refuses access.

        Other failures may pass, and are logged when the first checkpoint is copied.
        """
        path = f"{self._root}/probe"
        try:
            self._fs.pipe_file(path, b"")
            self._fs.rm_file(path)
        except Exception as error:  # file systems raise errors of all kinds
            if isinstance(failure := self.failure(error), WrongUse):
                raise failure from error

    def refuse_another_run(self, complete: Collection[int], run_id: str | None) -> None:
        """Raise WrongUse if the newest valid marker of the `complete` steps is of another run."""
        for step in sorted(complete, reverse=True):
            with contextlib.suppress(ValueError):
                if (owner := self._marker(step).get("run_id")) != run_id:
                    raise WrongUse(
                        f"{self.place} has another run, with the id {owner!r} instead of "
                        f"{run_id!r}: choose another --run name or another {OPTION}"
                    )
                return

    def upload(self, step: int, moved: Callable[[], None]) -> None:
        """Copy the run's checkpoint of `step` and its records, and call `moved` after each part.

        Raises:
            FileNotFoundError: The run has lost a file, or the checkpoint was removed or replaced.
        """
        tensors, sidecar = checkpoint_names(step)
        records = {
            name: read_bytes(self.run / name)
            for name in (*RECORDS, sidecar)
            if name in (*_NEEDED_RECORDS, sidecar) or (self.run / name).exists()
        }
        described = parse_object(records[sidecar].decode())
        files = {tensors: {name: described.get(name) for name in ("bytes", "sha256")}}
        path = self._path(step, tensors)
        self._fs.put_file(str(self.run / tensors), path, callback=_callback(moved))
        for name, data in records.items():
            self._fs.pipe_file(self._path(step, name), data)
            moved()
            files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        # A validation may save the same step again, and the files would be of two saves.
        if read_bytes(self.run / sidecar) != records[sidecar]:
            raise FileNotFoundError(f"{sidecar} was replaced during the copy")
        marker = {"step": step, **{name: described.get(name) for name in ("run_id", "best_step")}}
        data = json.dumps({**marker, "files": files}, indent=2).encode() + b"\n"
        self._fs.pipe_file(self._path(step, MARKER), data)

    def download(
        self, step: int, names: Sequence[str], folder: Path, moved: Callable[[], None]
    ) -> None:
        """Copy the files with these `names` from the copy of `step`, if it has them, to `folder`.

        Call `moved` after each part, and compare the files with the marker.

        Raises:
            ValueError: A file or the marker is damaged.
            FileNotFoundError: A file is missing.
        """
        files = self._marker(step)["files"]
        for name in files.keys() & names:  # other names could be paths outside of the folder
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(self._path(step, name), str(path), callback=_callback(moved))
            if problem := damage(path, files[name]):
                raise ValueError(f"{name}: {problem}")

    def remove(self, step: int, moved: Callable[[], None]) -> None:
        """Remove the copy of `step`, its marker first, and call `moved` before each file."""
        folder = self._path(step, "").rstrip("/")
        # fsspec's rm would take *, ? and [ in the path as a pattern of other folders.
        for path in sorted(self._fs.find(folder), key=lambda path: not path.endswith(MARKER)):
            moved()
            with contextlib.suppress(FileNotFoundError):  # another process may have removed it
                self._fs.rm_file(path)
        # Only file systems with folders need this. Another process may have written into them.
        for path in (f"{folder}/checkpoints", folder):
            with contextlib.suppress(OSError, NotImplementedError):
                self._fs.rmdir(path)

    def failure(self, error: Exception) -> Failure:
        """Return the failure of a start that cannot use the storage because of `error`.

        s3fs raises PermissionError for a refused login, adlfs errors of Azure with a `status_code`,
        and gcsfs either an error with a `code` or an OSError whose text is all that names the
        cause.
        """
        text = f"{OPTION}: {self.place} cannot be used ({reason(error)})"
        status = getattr(error, "status_code", None) or getattr(error, "code", None)
        if (
            isinstance(error, PermissionError | FileNotFoundError | ValueError)
            or status in (401, 403, 404)
            or "Credential" in type(error).__name__
            or str(error).startswith("Forbidden: ")
        ):
            return WrongUse(
                f"{text}: check the URL and the login of the storage's package, create the bucket, "
                "and allow this login to list, read, write and remove in it"
            )
        return NetworkFailure(
            f"{text}, so it is unknown whether the run has a checkpoint there: give the same "
            f"command again, or drop {OPTION}"
        )

    def _marker(self, step: int) -> Mapping[str, Any]:
        """Return the marker of `step`, whose `files` are objects.

        Raises:
            ValueError: It is damaged.
            FileNotFoundError: It was removed.
        """
        marker = parse_object(self._fs.cat_file(self._path(step, MARKER)).decode())
        files = marker.get("files")
        if not isinstance(files, dict) or not all(isinstance(f, dict) for f in files.values()):
            raise ValueError("its marker does not list the files of a checkpoint")
        return marker

    def _path(self, step: int, name: str) -> str:
        return f"{self._root}/step-{step:08d}/{name}"


def reason(error: BaseException) -> str:
    """Return the error in one short line without secrets."""
    text = without_secrets(" ".join(str(error).split()))[:_LONGEST_REASON]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _callback(moved: Callable[[], None]) -> Any:
    """Return a callback of fsspec that calls `moved` after each part of a file."""
    from fsspec.callbacks import Callback

    return Callback(hooks={"moved": lambda _size, _value: moved()})
