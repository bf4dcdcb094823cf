"""Copy a run's checkpoints to an object storage in a thread.

`mirror_plan` decides what is copied and what its names are.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from trainbox.contract.files import open_regular, read_object
from trainbox.contract.mirror_url import OPTION
from trainbox.contract.sidecar import steps_in
from trainer.run import mirror_plan
from trainer.run.mirror_plan import MARKER, NEEDED_RECORDS, RECORDS
from trainer.run.mirror_storage import Storage, reason, refuse_another_run

# At the end of a training, a copy is abandoned if it has not moved a byte for this time.
_STALLED_S = 300.0
# After a stop signal, a save and its copy may take this time. The supervisor kills the training
# 50 s after the signal.
STOP_S = 30.0
# A round copies at most two checkpoints, so the storage does not grow if the next round follows at
# once.
_FEWEST_REMOVALS = 3


class Mirror:
    """The copies of one run's checkpoints. A thread makes them, and no failure stops a training."""

    def __init__(
        self,
        storage: Storage,
        run: Path,
        report: Callable[[str], None],
        damaged: Collection[int] = (),
    ) -> None:
        """Copy the checkpoints of the run in the folder `run`. `report` logs a message.

        The storage has `damaged` copies, which do not count and are replaced.
        """
        self._storage, self._run, self._report = storage, run, report
        self._damaged = set(damaged)
        self._changed = threading.Condition()
        self._wanted: tuple[str | None, int | None] | None = None
        self._last: tuple[str | None, int | None] | None = None
        self._busy = self._abandoned = self._is_ours = self._behind = False
        self._tried = self._failed = 0
        self._causes: set[str] = set()
        self._newest: int | None = None
        self._moved_at_s = 0.0
        self._end_s: float | None = None  # of the wait in `finish`

    def saved(self, run_id: str | None, best_step: int | None) -> None:
        """Start to copy the run's newest checkpoint, and that of `best_step`.

        If a copy is under way, the next one follows it, with the checkpoint that is newest then.
        """
        with self._changed:
            if self._abandoned:
                return
            self._wanted = self._last = run_id, best_step
            if not self._busy:
                self._busy = True
                self._moved()
                threading.Thread(target=self._work, name="mirror", daemon=True).start()

    def finish(
        self, within_s: float | None = None, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait for the copies, and log what the storage has.

        Without `within_s`, wait as long as bytes move, and for at most `STOP_S` after `stopped`
        has returned True. A copy that has failed is tried once more.
        """
        self._end_s = None if within_s is None else time.monotonic() + within_s
        unfinished = not self._wait(stopped)
        if self._behind and self._last is not None:
            self.saved(*self._last)
            unfinished = not self._wait(stopped)
        self.abandon()
        step = "no checkpoint" if self._newest is None else f"the checkpoint of step {self._newest}"
        text = f"mirror     {self._storage.place} has {step}"
        if self._failed:
            text += f"; {self._failed} of {self._tried} copies failed"
        if unfinished:
            text += "; the last copy was not finished in time"
        self._report(text)

    def _wait(self, stopped: Callable[[], bool]) -> bool:
        """Wait for the thread, and return whether it has ended in time."""
        with self._changed:
            while self._busy:
                if self._end_s is None and stopped():
                    self._end_s = time.monotonic() + STOP_S
                until_s = self._moved_at_s + _STALLED_S if self._end_s is None else self._end_s
                if (left_s := until_s - time.monotonic()) <= 0:
                    return False
                self._changed.wait(min(left_s, 1.0))
        return True

    def abandon(self) -> None:
        """End a copy that is under way, without a message. The storage keeps complete ones."""
        with self._changed:
            self._abandoned, self._wanted = True, None

    def _work(self) -> None:
        """Copy until nothing new is wanted. The thread runs this."""
        while True:
            with self._changed:
                wanted, self._wanted = self._wanted, None
                if wanted is None:
                    self._busy = False
                    self._changed.notify_all()
                    return
            self._tried += 1
            try:
                self._copy_new(*wanted)
                self._behind = False
            except Exception as error:  # noqa: BLE001 - file systems raise errors of all kinds
                self._behind = True
                self._note(error)

    def _copy_new(self, run_id: str | None, best_step: int | None) -> None:
        """Copy what the storage lacks, and then remove what the run does not keep."""
        stored = self._storage.steps()
        complete = {step for step, whole in stored.items() if whole} - self._damaged
        if not self._is_ours:
            refuse_another_run(self._storage, complete, run_id)
            self._is_ours = True
        self._newest = max(complete, default=None)
        local = steps_in(self._run / "checkpoints")
        # Copies that were not finished can fill a disk, and nothing needs them.
        for step in mirror_plan.removals(local, best_step, stored):
            if not stored[step]:
                self._moved()
                self._storage.remove(step)
                del stored[step]
        for step in mirror_plan.uploads(local, best_step, complete):
            if not self._copy(step, run_id, complete):
                return  # it was removed or saved again, and another copy follows
            complete.add(step)
            self._damaged.discard(step)
            self._newest = max(complete)
        for number, step in enumerate(mirror_plan.removals(local, best_step, stored)):
            if number >= _FEWEST_REMOVALS and self._wanted is not None:
                return  # a newer checkpoint is copied before thousands of old ones are removed
            self._moved()
            self._storage.remove(step)

    def _copy(self, step: int, run_id: str | None, complete: Collection[int]) -> bool:
        """Copy the checkpoint of `step`, its marker last.

        Return False if it was removed or saved again meanwhile. Another copy follows.

        Raises:
            FileNotFoundError: The run's folder has lost a file that a restore would need, and that
                the `complete` copies do not have.
        """
        names = mirror_plan.checkpoint_names(step)
        tensors, sidecar = (self._run / name for name in names)
        try:
            described = read_object(sidecar)
            best = described.get("best_step")
            if best is not None and best not in (step, *complete):
                best_exists = (self._run / mirror_plan.checkpoint_names(best)[1]).exists()
                if best_exists or self._wanted is not None:
                    return False  # a later save has another best step
                raise FileNotFoundError(f"the best checkpoint, of step {best}, is missing")
            for name in NEEDED_RECORDS:
                open_regular(self._run / name).close()
            self._storage.put_file(tensors, step, names[0], self._moved)
            files = {names[0]: {name: described.get(name) for name in ("bytes", "sha256")}}
            # The records are read after the tensors. Their later entries are dropped at a resume.
            for name in (*RECORDS, names[1]):
                if (self._run / name).exists():
                    with open_regular(self._run / name) as file:
                        data = file.read()
                    self._storage.put(data, step, name)
                    self._moved()
                    files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            # A validation may save the same step again, and the files would be of two saves.
            if read_object(sidecar) != described:
                return False
        except FileNotFoundError:
            if self._wanted is not None or not sidecar.exists():
                return False
            raise
        marker = {
            "run_id": run_id,
            "step": step,
            "best_step": described.get("best_step"),
            "files": files,
        }
        self._storage.put(json.dumps(marker, indent=2).encode() + b"\n", step, MARKER)
        return True

    def _moved(self) -> None:
        """Note that bytes have moved. Raise an error in a copy that was abandoned."""
        if self._abandoned:
            raise RuntimeError("nobody waits for this copy")
        self._moved_at_s = time.monotonic()

    def _note(self, error: Exception) -> None:
        """Count a failure, and log it if its cause is new."""
        if self._abandoned:
            return
        self._failed += 1
        cause = f"{type(error).__name__} {getattr(error, 'errno', None)}"
        if cause not in self._causes:
            self._causes.add(cause)
            self._report(
                f"{OPTION}: a checkpoint could not be copied to {self._storage.place} "
                f"({reason(error)}): the training continues, and the next checkpoint is copied "
                "again; the same cause is not logged again"
            )
