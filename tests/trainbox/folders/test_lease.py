"""The lease of a run folder: one process has it, and the lease of an ended one is taken over."""

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.kinds import slow_after
from trainbox.errors import StorageFailure, WrongUse
from trainbox.folders import lease
from trainbox.folders.lease import LEASE, Lease, is_leased
from trainbox.folders.record_folder import METRICS, RecordFolder

_FORKS = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew often, and take a silent lease over after half a second."""
    monkeypatch.setattr(lease, "RENEW_S", 0.05)
    monkeypatch.setattr(lease, "_LOOK_S", 0.01)
    monkeypatch.setattr(lease, "_SILENCE_S", 0.5)


@pytest.fixture(autouse=True)
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system has no locks, such as NFS with `nolock`, or Lustre without `flock`."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)


def _in_child(work: Callable[[], None]) -> Any:
    child = _FORKS.Process(target=work)
    child.start()
    return child


def _leave(folder: Path, **changes: Any) -> None:
    """Leave a lease in the folder, as a process that was killed does, with these fields changed."""

    def take_and_end() -> None:
        Lease(folder)
        os.kill(os.getpid(), signal.SIGKILL)

    _in_child(take_and_end).join()
    path = folder / LEASE
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | changes))


_ELSEWHERE = {"host": "other", "pid": 1, "process": "abc other-boot/1 1 5"}


def test_only_one_process_uses_a_folder_without_locks(tmp_path: Path) -> None:
    folder = RecordFolder(tmp_path, True, ())
    folder.append(METRICS, {"step": 1})
    with pytest.raises(WrongUse, match=rf"another process uses .* \(pid {os.getpid()} on "):
        RecordFolder(tmp_path, True, ())
    assert is_leased(tmp_path)
    folder.close()
    assert not is_leased(tmp_path)
    RecordFolder(tmp_path, True, ()).close()


def test_a_killed_process_of_this_machine_is_replaced_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_SILENCE_S", 600)
    monkeypatch.setattr(lease, "RENEW_S", 600)
    _leave(tmp_path)
    assert not is_leased(tmp_path)
    Lease(tmp_path)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("which has ended: this process takes over")


def test_a_pid_of_another_process_does_not_keep_a_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container starts again, and this process has the pid of the killed one."""
    monkeypatch.setattr(lease, "_SILENCE_S", 600)
    monkeypatch.setattr(lease, "RENEW_S", 600)
    space = lease.own_name().split()[1]
    _leave(tmp_path, process=f"abc {space} {os.getpid()} 5")
    Lease(tmp_path)


@pytest.mark.parametrize("host", ["other", os.uname().nodename])
def test_a_silent_process_of_another_host_is_replaced_and_a_renewing_one_is_not(
    tmp_path: Path, host: str
) -> None:
    """Two containers may have the same host name and pid 1."""
    _leave(tmp_path, **_ELSEWHERE | {"host": host})
    path = tmp_path / LEASE
    assert is_leased(tmp_path)

    def renew() -> None:
        while True:
            os.utime(path)
            time.sleep(0.05)

    child = _in_child(renew)
    begin_s = time.monotonic()
    with pytest.raises(WrongUse, match=f"another process uses .*pid 1 on {host}"):
        Lease(tmp_path)
    assert time.monotonic() - begin_s < 0.4
    child.kill()
    child.join()
    Lease(tmp_path)
    assert json.loads(path.read_text())["pid"] == os.getpid()
    assert [file.name for file in tmp_path.iterdir()] == [LEASE]


def test_a_renewal_in_the_future_ages_as_well(tmp_path: Path) -> None:
    """The clock was a year ahead when the other process was killed."""
    _leave(tmp_path, **_ELSEWHERE)
    os.utime(tmp_path / LEASE, (time.time() + 3e7,) * 2)
    assert not is_leased(tmp_path)
    begin_s = time.monotonic()
    Lease(tmp_path)
    assert time.monotonic() - begin_s < 30


@pytest.mark.parametrize("hours", [-10, 10])
def test_a_clock_that_is_wrong_does_not_end_a_lease(tmp_path: Path, hours: float) -> None:
    """The clock of the file server has jumped since the last renewal."""
    _leave(tmp_path, **_ELSEWHERE)
    path = tmp_path / LEASE
    then = time.time() + hours * 3600

    def renew() -> None:
        for tick in range(1000):
            os.utime(path, (then + tick, then + tick))
            time.sleep(0.05)

    child = _in_child(renew)
    with pytest.raises(WrongUse, match="another process uses"):
        Lease(tmp_path)
    child.kill()
    child.join()


@pytest.mark.parametrize("text", ["", "{", "null", "\0"])
def test_a_damaged_lease_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / LEASE).write_text(text)
    Lease(tmp_path)


def test_the_lease_in_a_copy_of_a_run_does_not_keep_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_SILENCE_S", 600)
    (tmp_path / "r").mkdir()
    held = Lease(tmp_path / "r")
    shutil.copytree(tmp_path / "r", tmp_path / "copy")
    Lease(tmp_path / "copy")
    held.release()


def _takers(folder: Path, count: int) -> list[bool]:
    """Let processes take the lease at the same time, and return which have succeeded."""
    barrier, results = _FORKS.Barrier(count), _FORKS.Queue()

    def take() -> None:
        barrier.wait()
        try:
            Lease(folder)
            results.put(True)
        except WrongUse:
            results.put(False)
        barrier.wait()  # the winner is alive until all have tried

    children = [_in_child(take) for _ in range(count)]
    found = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    return found


@pytest.mark.parametrize("is_stale", slow_after(1, [True, False]))
def test_one_of_several_processes_takes_a_lease(tmp_path: Path, is_stale: bool) -> None:
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        if is_stale:
            _leave(folder)
        assert sorted(_takers(folder, 4)) == [False, False, False, True]
        assert [file.name for file in folder.iterdir()] == [LEASE]


def test_a_takeover_that_was_killed_is_finished_by_the_next_process(tmp_path: Path) -> None:
    _leave(tmp_path)
    key = lease._read(tmp_path / LEASE).key  # type: ignore[union-attr]
    (tmp_path / "other").mkdir()
    _leave(tmp_path / "other")
    (tmp_path / "other" / LEASE).rename(tmp_path / f"{LEASE}.{key}")
    (tmp_path / "other").rmdir()
    Lease(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [LEASE]


def test_a_suspended_process_that_has_lost_its_folder_writes_nothing_more(tmp_path: Path) -> None:
    folder = RecordFolder(tmp_path, True, ())
    (tmp_path / LEASE).write_text(json.dumps(_ELSEWHERE))  # another host has taken over
    time.sleep(0.06)
    with pytest.raises(WrongUse, match=r"has taken .* over: this one was suspended .* removed"):
        folder.append(METRICS, {"step": 1})
    folder.close()
    assert [file.name for file in tmp_path.iterdir()] == [LEASE]


def test_a_removed_lease_is_made_again(tmp_path: Path) -> None:
    folder = RecordFolder(tmp_path, True, ())
    (tmp_path / LEASE).unlink()
    time.sleep(0.06)
    folder.renew()
    assert is_leased(tmp_path)
    folder.close()


def test_a_full_disk_leaves_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageFailure, match="No space left"):
        RecordFolder(tmp_path, True, ())
    assert not [*tmp_path.iterdir()]
