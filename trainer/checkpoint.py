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
from safetensors.torch import save as to_safetensors
from torch import Tensor

from trainer.errors import NotFinite, StorageFailure
from trainer.storage import storage_failure


class Checkpoints:
    """The checkpoints of one run: `step-00000800.pt`, and its `.json` with the sha256 of that, written last.

    A save copies the tensors into kept buffers and returns; a thread writes, syncs and renames. The next save waits
    for it. A crash in between loses that one checkpoint, never an older one.
    """

    def __init__(self, folder: Path, keep: int, writes: bool, report: Callable[[str], None], gathered: bool = False) -> None:
        """`writes` is false on every process but the first: it then only loads. `report` takes lines for people.

        `gathered`: the states are copies on the CPU, made of all processes' shares: they are not copied again, and what
        is loaded is read where it lies, since each process takes its share of it alone.
        """
        self.folder, self.keep, self.writes, self.report, self._gathered = folder, keep, writes, report, gathered
        self._snapshot = _Snapshot()
        self._folder_seen = folder.exists()
        self._since_s = time.monotonic()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._recorded = threading.Event()
        self._recorded.set()

    def sweep(self) -> None:
        """Remove what an interrupted save left: temporary files, and tensors without a sidecar."""
        beside = (self.folder.parent / f"{name}.tmp" for name in ("model.safetensors", "config.json", "metrics.jsonl"))
        for path in [*self.folder.glob("step-*.tmp"), *beside]:
            path.unlink(missing_ok=True)
        for path in self.folder.glob("step-*.pt"):
            if not path.with_suffix(".json").exists():
                path.unlink()

    def newest(self) -> int | None:
        """The step of the newest checkpoint that is whole; damaged ones are renamed to `.damaged`. None if there is none.

        Raises:
            StorageFailure: there are checkpoints and not one is whole: starting over would hide that.
        """
        steps = self.steps()
        for step in reversed(steps):
            problem = self._problem(step)
            if problem is None:
                return step
            tensors = self._path(step, ".pt")
            self.report(f"checkpoint {tensors} is damaged ({problem}): set aside, trying the one before")
            for path in (tensors, self._path(step)):
                with contextlib.suppress(FileNotFoundError):
                    path.rename(path.with_name(path.name + ".damaged"))
        damaged = sorted(self.folder.glob("step-*.damaged"))
        if damaged:
            raise StorageFailure(
                f"no whole checkpoint in {self.folder}, {len(damaged)} damaged file(s): restore one from a backup, "
                "or start over under another --run name"
            )
        return None

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, oldest first."""
        names = (path.name for path in self.folder.glob("step-*.json"))
        return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d{8,})\.json", name)))

    def load(self, step: int) -> dict[str, Any]:
        """The state saved at `step`, on the CPU: tensors and primitives, nothing that could run code."""
        try:
            state = torch.load(self._path(step, ".pt"), map_location="cpu", weights_only=True, mmap=self._gathered)
        except Exception as error:  # the file is what its sidecar says, so another program or an attacker wrote both
            raise StorageFailure(f"checkpoint {self._path(step, '.pt')} cannot be loaded safely: {error}") from error
        assert isinstance(state, dict)
        return state

    def due(self, minutes: float) -> bool:
        """Whether the last save is longer ago than `minutes`; yes is said once, since the save comes a step later."""
        if not self.writes or time.monotonic() - self._since_s < minutes * 60:
            return False
        self._since_s = time.monotonic()
        return True

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Get the buffers for states like this one, beside the training, so that the first save is as short as the next."""
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
        """Copy `state` and write it as the checkpoint of `step` in a thread; keep the newest few and `best_step`'s.

        If `step` is the best one, its model goes to `model.safetensors` too. `record` is called with the copy, in the thread
        and before anything is written: hashing the tensors would stop the training for longer than copying them.

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
        """Wait until the save under way has called its `record`, which is long before it is durable."""
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
        """Let the save under way end, whatever becomes of it: for a training that ends by an error of its own."""
        if self._thread is not None:
            self._thread.join()

    def _start(self, work: Callable[[], None], needed_bytes: int = 0) -> None:
        """`work` in the thread; its failure is raised by the next `wait`, and says how much room it needed."""

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
        tensors = {name: value for name, value in state["model"].items() if isinstance(value, Tensor)}
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not (~tensor.isnan() if name in masks else tensor.isfinite()).all():
                raise NotFinite(
                    f"the weights {name!r} are not finite at step {step}: lower --lr, or add --warmup-epochs or "
                    "--clip-norm; the checkpoints saved before are whole"
                )
        if self._folder_seen and not self.folder.exists():
            self.report(f"{self.folder} is gone with all that was in it: made again for the checkpoint of step {step}")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._folder_seen = True
        if record is not None:
            record(state)
        self._recorded.set()
        if step == best_step:
            model = {name: tensor.contiguous() for name, tensor in tensors.items()}
            with replacing(self.folder.parent / "model.safetensors") as file:
                file.write(to_safetensors(model, {"format": "pt", "step": str(step)}))
        sidecar: dict[str, Any] = {"step": step, "metrics": metrics, "best_step": best_step}
        with replacing(self._path(step, ".pt")) as file:
            hashed = _HashedFile(file)
            try:
                torch.save(state, hashed)  # type: ignore[arg-type]
            except RuntimeError as error:
                raise (hashed.error or error) from error  # torch hides the reason, ENOSPC say
            sidecar |= {"sha256": hashed.sha256.hexdigest(), "bytes": hashed.size, "saved_at_unix_s": round(time.time(), 3)}
            if self._path(step).exists():
                # Saved a second time, evaluated by now: until the file is replaced, the sidecar speaks of both.
                self._write_sidecar(step, sidecar | {"sha256_before": self._sha256s(step)[0]})
        self._write_sidecar(step, sidecar)
        self._prune(best_step)

    def _write_sidecar(self, step: int, sidecar: Mapping[str, Any]) -> None:
        with replacing(self._path(step)) as file:
            file.write(json.dumps(sidecar, indent=2).encode() + b"\n")

    def _sha256s(self, step: int) -> list[str]:
        """What the sidecar says of the tensors' file: one sha256, or two where a second save was cut short."""
        sidecar = json.loads(self._path(step).read_text(encoding="utf-8"))
        return [sidecar["sha256"], *([sidecar["sha256_before"]] if "sha256_before" in sidecar else [])]

    def _prune(self, best_step: int | None) -> None:
        for step in self.steps()[: -self.keep]:
            if step != best_step:
                self._path(step).unlink()  # first: tensors without it are swept, it without them is damage
                self._path(step, ".pt").unlink(missing_ok=True)

    def _problem(self, step: int) -> str | None:
        """What is wrong with the checkpoint of `step`, or None if its bytes are those that were written."""
        try:
            expected = self._sha256s(step)
            with self._path(step, ".pt").open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return None if found in expected else f"sha256 {found[:12]}..., its sidecar says {str(expected[0])[:12]}..."

    def _path(self, step: int, suffix: str = ".json") -> Path:
        return self.folder / f"step-{step:08d}{suffix}"


class _Snapshot:
    """A copy of a state in buffers that are kept: copying into fresh memory takes several times as long."""

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
                torch.zeros_like(tensor, device="cpu", requires_grad=False, pin_memory=tensor.device.type == "cuda")
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
    try:
        with temporary.open("wb") as file:
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
