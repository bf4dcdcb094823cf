"""The lease of a run folder: the one process that writes there.

The lease is a file that only one process can create, on every file system. Its process renews it:
it sets the file's time every few seconds. The locks of a file system are not used, because NFS and
Lustre may be mounted without them.

The lease of a process that has ended is taken over. Another process of the same machine is seen in
/proc. Otherwise, the time of the file must not change for two minutes. Clocks of two machines are
never compared: all times of files are the file server's.
"""

import contextlib
import hashlib
import json
import os
import socket
import time
from pathlib import Path
from typing import NamedTuple

from trainbox.errors import WrongUse
from trainbox.files.parsing import parse_object
from trainbox.files.regular_files import create_regular, open_regular, open_to_change
from trainbox.processes.identity import is_alive, own_name
from trainbox.processes.streams import message

LEASE = "lock"
RENEW_S = 5.0
_SILENCE_S = 120.0  # longer than a pause of the file server, or a library that keeps Python's lock
_LOOK_S = 0.2
_MOST_BYTES = 4096


class _Found(NamedTuple):
    """The content of a lease, the time of its last renewal, and the numbers of its file and folder.

    Two numbers, because a file system gives the number of a removed file to another one.
    """

    data: bytes
    renewed_ns: int
    inodes: list[int]

    @property
    def key(self) -> str:
        return hashlib.sha256(self.data).hexdigest()[:16]

    @property
    def owner(self) -> str:
        """Who has the lease, for a message."""
        fields = self._described()
        return f"pid {fields.get('pid', '?')} on {fields.get('host', 'an unknown host')}"

    @property
    def is_a_copy(self) -> bool:
        """Whether this is the lease of another folder, as in a copy of a run."""
        return self._described().get("inodes", self.inodes) != self.inodes

    @property
    def names_a_process(self) -> bool:
        """Whether the lease is whole: a killed process may leave an empty one."""
        return bool(self._described())

    def is_alive(self) -> bool | None:
        """Return whether the process of the lease runs, or None if it cannot be seen from here."""
        return is_alive(str(self._described().get("process", "")))

    def _described(self) -> dict[str, object]:
        with contextlib.suppress(ValueError):
            return parse_object(self.data.decode())
        return {}


class Lease:
    """The lease of a folder, from its creation until `release`.

    Attributes:
        lost: whether another process has taken the lease over. This one was suspended, or the file
            was removed or replaced.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lease, which may have to wait for two minutes.

        Raises:
            WrongUse: another process uses the folder.
            OSError: the lease cannot be read or written.
        """
        self._folder, self.lost, self._renew_at_s = folder, False, 0.0
        lease = path = folder / LEASE
        replaced: _Found | None = None
        # A process that takes over first creates a file, whose name depends on the content of the
        # old lease: of several processes, one can create it.
        while True:
            if not self._create(path):
                if found := _read(path):
                    _wait_for_end(folder, path, found)
                    replaced = found if path == lease else replaced
                path = folder / f"{LEASE}.{found.key}" if found else lease
            elif path == lease:
                return
            elif (now := _read(lease)) and replaced and now.data == replaced.data:
                path.replace(lease)
                for left in folder.glob(f"{LEASE}.*"):  # of a process that was killed here
                    left.unlink(missing_ok=True)
                return
            else:
                path.unlink(missing_ok=True)  # another process has taken over meanwhile
                path = lease

    def renew(self) -> None:
        """Renew the lease, if the last renewal was some seconds ago.

        After a failure of the file system, the next call tries it again.
        """
        if time.monotonic() < self._renew_at_s:
            return
        self._renew_at_s = time.monotonic() + RENEW_S
        path = self._folder / LEASE
        with contextlib.suppress(OSError):
            found = _read(path)
            if found is None:
                self._create(path)  # somebody has removed it
            elif found.data != self._data:
                self.lost = True
            else:
                os.utime(path)

    def release(self) -> None:
        """Remove the lease, so that another process can take it."""
        with contextlib.suppress(OSError):
            found = _read(self._folder / LEASE)
            if found is not None and found.data == self._data:
                (self._folder / LEASE).unlink()

    def _create(self, path: Path) -> bool:
        """Create the lease at `path`, and return whether it did not exist."""
        try:
            descriptor = create_regular(path)
        except FileExistsError:
            return False
        fields = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": own_name(),
            "inodes": _inodes(path, descriptor),
            "time_unix_s": round(time.time(), 3),
        }
        self._data = json.dumps(fields).encode() + b"\n"
        try:
            os.write(descriptor, self._data)
        except OSError:  # a full disk
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        return True


class Holder(NamedTuple):
    """The process that has the lease of a folder: whether it may be alive, and its last renewal."""

    alive: bool
    renewed_unix_s: float


def holder_of(folder: Path) -> Holder | None:
    """Return the process that has the lease of the folder, or None if there is none.

    This changes nothing, so it compares with the clock of this machine.

    Raises:
        OSError: the lease cannot be read.
    """
    try:
        with open_regular(folder / LEASE) as file:
            found = _found(folder / LEASE, file.fileno())
    except FileNotFoundError:
        return None
    if not found.names_a_process or found.is_a_copy:
        return None
    alive, renewed_unix_s = found.is_alive(), found.renewed_ns / 1e9
    if alive is None:  # a time in the future is of another clock
        alive = abs(time.time() - renewed_unix_s) < _SILENCE_S
    return Holder(alive, renewed_unix_s)


def is_leased(folder: Path) -> bool:
    """Return whether a process that may be alive has the lease of the folder."""
    with contextlib.suppress(OSError):
        return (holder := holder_of(folder)) is not None and holder.alive
    return False


def _wait_for_end(folder: Path, path: Path, found: _Found) -> None:
    """Return if the process of the lease `found` has ended.

    Raises:
        WrongUse: it is alive.
    """
    alive = found.is_alive()
    in_use = WrongUse(
        f"another process uses {folder} ({found.owner}): wait until it ends, or choose another "
        "folder with --run NAME"
    )
    if alive and not found.is_a_copy:
        raise in_use
    if alive is not False:
        # The age alone does not suffice: somebody may have set the clock of the file server.
        silence_s = 3 * RENEW_S
        if alive is None:
            silence_s = max(silence_s, _SILENCE_S - _age_s(folder, found))
        message(
            f"{folder} was used by {found.owner}, which cannot be seen from here: it counts as "
            f"ended if it does not renew {path.name} within {silence_s:.0f} s"
        )
        end_s = time.monotonic() + silence_s
        while time.monotonic() < end_s:
            time.sleep(_LOOK_S)
            now = _read(path)
            if now is None:
                return
            if now != found:
                raise in_use
    message(f"{folder} was used by {found.owner}, which has ended: this process takes over")


def _age_s(folder: Path, found: _Found) -> float:
    """Return the time since the last renewal on the clock of the file server.

    A renewal in the future is as old as it is far away: the clock was set back.
    """
    os.utime(folder)
    return abs(folder.stat().st_mtime - found.renewed_ns / 1e9)


def _read(path: Path) -> _Found | None:
    """Return the lease at `path`, or None if there is none.

    Over NFS, only an open file has the newest content and time.

    Raises:
        OSError: it is not a regular file, or cannot be read.
    """
    try:
        descriptor = open_to_change(path)
    except FileNotFoundError:
        return None
    try:
        return _found(path, descriptor)
    finally:
        os.close(descriptor)


def _found(path: Path, descriptor: int) -> _Found:
    renewed_ns = os.fstat(descriptor).st_mtime_ns
    return _Found(os.read(descriptor, _MOST_BYTES), renewed_ns, _inodes(path, descriptor))


def _inodes(path: Path, descriptor: int) -> list[int]:
    return [os.fstat(descriptor).st_ino, path.parent.stat().st_ino]
