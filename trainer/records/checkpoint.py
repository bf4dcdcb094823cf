"""Checkpoints that are whole or not there: written beside the training, checked before a load."""

import contextlib
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from trainer.errors import NotFinite, StorageFailure
from trainer.system.files import open_regular, read_object
from trainer.system.storage import storage_failure

# in the run's folder, from its first complete checkpoint on
FIRST_CHECKPOINT = "first_checkpoint.json"
_BESIDE = (
    "model.safetensors",
    "config.json",
    "manifest.json",
    "metrics.jsonl",
    "digests.jsonl",
    FIRST_CHECKPOINT,
)
_NAMED = 3  # damaged checkpoints in a message


class Checkpoints:
    """The checkpoints of one run: `step-00000800.pt`, and its sidecar `.json` with the sha256,
    which appears last.

    A save copies the tensors into kept buffers and returns; a thread writes, syncs and renames. The
    next save waits for it. A crash in between loses that one checkpoint, never an older one.
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
        """`writes` is false on every process but the first: it then only loads.

        `report` takes lines for people.

        `gathered`: the states are copies on the CPU, made of all processes' shares: they are not
        copied again, and what is loaded is read where it lies, since each process takes its share
        of it alone. `run_id` is written into each checkpoint, and only checkpoints with the same
        one are loaded; None for runs that were started without one.
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
        self._snapshot = _Snapshot()
        self._folder_seen = folder.exists()
        self._since_s = time.monotonic()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._recorded = threading.Event()
        self._recorded.set()

    def sweep(self) -> None:
        """Clear up after a process that was killed: finish a save that lacks its last rename,
        remove temporary files.
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
                    f"{path} is not a temporary file of Trainbox (a folder, a link or a "
                    "FIFO): set aside"
                )
                _set_aside(path)

    def newest(self) -> int | None:
        """Return the step of the newest checkpoint that is whole, or None if this run has never
        completed one.

        Damaged checkpoints, and tensors whose sidecar is missing, are renamed to `.damaged` if an
        older one is whole.

        Raises:
            StorageFailure: no checkpoint is whole, but there are files of some, or this run has
                saved some before: restarting would hide that. Nothing is renamed then.
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
        """Raise StorageFailure where there is any sign that this run had a checkpoint."""
        cure = (
            "restore the missing or damaged files from a backup, or train anew under "
            "another --run name"
        )
        if problems:
            named = [
                f"{self._path(step, '.pt').name}: {problems[step]}"
                for step in sorted(problems, reverse=True)
            ]
            more = f"; and {len(named) - _NAMED} more" * (len(named) > _NAMED)
            raise StorageFailure(
                f"no whole checkpoint in {self.folder} ({'; '.join(named[:_NAMED])}{more}): {cure}"
            )
        if damaged := len(list(self.folder.glob("step-*.damaged*"))):
            raise StorageFailure(
                f"no whole checkpoint in {self.folder} ({damaged} file(s) set aside as "
                f"damaged): {cure}"
            )
        if os.path.lexists(self._first):
            raise StorageFailure(
                f"no checkpoint in {self.folder}, but this run has saved some "
                f"({self._first.name} exists): {cure}"
            )

    def steps(self) -> list[int]:
        """The steps that have a sidecar, oldest first."""
        return self._steps_of(".json")

    def _steps_of(self, suffix: str) -> list[int]:
        stems = (path.name.removesuffix(suffix) for path in self.folder.glob(f"step-*{suffix}"))
        steps = [
            int(match[1]) for stem in stems if (match := re.fullmatch(r"step-([0-9]{8,})", stem))
        ]
        return sorted(step for step in steps if os.path.lexists(self._path(step, suffix)))

    def run_id_found(self) -> str | None:
        """Return the run's id according to its newest readable sidecar: for a run that has lost its
        manifest.
        """
        for step in reversed(self.steps()):
            with contextlib.suppress(OSError, ValueError):
                found = read_object(self._path(step)).get("run_id")
                return found if isinstance(found, str) else None
        return None

    def load(self, step: int) -> dict[str, Any]:
        """Return the state saved at `step`, on the CPU: tensors and primitives, nothing that could
        run code.
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
        """Whether the last save is longer ago than `minutes`; yes is said once, since the save
        comes a step later.
        """
        if not self.writes or time.monotonic() - self._since_s < minutes * 60:
            return False
        self._since_s = time.monotonic()
        return True

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Get the buffers for states like this one, beside the training, so that the first save is
        as short as the next.
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
        """Copy `state` and write it as the checkpoint of `step` in a thread; keep the newest few
        and `best_step`'s.

        If `step` is the best one, its model goes to `model.safetensors` too. `record` is called
        with the copy, in the thread and before anything is written: hashing the tensors would stop
        the training for longer than copying them.

        Raises:
            StorageFailure: the save before this one could not be written.
        """
        self._since_s = time.monotonic()
        if self.writes:
            self.wait()
            copy = dict(state) if self._gathered else self._snapshot.take(state)
            needed = sum(tensor.nbytes for tensor in _tensors(copy))
            self._recorded.clear()
            self._start(lambda: self._write(step, copy, dict(metrics), best_step, record), needed)

    def wait_until_recorded(self) -> None:
        """Wait until the save under way has called its `record`, which is long before it is
        durable.
        """
        self._recorded.wait()

    def wait(self) -> None:
        """Until the save under way is durable.

        Raises:
            StorageFailure: it could not be written; the checkpoints before it are as they were.
            NotFinite: its weights are not finite, and it was not written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def finish(self) -> None:
        """Let the save under way end, whatever becomes of it: for a training that ends by an error
        of its own.
        """
        if self._thread is not None:
            self._thread.join()

    def _start(self, work: Callable[[], None], needed_bytes: int = 0) -> None:
        """`work` in the thread; its failure is raised by the next `wait`, and says how much room it
        needed.
        """

        def run() -> None:
            try:
                work()
            except OSError as error:
                self._failure = storage_failure(self.folder, error, needed_bytes)
            except BaseException as error:  # noqa: BLE001 - it is raised by the next wait, in the training's own thread
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
        masks = state.get("buffers", ())  # may hold infinities of their own
        tensors = {
            name: value for name, value in state["model"].items() if isinstance(value, Tensor)
        }
        for name, tensor in tensors.items():
            if (
                tensor.is_floating_point()
                and not (~tensor.isnan() if name in masks else tensor.isfinite()).all()
            ):
                raise NotFinite(
                    f"the weights {name!r} are not finite at step {step}: lower --lr, or "
                    "add --warmup-epochs or "
                    "--clip-norm; the checkpoints saved before are whole"
                )
        if self._folder_seen and not self.folder.exists():
            self.report(
                f"{self.folder} is gone with all that was in it: made again for the "
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
        # The sidecar is on the disk, under its temporary name, before the tensors have theirs: a
        # process that is killed between the two renames leaves both, and the next start finishes
        # the save.
        with (
            replacing(self._path(step)) as sidecar_file,
            replacing(self._path(step, ".pt")) as file,
        ):
            hashed = _HashedFile(file)
            try:
                torch.save({**state, "checkpoint": identity}, hashed)  # type: ignore[arg-type]
            except RuntimeError as error:
                raise (hashed.error or error) from error  # torch hides the reason, ENOSPC say
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
        """Write model.safetensors again from the checkpoint of `best_step`, if it is missing,
        damaged or of an earlier step.

        One of a later step was saved before its checkpoint was complete, and will be saved again.

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
                f"{best_step} ({problem}): restore one of them from a backup, or train "
                "anew under another --run name"
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
            f"{self._best} was missing or damaged: written again from the checkpoint of "
            f"step {best_step}"
        )

    def _prune(self, best_step: int | None) -> None:
        for step in self.steps()[: -self.keep]:
            if step != best_step:
                # Killed in between, this leaves either a whole checkpoint, as `sweep` sees it, or a
                # temporary file.
                temporary = self._path(step, ".json.tmp")
                self._path(step).replace(temporary)
                self._path(step, ".pt").unlink(missing_ok=True)
                temporary.unlink()

    def _problem(self, step: int) -> str | None:
        """What is wrong with the checkpoint of `step`, or None if it is this run's and its bytes
        are those that were written.

        Raises:
            StorageFailure: its bytes are right, and loading them could run code.
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
                if size != sidecar.get("bytes"):  # looked at first: to read a huge file takes long
                    return f"{size} bytes, its sidecar says {_short(sidecar.get('bytes'))}"
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            return f"its tensors cannot be read: {error.strerror or error}"
        if found != sidecar.get("sha256"):
            return f"sha256 {found[:12]}..., its sidecar says {_short(sidecar.get('sha256'))}"
        # None: of a version that did not write it
        identity = self._load(step, mmap=True).get("checkpoint")
        return self._not_this("content", {"step": step} if identity is None else identity, step)

    def _not_this(self, what: str, identity: Any, step: int) -> str | None:
        """Why a file that says `identity` is no checkpoint of `step` of this run; None if it is."""
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
    """Whether `sidecar` is complete and has the sha256 of the file `tensors`."""
    try:
        expected = read_object(sidecar).get("sha256")
        with open_regular(tensors) as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == expected
    except (OSError, ValueError):
        return False


def _set_aside(path: Path) -> None:
    """Rename whatever is at `path`, if anything, to `.damaged`, or to `.damaged.2` and so on where
    that name is taken.
    """
    aside, number = path.with_name(f"{path.name}.damaged"), 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{path.name}.damaged.{number}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)


def _step_of_weights(path: Path) -> int | None:
    """The step that a .safetensors file says it is of; None if it is missing or damaged."""
    try:
        open_regular(path).close()
        with safe_open(path, "pt") as file:
            return int((file.metadata() or {}).get("step", ""))
    except (OSError, SafetensorError, ValueError):
        return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


class _Snapshot:
    """A copy of a state in buffers that are kept: copying into fresh memory takes several times as
    long.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def allocate(self, state: Mapping[str, Any]) -> None:
        self._buffers_for(list(_tensors(state)))

    @torch.no_grad()
    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        tensors = list(_tensors(state))
        torch._foreach_copy_(self._buffers_for(tensors), tensors, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        copies = iter(self._buffers)
        rebuilt = _rebuild(state, copies)
        assert isinstance(rebuilt, dict)
        return rebuilt

    def _buffers_for(self, tensors: list[Tensor]) -> list[Tensor]:
        if [_layout(t) for t in tensors] != [_layout(t) for t in self._buffers]:
            # zeros, not empty: the pages are then really there
            self._buffers = [
                torch.zeros_like(
                    tensor,
                    device="cpu",
                    requires_grad=False,
                    pin_memory=tensor.device.type == "cuda",
                )
                for tensor in tensors
            ]
        return self._buffers


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.stride()


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)


def _rebuild(tree: Any, copies: Iterator[Tensor]) -> Any:
    """`tree` with its tensors replaced, in order, and its containers plain."""
    if isinstance(tree, Tensor):
        return next(copies)
    if isinstance(tree, Mapping):
        return {name: _rebuild(value, copies) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_rebuild(value, copies) for value in tree]
    return tree


class _HashedFile:
    """Passes writes on, hashing them, and remembers the error that torch would hide."""

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


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears at `path` whole, synced to the disk, or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as file:  # never through a link, nor into a FIFO
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
