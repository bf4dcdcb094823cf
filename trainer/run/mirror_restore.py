"""Restore a run from an object storage that has a newer checkpoint than the run's folder."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from errno import EDQUOT, ENOSPC
from pathlib import Path

from trainbox.contract.errors import Failure, NetworkFailure, Preempted, StorageFailure, WrongUse
from trainbox.contract.files import read_object
from trainbox.contract.mirror_url import OPTION
from trainbox.contract.sidecar import damage, steps_in
from trainer.run import mirror_plan
from trainer.run.mirror_plan import RECORDS
from trainer.run.mirror_storage import (
    Storage,
    is_refused_login,
    reason,
    refuse_another_run,
)
from trainer.system.storage import storage_failure

# The start of a training waits this long for the first answer of the storage.
_ANSWER_S = 60.0


def restore_newer(
    storage: Storage,
    run: Path,
    may_restore: bool,
    stopped: Callable[[], bool],
    report: Callable[[str], None],
) -> set[int]:
    """Restore the newest checkpoint of the storage, if the folder `run` has only older ones.

    Return the steps whose copies are damaged.

    The best checkpoint and the records are restored as well. A damaged copy is reported, and an
    older one is used. If the storage cannot be read and the folder has a checkpoint, the training
    resumes from there.

    Raises:
        WrongUse: `may_restore` is false and there is a newer checkpoint, the storage has another
            run, refuses access or does not exist.
        NetworkFailure: The storage cannot be read, and the folder has no checkpoint.
        StorageFailure: No copy is intact with its best checkpoint, and the folder has no
            checkpoint. Or the folder cannot be written.
        Preempted: `stopped` returned True.
    """
    own = max(steps_in(run / "checkpoints"), default=-1)
    damaged: set[int] = set()
    with _storage_errors(storage, run, own, report):
        stored = _first_answer(storage)
        complete = sorted((step for step, whole in stored.items() if whole), reverse=True)
        if own < 0 and not stored:
            storage.refuse_unwritable()
        if own >= 0:
            with contextlib.suppress(OSError, ValueError):  # a damaged sidecar is set aside later
                sidecar = read_object(run / mirror_plan.checkpoint_names(own)[1])
                refuse_another_run(storage, complete, sidecar.get("run_id"))
        newer = [step for step in complete if step > own]
        if newer and not may_restore:
            raise WrongUse(
                f"--resume never was given, but {storage.place} has a checkpoint of step "
                f"{newer[0]}: choose another --run name"
            )
        for step in newer:
            if found := _restore(storage, run, step, stopped):
                if found[0] not in damaged:
                    report(
                        f"the copy of step {found[0]} in {storage.place} is damaged ({found[1]})"
                    )
                damaged.add(found[0])
                continue
            report(f"restored the checkpoint of step {step} from {storage.place}")
            break
        else:
            if newer and own < 0:
                raise StorageFailure(
                    f"no copy in {storage.place} is intact together with the best checkpoint that "
                    "it needs: restore the damaged files, or choose another --run name"
                )
    return damaged


def _first_answer(storage: Storage) -> dict[int, bool]:
    """Return the steps in the storage.

    A server that accepts connections and does not answer would delay the start for minutes.

    Raises:
        TimeoutError: The storage did not answer in time.
    """
    found: list[dict[int, bool]] = []
    failures: list[Exception] = []

    def ask() -> None:
        try:
            found.append(storage.steps())
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=ask, name="mirror", daemon=True)
    thread.start()
    thread.join(_ANSWER_S)
    if failures:
        raise failures[0]
    if not found:
        raise TimeoutError(f"no answer in {_ANSWER_S:.0f} s")
    return found[0]


def _restore(
    storage: Storage, run: Path, step: int, stopped: Callable[[], bool]
) -> tuple[int, str] | None:
    """Restore the checkpoint of `step` and the best one, or return which is damaged and how."""

    def moved() -> None:
        if stopped():
            raise Preempted(
                f"stopped while the run was restored from {storage.place}: the same command "
                "restores it again"
            )

    ready: list[Path] = []
    number = step
    try:
        newest = storage.marker(step)
        # The newest checkpoint is last, so that a killed start restores again.
        best = newest.best_step
        for number in [best, step] if best not in (None, step) else [step]:
            marker = newest if number == step else storage.marker(number)
            names = mirror_plan.checkpoint_names(number)
            records = [] if number != step else [n for n in RECORDS if n in marker.files]
            for name in (*records, *names):
                path = run / f"{name}.tmp"
                path.parent.mkdir(parents=True, exist_ok=True)
                ready.append(path)
                storage.get_file(number, name, path, moved)
                if problem := damage(path, marker.files[name]):
                    return number, f"{name}: {problem}"
    except (ValueError, FileNotFoundError) as error:
        return number, str(error)
    else:
        # All files are intact. The sidecar of the newest checkpoint gets its name last.
        for path in ready:
            path.replace(path.with_suffix(""))
        ready.clear()
        return None
    finally:
        for path in ready:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _storage_errors(
    storage: Storage, run: Path, own: int, report: Callable[[str], None]
) -> Iterator[None]:
    """Raise an error of the storage as a Failure, or report it if the run has its step `own`."""
    try:
        yield
    except Failure:
        raise
    except Exception as error:
        if isinstance(error, OSError) and (
            str(error.filename or "").startswith(str(run)) or error.errno in (ENOSPC, EDQUOT)
        ):
            raise storage_failure(run, error) from error
        if own >= 0:
            report(
                f"{OPTION}: {storage.place} cannot be read ({reason(error)}): resuming from "
                f"the checkpoint of step {own} in the run's folder"
            )
            return
        text = f"{OPTION}: {storage.place} cannot be read ({reason(error)})"
        if is_refused_login(error):
            raise WrongUse(f"{text}: check the login of the storage's package") from error
        raise NetworkFailure(
            f"{text}, so it is unknown whether the run has a checkpoint there: give the same "
            f"command again, or drop {OPTION}"
        ) from error
