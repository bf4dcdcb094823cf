"""The message for a file or folder that cannot be written depends on the cause."""

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainbox.errors import WrongUse
from trainbox.folders import write_failures
from trainbox.folders.write_failures import storage_failure, writing

_END = "choose another folder with --runs-dir"


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as the user ada with uid 1001. The uid 0 has the name root, and 777 has no name."""
    names = {0: "root", 1001: "ada"}
    monkeypatch.setattr(
        write_failures.pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name=names[uid])
    )
    monkeypatch.setattr(os, "geteuid", lambda: 1001)
    monkeypatch.setattr(os, "getegid", lambda: 100)


def denied(path: Path, owner: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Path, "stat", lambda self, **_: SimpleNamespace(st_uid=owner))
    return str(storage_failure(path, PermissionError(errno.EACCES, "Permission denied", str(path))))


@pytest.mark.parametrize(("owner", "name"), [(0, "root (uid 0)"), (777, "uid 777")])
def test_a_folder_of_another_user_is_reported_with_its_owner(
    tmp_path: Path, users: None, monkeypatch: pytest.MonkeyPatch, owner: int, name: str
) -> None:
    assert denied(tmp_path, owner, monkeypatch) == (
        f"cannot write {tmp_path}: Permission denied ({tmp_path} belongs to {name}, and "
        "this process runs as "
        f"ada (uid 1001)): take the folder over with `sudo chown -R 1001:100 {tmp_path}`, or {_END}"
    )


def test_the_users_own_folder_needs_another_mode(
    tmp_path: Path, users: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"): allow writing with `chmod -R u+rwX {tmp_path}`, or" in denied(
        tmp_path, 1001, monkeypatch
    )


def test_root_without_permissions_runs_as_the_owner(
    tmp_path: Path, users: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "this process runs as root (uid 0)): run as ada (uid 1001), or" in denied(
        tmp_path, 1001, monkeypatch
    )


def test_one_command_takes_over_all_that_belongs_to_the_owner(
    tmp_path: Path, users: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `docker compose up` by another user: not one command for each file."""
    monkeypatch.chdir(tmp_path)
    file = Path("runs/r/logs/rank-0.log")
    file.parent.mkdir(parents=True)
    file.touch()
    owners = dict.fromkeys([file, *file.parents][:-1], 777)
    monkeypatch.setattr(Path, "stat", lambda path, **_: SimpleNamespace(st_uid=owners[path]))
    error = PermissionError(errno.EACCES, "Permission denied", str(file))
    assert "with `sudo chown -R 1001:100 runs`, or" in str(storage_failure(file, error))
    owners[Path("runs")] = 1001
    assert "with `sudo chown -R 1001:100 runs/r`, or" in str(storage_failure(file, error))
    # Root in a container of Compose has no more rights, but root on the host has.
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("TRAINBOX_COMMAND", "make")
    assert "with `sudo chown -R 0:100 runs/r`, or" in str(storage_failure(file, error))


# fmt: off
_NUMBERS = [
    (errno.EROFS, "Read-only file system: mount the file system for writing, or"),
    (errno.EDQUOT, "Disk quota exceeded (your disk quota is used up: see `quota -s`): delete "
     "some of your files, or"),
    (errno.EIO, "Input/output error (the disk reports an error: see `dmesg`): choose"),
    (errno.ENOTDIR, "Not a directory (a file is where a folder is needed): remove that file, or"),
    (errno.ENAMETOOLONG, "File name too long: choose a shorter name with --run, or"),
    (errno.EFBIG, "File too large: raise the limit of a file's size (`ulimit -f`), or"),
    (errno.EBUSY, "Device or resource busy: choose"),
]
# fmt: on


@pytest.mark.parametrize(("number", "expected"), _NUMBERS)
def test_each_cause_has_its_own_remedy(tmp_path: Path, number: int, expected: str) -> None:
    text = str(storage_failure(tmp_path, OSError(number, os.strerror(number), str(tmp_path / "x"))))
    assert text.startswith(f"cannot write {tmp_path}/x: {expected} ")
    assert text.endswith(_END)
    assert "free some space" not in text


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOENT, "", "runs/r/metrics.jsonl"), True),
        (OSError(errno.ENOENT, "", "runs_old/data.csv"), False),
        (OSError(errno.ENOSPC, ""), True),
        (ValueError("runs"), False),
    ],
)
def test_an_error_of_the_disk_is_known_by_its_folder(error: Exception, expected: bool) -> None:
    assert write_failures.is_of_disk(error, Path("runs")) == expected


def test_a_full_disk_is_reported_with_the_needed_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(
        write_failures.shutil, "disk_usage", lambda _: SimpleNamespace(free=7 << 20)
    )
    text = str(storage_failure(tmp_path / "x" / "y", full, needed_bytes=(8 << 20) + 1))
    assert text == (
        f"cannot write {tmp_path}/x/y: No space left on device (9 MiB needed, 7 MiB free): "
        f"free some space, or {_END}; earlier checkpoints are intact"
    )
    monkeypatch.setattr(
        write_failures.shutil, "disk_usage", lambda _: SimpleNamespace(free=48 << 20)
    )
    text = str(storage_failure(tmp_path, full, needed_bytes=2 << 20))
    assert "(2 MiB needed, 48 MiB free, but no inodes or quota left: see `df -i`" in text
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_files=100, f_favail=0))
    assert "No space left on device (no inodes left): delete some files, or" in str(
        storage_failure(tmp_path, full)
    )


def test_too_many_open_files_are_not_a_fault_of_the_folder(tmp_path: Path) -> None:
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(tmp_path / "metrics.jsonl"))
    text = r"^this process needs more than \d+ open files, .* `ulimit -n \d+` \(Docker: .*\)$"
    with pytest.raises(WrongUse, match=text), writing(tmp_path):
        raise error
    of_a_checkpoint = storage_failure(tmp_path, error, needed_bytes=2 << 20)
    assert of_a_checkpoint.exit_code == 2 and re.match(text, str(of_a_checkpoint))


def test_in_a_container_the_folder_is_chosen_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINBOX_COMMAND", "make")
    assert "choose another folder with RUNS_DIR" in str(
        storage_failure(tmp_path, OSError(errno.EROFS, "Read-only"))
    )
