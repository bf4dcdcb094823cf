"""Copies of checkpoints in an object storage: complete or not used, whatever happens to it."""

import contextlib
import json
import shutil
import threading
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.storages import Storages
from trainbox.contract.errors import NetworkFailure, Preempted, StorageFailure, WrongUse
from trainbox.contract.files import append_line
from trainbox.contract.mirror_url import check_url
from trainer.run.checkpoint import RunCheckpoints
from trainer.run.digest import digest_of_digests, saved_digests, tensor_digests
from trainer.run.mirror import Mirror
from trainer.run.mirror_storage import MARKER, Storage
from trainer.system.signals import StopRequest

URL = "faulty://bucket/prefix"
SECRET = "AKIAIOSFODNN7EXAMPLE"  # noqa: S105

pytestmark = pytest.mark.usefixtures("faulty")


def has_ended(mirror: Mirror) -> bool:
    """Wait for the thread as at the end of a training."""
    mirror._end_s = None
    return mirror._wait()


class Copied:
    """A run in `folder/r` whose checkpoints have a mirror."""

    def __init__(self, folder: Path, keep: int = 2, run_id: str = "0123") -> None:
        self.path, self.reports = folder / "r", list[str]()
        (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "manifest.json"):
            (self.path / name).write_text(json.dumps({"run_id": run_id}))
        self.checkpoints = RunCheckpoints(
            self.path / "checkpoints", keep, True, self.reports.append, run_id=run_id
        )
        self.stop = StopRequest()
        self.mirror = Mirror(Storage(URL, self.path), self.reports.append, self.stop)
        self.checkpoints.mirror = self.mirror

    def start_to_save(self, step: int, best: int | None = None, skipped: int = 0) -> None:
        """Save a checkpoint, whose copy starts."""
        progress = {"step": step, "skipped": skipped}
        state = {"model": {"weight": torch.ones(9)}, "progress": progress}
        self.checkpoints.save(step, state, {}, best, self._record)
        self.checkpoints.wait()

    def _record(self, saved: Mapping[str, Any]) -> None:
        """Append the entry of a checkpoint to digests.jsonl, as a training does."""
        model, step = tensor_digests(saved["model"]), saved["progress"]["step"]
        tensors = {name: digest[:16] for name, digest in model.items()}
        entry = {"kind": "checkpoint", "step": step, "model": digest_of_digests(model)}
        entry |= {"optimizer": "0" * 64, "order": "0" * 64, "tensors": tensors}
        append_line(
            self.path / "digests.jsonl", json.dumps(entry | {"saved": saved_digests(saved)})
        )

    def save(self, step: int, best: int | None = None) -> None:
        """Save a checkpoint, and wait until its copy has ended."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {step}}}\n')
        self.start_to_save(step, best)
        assert has_ended(self.mirror)

    def steps(self) -> list[int]:
        return self.checkpoints.files.steps()


def restored(folder: Path, may_restore: bool = True, stopped: bool = False) -> list[str]:
    """Restore the run in `folder/r`, and return the reports."""
    reports, stop = list[str](), StopRequest()
    stop.signal_name = "SIGTERM" if stopped else None
    (folder / "r/checkpoints").mkdir(parents=True, exist_ok=True)
    Mirror(Storage(URL, folder / "r"), reports.append, stop).restore(may_restore)
    return reports


def stored_steps() -> list[int]:
    steps = Storage(URL, Path("runs/r")).steps()
    return sorted(step for step, whole in steps.items() if whole)


def replace(path: str, data: bytes) -> None:
    Storages().pipe_file(f"/bucket/prefix/r/{path}", data)


def held(operation: str = "put", end: str = "") -> tuple[threading.Event, threading.Event]:
    """Let these operations of the storage wait.

    Return an event that is set when one of them waits, and the event that releases them.
    """
    begun, released = threading.Event(), threading.Event()

    def wait(found: str, path: str) -> None:
        if found.startswith(operation) and path.endswith(end):
            begun.set()
            assert released.wait(60)

    Storages.before = staticmethod(wait)
    return begun, released


def test_the_mirror_keeps_what_the_run_keeps(tmp_path: Path) -> None:
    run = Copied(tmp_path)
    for step, best in ((1, 1), (2, 1), (3, 1), (4, 4), (5, 4)):
        run.save(step, best)
        assert stored_steps() == run.steps()
    assert run.steps() == [4, 5]
    assert {name.split("/")[4] for name in Storages().names()} == {"step-00000004", "step-00000005"}
    run.mirror.finish()
    assert run.reports == [f"mirror     {URL}/r has the checkpoint of step 5"]


def test_a_folder_that_was_removed_during_the_training_keeps_its_copies(tmp_path: Path) -> None:
    run = Copied(tmp_path, keep=1)
    for step in (1, 2):
        run.save(step, 1)
    # Only the checkpoints are removed: the best one stays in the storage.
    shutil.rmtree(run.checkpoints.files.folder)
    run.save(3, 1)
    assert stored_steps() == [1, 3]
    assert restored(tmp_path / "one") == [f"restored the checkpoint of step 3 from {URL}/r"]
    # The records are removed as well: a copy without them could not be restored.
    shutil.rmtree(run.path)
    run.path.mkdir()
    for step in (4, 5):
        run.save(step, 1)
    run.mirror.finish()
    assert stored_steps() == [1, 3]
    failed, last = run.reports[-2:]
    assert "(FileNotFoundError: [Errno 2] No such file or directory: " in failed
    assert last == f"mirror     {URL}/r has the checkpoint of step 3; 3 copies failed"
    assert restored(tmp_path / "two") == [f"restored the checkpoint of step 3 from {URL}/r"]


def test_a_checkpoint_whose_best_one_is_lost_is_not_copied(tmp_path: Path) -> None:
    """A mirror that is new, or has only a damaged copy of the best checkpoint."""
    run = Copied(tmp_path)
    run.save(2, None)
    run.save(3, 1)
    assert stored_steps() == [2]
    assert "checkpoints/step-00000001.json'): the training continues" in run.reports[0]
    run.save(4, 4)
    assert stored_steps() == [4]


def _refuse_lost_files() -> None:
    """Check that each complete step has all its files."""
    for step in stored_steps():
        with contextlib.suppress(ValueError):  # a torn marker
            folder = f"/bucket/prefix/r/step-{step:08d}"
            files = json.loads(Storages.store[f"{folder}/{MARKER}"].getvalue())["files"]
            assert {f"{folder}/{name}" for name in files} <= Storages.store.keys()


def test_a_kill_at_any_operation_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    """The storage has steps 1 and 2. The third, which is the best, replaces both."""
    run = Copied(tmp_path, keep=1)
    run.save(1, 1)
    run.save(2, 1)
    before = Storages().names()
    run.mirror.abandon()
    run.save(3, 3)

    for last in range(100):
        Storages.store.clear()
        for path, data in before.items():
            Storages().pipe_file(path, data)
        left = last

        def count(operation: str, path: str) -> None:
            nonlocal left
            left -= operation in ("put", "pipe", "rm")
            if left < 0 and operation != "find":
                if operation != "rm":
                    Storages().open(path, "wb")  # a file that is being written is torn
                raise ConnectionError("killed")

        Storages.before = staticmethod(count)
        mirror = Mirror(Storage(URL, run.path), run.reports.append, StopRequest())
        mirror.saved()
        assert has_ended(mirror)
        Storages.work()
        _refuse_lost_files()
        new = tmp_path / f"new-{last}"
        restored(new)
        files = RunCheckpoints(new / "r/checkpoints", 1, True, print, run_id="0123").files
        # The copy has eight files, and the marker is the last one.
        assert files.newest() == (2 if last < 8 else 3)
        assert files.steps() == ([1, 2] if last < 8 else [3])
        if left >= 0:
            break
    assert last == 8 + 2 * 8
    assert stored_steps() == [3]


@pytest.mark.parametrize(
    "name",
    [
        MARKER,
        "config.json",
        "metrics.jsonl",
        *(f"checkpoints/step-00000002{s}" for s in (".pt", ".json")),
    ],
)
@pytest.mark.parametrize("data", [None, b"", b"{}", b'{"files": {"config.json": 3}}'])
def test_a_damaged_copy_is_not_used(tmp_path: Path, name: str, data: bytes | None) -> None:
    run = Copied(tmp_path)
    run.save(1)
    run.save(2)
    path = f"/bucket/prefix/r/step-00000002/{name}"
    if data is None:
        del Storages.store[path]
    else:
        replace(f"step-00000002/{name}", data)
    *problems, last = restored(tmp_path / "new")
    assert last == f"restored the checkpoint of step 1 from {URL}/r"
    # A step without a marker is a copy that was not finished.
    assert len(problems) == (not (data is None and name == MARKER))
    assert all(f"the copy of step 2 in {URL}/r is damaged (" in problem for problem in problems)
    assert not list((tmp_path / "new").rglob("*.tmp"))
    assert not (tmp_path / "new/r/checkpoints/step-00000002.pt").exists()


def test_a_marker_cannot_name_files_outside_of_the_run(tmp_path: Path) -> None:
    Copied(tmp_path).save(1)
    marker = json.loads(Storages().names()[f"/bucket/prefix/r/step-00000001/{MARKER}"])
    for name in ("../../escaped", "model.safetensors"):
        replace(f"step-00000001/{name}", b"")
        marker["files"][name] = {"bytes": 0, "sha256": sha256(b"").hexdigest()}
    replace(f"step-00000001/{MARKER}", json.dumps(marker).encode())
    restored(tmp_path / "new")
    names = {path.name for path in (tmp_path / "new").rglob("*.*")}
    assert names == {
        *("config.json", "manifest.json", "metrics.jsonl", "first_checkpoint.json"),
        *("step-00000001.pt", "step-00000001.json", "digests.jsonl"),
    }


def test_a_run_whose_copies_are_all_damaged_is_refused(tmp_path: Path) -> None:
    Copied(tmp_path).save(1)
    replace("step-00000001/checkpoints/step-00000001.pt", b"")
    with pytest.raises(StorageFailure, match=f"{URL}/r is intact together with the best "):
        restored(tmp_path / "new")
    # A run whose folder has an older checkpoint continues from there.
    run = Copied(tmp_path / "other")
    run.mirror.abandon()
    run.save(0)
    assert len(restored(tmp_path / "other")) == 1


def test_damaged_checkpoints_of_the_run_are_replaced_by_their_copies(tmp_path: Path) -> None:
    run = Copied(tmp_path)
    run.save(1)
    run.save(2)
    for step in run.steps():
        path = run.checkpoints.files.path(step, ".pt")
        path.write_bytes(path.read_bytes()[:-1])
    assert restored(tmp_path) == [f"restored the checkpoint of step 2 from {URL}/r"]
    run.checkpoints.files.check(2)
    # A resume would refuse a checkpoint without its digests.
    (run.path / "digests.jsonl").unlink()
    assert restored(tmp_path) == [f"restored the checkpoint of step 2 from {URL}/r"]
    assert run.checkpoints.files.newest(recorded=True) == 2
    # Not by those of another run.
    other = Copied(tmp_path / "other", run_id="4567")
    other.checkpoints.mirror = None
    other.start_to_save(1)
    other.checkpoints.files.path(1, ".pt").write_bytes(b"")
    with pytest.raises(WrongUse, match="another run"):
        restored(tmp_path / "other")


def test_a_newer_checkpoint_of_another_machine_is_restored(tmp_path: Path) -> None:
    for folder, step in (("one", 1), ("two", 2), ("one", 1)):
        run = Copied(tmp_path / folder)
        run.mirror.abandon()
        run.save(step)
    run = Copied(tmp_path / "two")
    run.save(3)
    assert restored(tmp_path / "one") == [f"restored the checkpoint of step 3 from {URL}/r"]
    # The storage keeps it, although an older checkpoint was saved elsewhere.
    run = Copied(tmp_path / "stale")
    run.save(2)
    assert stored_steps() == [2, 3]
    with pytest.raises(WrongUse, match="^--resume never was given, but faulty.* of step 3: choose"):
        restored(tmp_path / "new", may_restore=False)
    with pytest.raises(Preempted, match="^stopped while the run was restored from faulty"):
        restored(tmp_path / "new", stopped=True)
    assert not list((tmp_path / "new").rglob("*.*"))


def test_the_copies_of_another_run_are_neither_used_nor_replaced(tmp_path: Path) -> None:
    Copied(tmp_path / "one").save(5)
    before = Storages().names()
    run = Copied(tmp_path / "two", run_id="4567")
    run.save(7)
    assert Storages().names() == before
    (report,) = run.reports
    message = f"{URL}/r has another run, with the id '0123' instead of '4567': "
    assert message in report
    with pytest.raises(WrongUse, match=f"^{message}"):
        restored(tmp_path / "two")


def test_a_storage_that_hangs_delays_neither_saves_nor_the_end(tmp_path: Path) -> None:
    hanging, released = held()
    run = Copied(tmp_path)
    for step in range(1, 6):
        run.start_to_save(step, 1)
        assert hanging.wait(60)
    assert run.steps() == [1, 4, 5]
    run.mirror.finish(0.05)
    assert run.reports == [
        f"mirror     {URL}/r has no checkpoint; the last copy was not finished in time"
    ]
    released.set()
    assert has_ended(run.mirror)
    assert len(run.reports) == 1 and stored_steps() == []


def test_a_step_that_is_saved_again_during_its_copy_is_copied_again(tmp_path: Path) -> None:
    begun, released = held(end=".pt")
    run = Copied(tmp_path)
    for skipped in range(2):
        run.start_to_save(1, skipped=skipped)
        assert begun.wait(60)
    released.set()
    run.mirror.finish()
    assert restored(tmp_path / "new") == [f"restored the checkpoint of step 1 from {URL}/r"]
    names = ("step-00000001.pt", "step-00000001.json")
    here, there = (
        [(folder / "r/checkpoints" / name).read_bytes() for name in names]
        for folder in (tmp_path, tmp_path / "new")
    )
    assert here == there


def test_a_signal_limits_the_wait_for_the_last_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, released = held()
    monkeypatch.setattr("trainer.run.mirror.STOP_S", 0.05)
    run = Copied(tmp_path)
    run.start_to_save(1)
    run.stop.signal_name = "SIGTERM"
    run.mirror.finish()
    assert run.reports[-1].endswith("the last copy was not finished in time")
    released.set()
    assert has_ended(run.mirror)


def test_a_slow_storage_gets_the_newest_checkpoint_and_not_each_one(tmp_path: Path) -> None:
    released, put, begun = threading.Semaphore(0), list[str](), threading.Event()

    def wait(operation: str, path: str) -> None:
        if operation == "put":
            put.append(path[-11:-3])
            begun.set()
            assert released.acquire()

    Storages.before = staticmethod(wait)
    run = Copied(tmp_path)
    for step in range(1, 6):
        run.start_to_save(step)
        assert begun.wait(60)
    released.release(9)
    run.mirror.finish()
    # The file of step 1 was removed while it was copied, so its copy is not completed.
    assert put == ["00000001", "00000005"]
    assert stored_steps() == [5]
    assert restored(tmp_path / "new") == [f"restored the checkpoint of step 5 from {URL}/r"]


class _Refused(Exception):
    """An error as gcsfs and the package of Azure raise it."""

    def __init__(self, **fields: int) -> None:
        super().__init__("refused")
        self.__dict__ |= fields


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ConnectionError("reset"), NetworkFailure, "give the same command again, or drop --mirror"),
        (_Refused(code=503), NetworkFailure, "give the same command again, or drop --mirror"),
        (PermissionError("403"), WrongUse, "to list, read, write and remove in it"),
        (_Refused(code=401), WrongUse, "to list, read, write and remove in it"),
        (_Refused(status_code=403), WrongUse, "to list, read, write and remove in it"),
        (OSError("Forbidden: b/lab/o"), WrongUse, "to list, read, write and remove in it"),
    ],
)
def test_a_storage_that_cannot_be_read_is_an_error_only_without_a_checkpoint(
    tmp_path: Path, error: Exception, kind: type[Exception], text: str
) -> None:
    run = Copied(tmp_path)
    run.save(4)
    Storages.fail(error)
    with pytest.raises(kind, match=f"^--mirror: {URL}/r cannot be used .*{text}$"):
        restored(tmp_path / "new")
    (report,) = restored(tmp_path)
    assert report.endswith("resuming from the checkpoint of step 4 in the run's folder")


def test_a_storage_without_an_answer_does_not_delay_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Copied(tmp_path).save(4)
    _, released = held("")
    monkeypatch.setattr("trainer.run.mirror._ANSWER_S", 0.05)
    (report,) = restored(tmp_path)
    assert "(TimeoutError): resuming from the checkpoint of step 4" in report
    released.set()


@pytest.mark.parametrize(
    "error",
    [
        *(FileNotFoundError("no bucket"), _Refused(status_code=404)),
        *(PermissionError("403"), _Refused(code=401)),
    ],
)
def test_a_new_run_needs_a_bucket_that_it_can_write(tmp_path: Path, error: Exception) -> None:
    Storages.fail(error, "pipe")
    with pytest.raises(WrongUse, match=f"^--mirror: {URL}/r cannot be used .* create the bucket"):
        restored(tmp_path)
    Storages.work()
    assert restored(tmp_path) == [] == list(Storages.store)


# fmt: off
_URLS = [
    ("bucket/prefix", "--mirror 'bucket/prefix' is not a storage: write s3://bucket/prefix"),
    ("/mnt/my disk",
     "--mirror '/mnt/my disk' is a path: for a folder, write 'file:///mnt/my disk'"),
    ("file://a\n", "is not a storage: write s3://bucket/prefix"),
    ("memory://a", "--mirror 'memory://a' ends with the process: write s3://bucket/prefix"),
    (f"ftp://me:{SECRET}@host/x", "--mirror ftp://... contains a login, which other users"),
]
# fmt: on


@pytest.mark.parametrize(("url", "text"), _URLS)
def test_a_url_that_is_not_a_storage_is_refused(url: str, text: str) -> None:
    with pytest.raises(WrongUse) as refused:
        check_url(url)
    assert text in str(refused.value)
    assert SECRET not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_mirror_in_the_folder_of_the_runs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be lost with the runs, and the copies of a run could be in the run's own folder."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "disk/runs"
    (runs / "r").mkdir(parents=True)
    (tmp_path / "link").symlink_to(runs)
    for url in (f"file://{runs}", f"file://{runs}/r/copies", "file://link/r", f"local://{runs}/r"):
        for spelling in (runs, Path("disk/runs"), Path("link")):
            with pytest.raises(WrongUse, match=r"^--mirror '.*' is in the folder of the runs \("):
                check_url(url, spelling)
    check_url(f"file://{runs}-copies", runs)
    check_url(f"file://{tmp_path}/disk", runs)


def test_torn_copies_do_not_fill_a_full_storage(tmp_path: Path) -> None:
    def fail(operation: str, path: str) -> None:
        if operation == "put" and len(Storages.store) > 0:
            raise OSError(28, "No space left on device")

    Storages().pipe_file("/bucket/prefix/r/step-00000001/checkpoints/step-00000001.pt", b"torn")
    Storages.before = staticmethod(fail)
    run = Copied(tmp_path, keep=1)
    run.save(2)
    assert stored_steps() == [2]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(scheme: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.get_filesystem_class", missing)
    with pytest.raises(WrongUse, match="^--mirror 's3://b': Install s3fs to access S3: write the "):
        check_url("s3://b")


def test_signs_of_patterns_in_a_name_remove_no_other_copies(tmp_path: Path) -> None:
    names = [*("a/r*", "a/r?", "a/[r]a", "a/ra", "a/rb"), *("p*/r", "pa/r")]
    storages = [
        Storage(f"faulty://bucket/{folder}", Path("runs", run))
        for folder, run in (name.split("/") for name in names)
    ]
    for name in names:
        for step in (1, 2):
            Storages().pipe_file(f"/bucket/{name}/step-{step:08d}/{MARKER}", b"")
    for index, storage in enumerate(storages):
        storage.remove(1, lambda: None)
        left = [1 in other.steps() for other in storages]
        assert left == [place > index for place in range(len(names))]
