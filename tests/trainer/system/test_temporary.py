"""Temporary folders of killed processes are removed, and no others."""

import contextlib
import multiprocessing
import multiprocessing.util
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.support.faults import needs_linux
from tests.support.here import Here
from trainbox.errors import StorageFailure
from trainbox.files import temporary
from trainer.data.examples import read_examples
from trainer.session.failures import errors_as_failures


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the system's folder for temporary files."""
    root = tmp_path / "tmp"
    root.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    return root


@contextlib.contextmanager
def _forked(make: Callable[[], "contextlib.AbstractContextManager[Path]"]) -> Iterator[int]:
    """Yield a process that is inside `make()`. It is killed at the end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with make():
            os.write(write, b".")
            signal.pause()
    try:
        assert os.read(read, 1) == b"."
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)


def test_a_folder_is_removed_only_after_its_owner_was_killed(root: Path) -> None:
    with _forked(lambda: temporary.temporary_folder("verify-")):
        (folder,) = root.iterdir()
        (folder / "runs").mkdir()
        (folder / "runs/file").touch()
        temporary.remove_abandoned()
        assert (folder / "runs/file").exists()
    temporary.remove_abandoned()
    assert list(root.iterdir()) == []


def test_a_folder_is_removed_at_its_owners_end(root: Path) -> None:
    with temporary.temporary_folder("bench-") as folder:
        assert folder.name.startswith("trainbox-")
        temporary.remove_abandoned()
        assert folder.exists()
    assert list(root.iterdir()) == []


def test_a_kept_folder_stays(root: Path) -> None:
    with temporary.temporary_folder("drill-") as folder:
        temporary.keep(folder)
    temporary.remove_abandoned()
    assert folder.exists()


def test_folders_of_other_programs_and_users_stay(root: Path, tmp_path: Path) -> None:
    """These are folders of another program, an earlier version or another user, and links."""
    for name in ("pymp-abc", "trainbox-0", "other-1", "trainbox-theirs"):
        (root / name).mkdir()
    for name in ("pymp-abc", "other-1"):
        (root / name / ".owner").touch()
    (root / "trainbox-live-0.lock").touch()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/.owner").touch()
    (root / "trainbox-link").symlink_to(tmp_path / "linked")
    os.mkfifo(root / "trainbox-0/.owner")
    before = sorted(root.iterdir())
    if os.geteuid() == 0:
        (root / "trainbox-theirs/.owner").touch()
        os.chown(root / "trainbox-theirs", 12345, 0)
    temporary.remove_abandoned()
    assert sorted(root.iterdir()) == before
    assert (tmp_path / "linked/.owner").exists()


def test_a_training_keeps_the_sockets_of_loader_workers_in_its_own_folder(
    here: Here, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
    found: list[Path] = []
    monkeypatch.setattr(
        "trainer.session.train.header",
        lambda _: found.append(Path(multiprocessing.util.get_temp_dir())),
    )
    here.train(max_steps=1)
    assert [path.parent for path in found] == [root]
    assert found[0].name.startswith("trainbox-")
    assert list(root.iterdir()) == []
    assert multiprocessing.current_process()._config["tempdir"] is None  # type: ignore[attr-defined]


def test_a_folder_stays_as_long_as_a_worker_has_a_socket_in_it(root: Path) -> None:
    """A worker that cannot remove its socket at its end prints a traceback."""
    with temporary.sockets_in_a_folder():
        worker = multiprocessing.get_context("fork").Process(target=signal.pause)
        worker.start()
        (folder,) = root.iterdir()
    temporary.remove_abandoned()
    assert folder.exists()
    worker.kill()
    worker.join()
    temporary.remove_abandoned()
    assert list(root.iterdir()) == []


def test_a_training_does_not_need_a_writable_temporary_folder(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(here.folder / "nowhere"))
    assert "digest" in here.train(max_steps=1)


@needs_linux
@pytest.mark.parametrize(
    ("name", "reason"), [("x" * 90, "AF_UNIX path too long"), ("nowhere", "No such file")]
)
def test_loader_workers_without_a_socket_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    folder = tmp_path / name
    if name != "nowhere":
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
    dataset = TensorDataset(torch.arange(3.0))
    with temporary.sockets_in_a_folder():
        with pytest.raises(StorageFailure) as refused, errors_as_failures(Path("runs")):
            read_examples(dataset, [0, 2], 1)
        read, _ = read_examples(dataset, [0, 2], 0)
    assert [batch[0].tolist() for batch in read] == [[0], [2]]
    assert re.fullmatch(
        r"the loader workers cannot make a socket in the folder for temporary files "
        rf"\(TMPDIR='{folder}': .*{reason}.*\): set TMPDIR to a folder with a short path that you "
        "can write to, or add --workers 0",
        str(refused.value),
    )
