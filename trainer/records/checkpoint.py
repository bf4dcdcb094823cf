"""Checkpoints: written atomically beside the training, and verified before they are loaded."""

import contextlib
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from trainer.errors import NotFinite, StorageFailure
from trainer.records.snapshot import Snapshot, tensors_of
from trainer.system.files import open_regular, read_object, replacing
from trainer.system.storage import storage_failure

# This file is in a run's folder once the run has completed a checkpoint.
FIRST_CHECKPOINT = "first_checkpoint.json"
_BESIDE = (
    "model.safetensors",
    "config.json",
    "manifest.json",
    "metrics.jsonl",
    "digests.jsonl",
    FIRST_CHECKPOINT,
)
_NAMED = 3  # how many damaged checkpoints a message names


class Checkpoints:
    """The checkpoints of one run.

    A checkpoint is a file such as `step-00000800.pt` and its sidecar `step-00000800.json`. The
    sidecar has the SHA-256 of the file and appears last.

    A save copies the tensors into kept buffers and returns. A thread then writes, syncs and
    renames, and the next save waits for it. A crash loses the checkpoint that is being written,
    but never an older one.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        writes: bool,
        report: Callable[[str], None],
        gathered: bool = False,
        run_id: str | None = None,
    ) -> None:
        """Use the checkpoints in `folder`, and keep the newest `keep` of them.

        `writes` is false on every rank but the first, which then only load. `report` prints a line
        for people.

        If the states are `gathered`, they are already copies on the CPU, so they are not copied
        again. Loaded tensors are then mapped from the file, because each rank needs only its share.

        `run_id` is written into each checkpoint, and only checkpoints with the same id are loaded.
        It is None for runs that an earlier version started.
        """
        self.folder, self.keep, self.writes, self.report, self._gathered = (
            folder,
            keep,
            writes,
            report,
            gathered,
        )
        self.run_id = run_id
        self._first, self._best = (
            folder.parent / FIRST_CHECKPOINT,
            folder.parent / "model.safetensors",
        )
        self._snapshot = Snapshot()
        self._folder_seen = folder.exists()
        self._since_s = time.monotonic()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._recorded = threading.Event()
        self._recorded.set()

    def remove_leftovers(self) -> None:
        """Clean up after a killed process.

        A save that lacks only its last rename is finished. Temporary files are removed.
        """
        for sidecar in self.folder.glob("step-*.json.tmp"):
            if _is_sidecar_of(
                sidecar, sidecar.with_name(sidecar.name.removesuffix(".json.tmp") + ".pt")
            ):
                sidecar.replace(sidecar.with_suffix(""))
        beside = (self.folder.parent / f"{name}.tmp" for name in _BESIDE)
        for path in [*self.folder.glob("step-*.tmp"), *beside]:
            if path.is_file() and not path.is_symlink():
                path.unlink()
            elif os.path.lexists(path):
                self.report(
                    f"{path} is not a temporary file of Trainbox (it is a folder, a link or a "
                    "FIFO): set aside"
                )
                _set_aside(path)

    def newest(self) -> int | None:
        """Return the step of the newest valid checkpoint, or None if this run never completed one.

        If an older checkpoint is valid, damaged checkpoints and files without a sidecar are
        renamed to `.damaged`.

        Raises:
            StorageFailure: the run had checkpoints, and none of them is valid. A restart would hide
                that. Nothing is renamed.
        """
        steps, problems = self.steps(), dict[int, str]()
        whole = None
        for step in reversed(steps):
            problem = self._problem(step)
            if problem is None:
                whole = step
                break
            problems[step] = problem
        for step in self._steps_of(".pt"):
            if step not in steps:
                problems[step] = f"its sidecar {self._path(step).name} is missing"
        if whole is None:
            self._refuse_to_restart(problems)
            return None
        for step in sorted(problems, reverse=True):
            self.report(
                f"checkpoint {self._path(step, '.pt')} is damaged ({problems[step]}): set "
                f"aside, using step {whole}"
            )
            for suffix in (".pt", ".json"):
                _set_aside(self._path(step, suffix))
        return whole

    def _refuse_to_restart(self, problems: Mapping[int, str]) -> None:
        """Raise StorageFailure if there is any sign that this run had a checkpoint."""
        cure = (
            "restore the missing or damaged files from a backup, or start a new run with --run NAME"
        )
        if problems:
            named = [
                f"{self._path(step, '.pt').name}: {problems[step]}"
                for step in sorted(problems, reverse=True)
            ]
            more = f"; and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
            raise StorageFailure(
                f"no valid checkpoint in {self.folder} ({'; '.join(named[:_NAMED])}{more}): {cure}"
            )
        if damaged := len(list(self.folder.glob("step-*.damaged*"))):
            raise StorageFailure(
                f"no valid checkpoint in {self.folder} ({damaged} file(s) set aside as "
                f"damaged): {cure}"
            )
        if os.path.lexists(self._first):
            raise StorageFailure(
                f"no checkpoint in {self.folder}, but this run has saved some "
                f"({self._first.name} exists): {cure}"
            )

    def steps(self) -> list[int]:
        """Return the steps that have a sidecar, oldest first."""
        return self._steps_of(".json")

    def _steps_of(self, suffix: str) -> list[int]:
        stems = (path.name.removesuffix(suffix) for path in self.folder.glob(f"step-*{suffix}"))
        steps = [
            int(match[1]) for stem in stems if (match := re.fullmatch(r"step-([0-9]{8,})", stem))
        ]
        return sorted(step for step in steps if os.path.lexists(self._path(step, suffix)))

    def run_id_found(self) -> str | None:
        """Return the run's id from its newest readable sidecar, for a run without a manifest."""
        for step in reversed(self.steps()):
            with contextlib.suppress(OSError, ValueError):
                found = read_object(self._path(step)).get("run_id")
                return found if isinstance(found, str) else None
        return None

    def load(self, step: int) -> dict[str, Any]:
        """Return the state saved at `step`: tensors on the CPU and primitive values.

        Raises:
            StorageFailure: the file contains something that could run code when it is loaded.
        """
        state = self._load(step, self._gathered)
        state.pop("checkpoint", None)
        return state

    def _load(self, step: int, mmap: bool) -> dict[str, Any]:
        path = self._path(step, ".pt")
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except Exception as error:
            # The file matches its sidecar, so another program or an attacker wrote both.
            raise StorageFailure(f"checkpoint {path} cannot be loaded safely: {error}") from error
        if not isinstance(state, dict):
            raise StorageFailure(
                f"checkpoint {path} cannot be loaded safely: it contains a "
                f"{type(state).__name__}, not a state"
            )
        return state

    def due(self, minutes: float) -> bool:
        """Return whether the last save is more than `minutes` ago.

        The answer is true only once, since the save happens a step later.
        """
        if not self.writes or time.monotonic() - self._since_s < minutes * 60:
            return False
        self._since_s = time.monotonic()
        return True

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Allocate the buffers for states like `state` in the thread.

        The first save then pauses the training no longer than the next ones.
        """
        if self.writes and not self._gathered:
            self.wait()
            self._start(lambda: self._snapshot.allocate(state))

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
        best_step: int | None,
        record: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """Copy `state`, and write it in a thread as the checkpoint of `step`.

        The newest few checkpoints and that of `best_step` are kept. If `step` is the best step, its
        model is written to `model.safetensors` too. The thread calls `record` with the copy before
        it writes, because hashing the tensors takes longer than copying them.

        Raises:
            StorageFailure: the save before this one could not be written.
        """
        self._since_s = time.monotonic()
        if self.writes:
            self.wait()
            copy = dict(state) if self._gathered else self._snapshot.take(state)
            needed = sum(tensor.nbytes for tensor in tensors_of(copy))
            self._recorded.clear()
            self._start(lambda: self._write(step, copy, dict(metrics), best_step, record), needed)

    def wait_until_recorded(self) -> None:
        """Wait until the current save has called its `record`, long before it is durable."""
        self._recorded.wait()

    def wait(self) -> None:
        """Wait until the current save is durable.

        Raises:
            StorageFailure: the checkpoint could not be written; older ones are unchanged.
            NotFinite: the weights are not finite, so nothing was written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def finish(self) -> None:
        """Wait for the current save, and ignore its failure: the training has one of its own."""
        if self._thread is not None:
            self._thread.join()

    def _start(self, work: Callable[[], None], needed_bytes: int = 0) -> None:
        """Run `work` in the thread. The next `wait` raises its failure.

        The message for a full disk contains `needed_bytes`.
        """

        def run() -> None:
            try:
                work()
            except OSError as error:
                self._failure = storage_failure(self.folder, error, needed_bytes)
            except BaseException as error:  # noqa: BLE001 - the next wait raises it
                self._failure = error
            finally:
                self._recorded.set()

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()

    def _write(
        self,
        step: int,
        state: dict[str, Any],
        metrics: dict[str, float],
        best_step: int | None,
        record: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        masks = state.get("buffers", ())  # a buffer may contain infinities on purpose
        tensors = {
            name: value for name, value in state["model"].items() if isinstance(value, Tensor)
        }
        for name, tensor in tensors.items():
            if (
                tensor.is_floating_point()
                and not (~tensor.isnan() if name in masks else tensor.isfinite()).all()
            ):
                raise NotFinite(
                    f"the weights {name!r} are not finite at step {step}: lower --lr, or add "
                    "--warmup-epochs or --clip-norm; older checkpoints are valid"
                )
        if self._folder_seen and not self.folder.exists():
            self.report(
                f"{self.folder} was removed with all its checkpoints: created again for the "
                f"checkpoint of step {step}"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._folder_seen = True
        if record is not None:
            record(state)
        self._recorded.set()
        if step == best_step:
            self._write_best(step, tensors)
        identity = {"run_id": self.run_id, "step": step}
        sidecar: dict[str, Any] = {**identity, "metrics": metrics, "best_step": best_step}
        # The sidecar is on the disk under its temporary name before the tensors get their name.
        # If the process is killed between the two renames, the next start finishes the save.
        with (
            replacing(self._path(step)) as sidecar_file,
            replacing(self._path(step, ".pt")) as file,
        ):
            hashed = _HashedFile(file)
            try:
                torch.save({**state, "checkpoint": identity}, hashed)  # type: ignore[arg-type]
            except RuntimeError as error:
                # torch hides the reason, such as a full disk
                raise (hashed.error or error) from error
            sidecar |= {"sha256": hashed.sha256.hexdigest(), "bytes": hashed.size}
            sidecar["saved_at_unix_s"] = round(time.time(), 3)
            sidecar_file.write(json.dumps(sidecar, indent=2).encode() + b"\n")
            sidecar_file.flush()
            os.fsync(sidecar_file.fileno())
        if not self._first.exists():
            with replacing(self._first) as file:
                file.write(json.dumps({"step": step}).encode() + b"\n")
        self._prune(best_step)

    def _write_best(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        model = {name: tensor.contiguous() for name, tensor in tensors.items()}
        with replacing(self._best) as file:
            file.write(to_safetensors(model, {"format": "pt", "step": str(step)}))

    def restore_best(self, best_step: int) -> None:
        """Write model.safetensors again from the checkpoint of `best_step`, if necessary.

        That is the case if the file is missing, damaged or of an earlier step. A file of a later
        step was written before its checkpoint was complete, and the run will write it again.

        Raises:
            StorageFailure: that checkpoint is missing or damaged too, so the best weights are lost.
        """
        found = _step_of_weights(self._best)
        if found is not None and found >= best_step:
            return
        problem = self._problem(best_step)
        if problem is not None:
            raise StorageFailure(
                f"{self._best} is missing or damaged, and so is the checkpoint of the best step "
                f"{best_step} ({problem}): restore one of them from a backup, or start a new "
                "run with --run NAME"
            )
        state = self.load(best_step)["model"]
        try:
            self._write_best(
                best_step,
                {name: value for name, value in state.items() if isinstance(value, Tensor)},
            )
        except OSError as error:
            raise storage_failure(self._best, error) from error
        self.report(
            f"{self._best} was missing or damaged: rewritten from the checkpoint of step "
            f"{best_step}"
        )

    def _prune(self, best_step: int | None) -> None:
        for step in self.steps()[: -self.keep]:
            if step != best_step:
                # If the process is killed in between, this leaves a whole checkpoint or a temporary
                # file for `remove_leftovers`.
                temporary = self._path(step, ".json.tmp")
                self._path(step).replace(temporary)
                self._path(step, ".pt").unlink(missing_ok=True)
                temporary.unlink()

    def _problem(self, step: int) -> str | None:
        """Return what is wrong with the checkpoint of `step`, or None.

        Raises:
            StorageFailure: the digest is right, but loading the file could run code.
        """
        try:
            sidecar = read_object(self._path(step))
        except (OSError, ValueError) as error:
            return f"its sidecar cannot be read: {getattr(error, 'strerror', None) or error}"
        if problem := self._not_this("sidecar", sidecar, step):
            return problem
        try:
            with open_regular(self._path(step, ".pt")) as file:
                size = os.fstat(file.fileno()).st_size
                if size != sidecar.get("bytes"):  # first, because reading a huge file takes long
                    return f"{size} bytes instead of {_short(sidecar.get('bytes'))}"
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            return f"its tensors cannot be read: {error.strerror or error}"
        if found != sidecar.get("sha256"):
            return f"sha256 {found[:12]}... instead of {_short(sidecar.get('sha256'))}"
        # An earlier version did not write the identity.
        identity = self._load(step, mmap=True).get("checkpoint")
        return self._not_this("content", {"step": step} if identity is None else identity, step)

    def _not_this(self, what: str, identity: Any, step: int) -> str | None:
        """Return why `identity` is not that of this run's checkpoint of `step`, or None."""
        if not isinstance(identity, dict) or identity.get("step") != step:
            return (
                f"its {what} is of step "
                f"{_short(identity.get('step') if isinstance(identity, dict) else identity)}"
            )
        if (other := identity.get("run_id")) != self.run_id:
            return (
                f"its {what} is of another run, with the id {_short(other)} instead of "
                f"{_short(self.run_id)}"
            )
        return None

    def _path(self, step: int, suffix: str = ".json") -> Path:
        return self.folder / f"step-{step:08d}{suffix}"


def _is_sidecar_of(sidecar: Path, tensors: Path) -> bool:
    """Return whether `sidecar` is complete and has the SHA-256 of the file `tensors`."""
    try:
        expected = read_object(sidecar).get("sha256")
        with open_regular(tensors) as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == expected
    except (OSError, ValueError):
        return False


def _set_aside(path: Path) -> None:
    """Rename what is at `path` to `.damaged`, or to `.damaged.2` and so on if that name exists."""
    aside, number = path.with_name(f"{path.name}.damaged"), 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{path.name}.damaged.{number}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)


def _step_of_weights(path: Path) -> int | None:
    """Return the step in the metadata of a .safetensors file; None if missing or damaged."""
    try:
        open_regular(path).close()
        with safe_open(path, "pt") as file:
            return int((file.metadata() or {}).get("step", ""))
    except (OSError, SafetensorError, ValueError):
        return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


class _HashedFile:
    """A file that hashes what is written, and remembers the error that torch would hide."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.sha256, self.size = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.sha256.update(data)
        self.size += written
        return written

    def flush(self) -> None:
        self.file.flush()
