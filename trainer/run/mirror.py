"""Copy a run's checkpoints to an object storage in a thread, and restore a lost run from there."""

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from trainbox.contract.errors import Failure, Preempted, StorageFailure, WrongUse
from trainbox.contract.files import read_object
from trainbox.contract.mirror_url import OPTION
from trainbox.contract.sidecar import checkpoint_path, steps_in
from trainbox.contract.storage import is_of_disk
from trainer.parallel.world import World
from trainer.run.checkpoint_files import CheckpointFiles
from trainer.run.mirror_storage import RECORDS, Storage, checkpoint_names, reason
from trainer.run.run_log import RunLog
from trainer.system.background import in_background
from trainer.system.signals import StopRequest

# The start of a training waits this long for the first answer of the storage.
_ANSWER_S = 60.0
# At the end of a training, a copy is abandoned if it has not moved a byte for this time.
_STALLED_S = 300.0
# After a stop signal, a save and its copy may take this time. The supervisor kills the training
# 50 s after the signal.
STOP_S = 30.0


@contextlib.contextmanager
def mirrored(
    url: str | None, run: RunLog, world: World, resume: str, stop: StopRequest
) -> Iterator["Mirror | None"]:
    """Yield the mirror of the run at `url` on rank 0, and None on the others or without a URL.

    Before the body, restore checkpoints that are newer than those of the run's folder. After it,
    wait for the last copy. All ranks must call this.

    Raises:
        Failure: The run cannot be restored.
        OSError: The run's folder cannot be written.
    """
    if url is None:
        yield None
        return
    mirror = None
    with world.wait_for_all("the restore from the mirror"):
        if world.is_first:
            mirror = Mirror(Storage(url, run.path), run.report, stop)
            mirror.restore(resume != "never")
    try:
        yield mirror
        with world.wait_for_all("the copies to the mirror"):
            if mirror is not None:
                mirror.finish()
    finally:
        if mirror is not None:
            mirror.abandon()


class Mirror:
    """The copies of one run's checkpoints. A thread makes them, and no failure stops a training."""

    def __init__(self, storage: Storage, report: Callable[[str], None], stop: StopRequest) -> None:
        """Copy the checkpoints of the storage's run. `report` logs a message."""
        self._storage, self._report, self._stop = storage, report, stop
        self._checkpoints = storage.run / "checkpoints"
        self._damaged: set[int] = set()  # copies that a restore has refused, to be replaced
        self._newest: int | None = None
        self._lock = threading.Lock()
        self._copies: Future[None] | None = None  # while copies are wanted
        self._wanted = self._behind = self._abandoned = False
        self._failures: list[str] = []  # the cause of each
        self._moved_at_s = 0.0
        self._end_s: float | None = None  # of the wait in `finish`

    def saved(self) -> None:
        """Start to copy the run's newest checkpoint, and the best one.

        If a copy is under way, the next one follows it, with the checkpoint that is newest then.
        """
        with self._lock:
            self._wanted = not self._abandoned
            if self._wanted and (self._copies is None or self._copies.done()):
                self._moved()
                self._copies = in_background(self._work, "mirror")

    def finish(self, within_s: float | None = None) -> None:
        """Wait for the copies, and log what the storage has.

        Without `within_s`, wait as long as bytes move, and for at most `STOP_S` after a stop was
        requested. A copy that has failed is tried once more.
        """
        self._end_s = None if within_s is None else time.monotonic() + within_s
        in_time = self._wait()
        if self._behind:
            self.saved()
            in_time = self._wait()
        self.abandon()
        step = "no checkpoint" if self._newest is None else f"the checkpoint of step {self._newest}"
        failed = f"; {len(self._failures)} copies failed" if self._failures else ""
        late = "" if in_time else "; the last copy was not finished in time"
        self._report(f"mirror     {self._storage.place} has {step}{failed}{late}")

    def _wait(self) -> bool:
        """Wait for the thread, and return whether it has ended in time."""
        while (copies := self._copies) is not None and not copies.done():
            if self._end_s is None and self._stop:
                self._end_s = time.monotonic() + STOP_S
            until_s = self._moved_at_s + _STALLED_S if self._end_s is None else self._end_s
            if (left_s := until_s - time.monotonic()) <= 0:
                return False
            wait([copies], min(left_s, 1.0))
        return True

    def abandon(self) -> None:
        """End a copy that is under way, without a message. The storage keeps complete ones."""
        with self._lock:
            self._abandoned, self._wanted = True, False

    def _moved(self) -> None:
        """Note that bytes have moved. Raise an error in a copy that was abandoned."""
        if self._abandoned:
            raise RuntimeError("nobody waits for this copy")
        self._moved_at_s = time.monotonic()

    def _work(self) -> None:
        """Copy until nothing new is wanted. The thread runs this."""
        while True:
            with self._lock:
                if not self._wanted:
                    self._copies = None
                    return
                self._wanted = False
            try:
                self._copy_new()
                self._behind = False
            except Exception as error:  # noqa: BLE001 - file systems raise errors of all kinds
                if self._abandoned:
                    continue
                cause, self._behind = f"{type(error).__name__} {getattr(error, 'errno', '')}", True
                if cause not in self._failures:
                    self._report(
                        f"{OPTION}: a checkpoint could not be copied to {self._storage.place} "
                        f"({reason(error)}): the training continues, and the next checkpoint is "
                        "copied again; the same cause is not logged again"
                    )
                self._failures.append(cause)

    def _copy_new(self) -> None:
        """Copy what the storage lacks, and then remove what the run does not keep."""
        stored, local = self._storage.steps(), steps_in(self._checkpoints)
        if not local:
            return
        newest = checkpoint_path(self._checkpoints, local[-1])
        saved = read_object(newest)
        complete = {step for step, whole in stored.items() if whole} - self._damaged
        self._storage.refuse_another_run(complete, saved.get("run_id"))
        self._newest = max(complete, default=None)
        # Other steps are not copied: a slow storage would never catch up.
        needed = [step for step in (saved.get("best_step"), local[-1]) if step is not None]
        # Steps after the newest checkpoint stay, because another machine has trained them. The best
        # one stays even if the run's folder has lost it.
        old = [step for step in sorted(stored) if step < local[-1] and step not in local + needed]
        # Copies that were not finished can fill a disk, and nothing needs them.
        for step in old:
            if not stored[step]:
                self._storage.remove(step, self._moved)
        try:
            for step in needed:
                if step not in complete:
                    self._storage.upload(step, self._moved)
                    complete.add(step)
                    self._damaged.discard(step)
                    self._newest = max(complete)
        except FileNotFoundError:
            if steps_in(self._checkpoints)[-1:] == local[-1:] and read_object(newest) == saved:
                raise
            return  # a newer checkpoint was saved, and its copy follows
        for step in old:
            if stored[step]:
                self._storage.remove(step, self._moved)

    def restore(self, may_restore: bool) -> None:
        """Restore the newest checkpoint of the storage, if the run's folder has only older ones.

        The best checkpoint and the records are restored as well. A damaged copy is reported, and an
        older one is used. If the storage cannot be read and the folder has a checkpoint, the
        training resumes from there.

        Raises:
            WrongUse: `may_restore` is false and there is a newer checkpoint, the storage has
                another run, refuses access or does not exist.
            NetworkFailure: The storage cannot be read, and the folder has no checkpoint.
            StorageFailure: No copy is intact with its best checkpoint, and the folder has no
                checkpoint.
            OSError: The folder cannot be written.
            Preempted: A stop was requested.
        """
        files = CheckpointFiles(self._checkpoints, self._report, mapped=True)
        files.run_id = files.run_id_found()
        valid = (step for step in reversed(files.steps()) if files.problem_in_run(step) is None)
        own = next(valid, -1)
        try:
            self._restore_after(own, files.run_id, may_restore)
        except Failure:
            raise
        except Exception as error:
            if is_of_disk(error, self._storage.run):
                raise
            if own < 0:
                raise self._storage.failure(error) from error
            self._report(
                f"{OPTION}: {self._storage.place} cannot be used ({reason(error)}): resuming from "
                f"the checkpoint of step {own} in the run's folder"
            )

    def _restore_after(self, own: int, run_id: str | None, may_restore: bool) -> None:
        """Restore the newest checkpoint after step `own`, or after -1. See `restore`.

        `run_id` is that of the run's folder, or None if it has no checkpoint.
        """
        place = self._storage.place
        # A server that accepts connections and does not answer would delay the start for minutes.
        stored = in_background(self._storage.steps, "mirror").result(_ANSWER_S)
        complete = sorted((step for step, whole in stored.items() if whole), reverse=True)
        if run_id is not None:
            self._storage.refuse_another_run(complete, run_id)
        elif not stored:
            self._storage.refuse_unwritable()
        newer = [step for step in complete if step > own]
        if newer and not may_restore:
            raise WrongUse(
                f"--resume never was given, but {place} has a checkpoint of step {newer[0]}: "
                "choose another --run name"
            )
        for step in newer:
            if self._restore_copy(step):
                self._report(f"restored the checkpoint of step {step} from {place}")
                return
        if newer and own < 0:
            raise StorageFailure(
                f"no copy in {place} is intact together with the best checkpoint that it needs: "
                "restore the damaged files, or choose another --run name"
            )

    def _restore_copy(self, step: int) -> bool:
        """Restore the checkpoint of `step` and the best one, and return whether both are intact."""
        run, names = self._storage.run, [*RECORDS, *checkpoint_names(step)]
        folder = run / "restored.tmp"
        try:
            shutil.rmtree(folder, ignore_errors=True)  # of a start that was killed
            sidecar = self._fetch(step, names, folder)
            if sidecar is None:
                return False
            best = sidecar.get("best_step")
            if type(best) is int and best != step:
                best_names = checkpoint_names(best)
                if self._fetch(best, best_names, folder) is None:
                    return False
                names = [*best_names, *names]
            # The sidecar of the newest checkpoint is last, so that a killed start restores again.
            for name in names:
                if (folder / name).exists():
                    (folder / name).replace(run / name)
            return True
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _fetch(self, step: int, names: Sequence[str], folder: Path) -> dict[str, Any] | None:
        """Copy files of `step` to the run folder `folder`, and return the checkpoint's sidecar.

        A resume checks the checkpoint in the same way, and then compares the settings. If the
        checkpoint is damaged, report it and return None.
        """
        try:
            self._storage.download(step, names, folder, self._not_stopped)
            run_id = read_object(folder / "manifest.json").get("run_id")
            files = CheckpointFiles(folder / "checkpoints", self._report, run_id, mapped=True)
            problem = files.problem_in_run(step)
            if problem is None:
                return read_object(files.path(step))
        except (ValueError, FileNotFoundError, StorageFailure) as error:
            problem = str(error).replace(f"{folder}/", "")
        if step not in self._damaged:
            self._report(f"the copy of step {step} in {self._storage.place} is damaged ({problem})")
        self._damaged.add(step)
        return None

    def _not_stopped(self) -> None:
        if self._stop:
            raise Preempted(
                f"stopped while the run was restored from {self._storage.place}: the same command "
                "restores it again"
            )
