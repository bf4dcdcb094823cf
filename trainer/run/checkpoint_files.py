"""The files of checkpoints: how they are named, verified, loaded, kept and removed."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from trainbox.contract.errors import StorageFailure
from trainbox.contract.files import open_regular, read_object, replacing
from trainbox.contract.sidecar import (
    FIRST_CHECKPOINT,
    checkpoint_path,
    complete_or_remove,
    damage,
    remove_temporary,
    set_aside,
    short,
    steps_in,
)
from trainer.run.digest import digest_of_digests, saved_digests, tensor_digests
from trainer.run.jsonl import digest_problem, read_entries
from trainer.system.storage import storage_failure

_FILES_BESIDE = (
    "model.safetensors",
    "config.json",
    "manifest.json",
    "metrics.jsonl",
    "digests.jsonl",
    FIRST_CHECKPOINT,
)
_OPTIMIZER = "optimizer."  # the prefix of the optimizer's tensors in digests.jsonl
_EXTRA_STATE = "_extra_state"  # a module's extra state, which a .safetensors file cannot hold
_MOST_NAMED = 3  # the most damaged checkpoints that a message names


class CheckpointFiles:
    """The checkpoint files of one run, and its best weights in model.safetensors.

    A checkpoint is a file such as `step-00000800.pt` and its sidecar `step-00000800.json`. The
    sidecar has the SHA-256 of the file and appears last.
    """

    def __init__(
        self,
        folder: Path,
        report: Callable[[str], None],
        run_id: str | None = None,
        mapped: bool = False,
    ) -> None:
        """Use the checkpoints in `folder`.

        `report` logs a message. Only checkpoints with the id `run_id` are loaded. It is None for
        runs that an earlier version started. Loaded tensors are `mapped` from the file if each rank
        needs only its share of them.
        """
        self.folder, self.run_id, self._report, self._mapped = folder, run_id, report, mapped
        self.first, self.best = (
            folder.parent / FIRST_CHECKPOINT,
            folder.parent / "model.safetensors",
        )

    def remove_leftovers(self) -> None:
        """Clean up after a killed process.

        A save that lacks only its last rename is finished. Temporary files are removed.
        """
        beside = (self.folder.parent / f"{name}.tmp" for name in _FILES_BESIDE)
        for path in [*complete_or_remove(self.folder), *remove_temporary(beside)]:
            self._report(
                f"{path} is not a temporary file of Trainbox (a folder, a link or a FIFO): set "
                "aside"
            )
            set_aside(path)

    def newest(self) -> int | None:
        """Return the step of the newest valid checkpoint, or None if this run never completed one.

        If an older checkpoint is valid, damaged checkpoints and files without a sidecar are
        renamed to `.damaged`.

        Raises:
            StorageFailure: The run had checkpoints, and none of them is valid. A restart would hide
                this loss. Nothing is renamed.
        """
        steps, problems = self.steps(), dict[int, str]()
        valid = None
        for step in reversed(steps):
            problem = self.problem(step)
            if problem is None:
                valid = step
                break
            problems[step] = problem
        problems |= self.without_sidecar()
        if valid is None:
            self.refuse_to_restart(problems)
            return None
        for step in sorted(problems, reverse=True):
            self._report(
                f"checkpoint {self.path(step, '.pt')} is damaged ({problems[step]}): set "
                f"aside, using step {valid}"
            )
            for suffix in (".pt", ".json"):
                set_aside(self.path(step, suffix))
        return valid

    def without_sidecar(self) -> dict[int, str]:
        """Return the problems of files whose sidecar is missing, also under a temporary name."""
        return {
            step: f"its sidecar {self.path(step).name} is missing"
            for step in steps_in(self.folder, ".pt")
            # A training may rename the sidecar, or remove the checkpoint, between two looks.
            if not any(self.path(step, end).exists() for end in (".json.tmp", ".json", ".json.tmp"))
            and os.path.lexists(self.path(step, ".pt"))
        }

    def refuse_to_restart(self, problems: Mapping[int, str]) -> None:
        """Raise StorageFailure if there is any sign that this run had a checkpoint."""
        remedy = (
            "restore the missing or damaged files from a backup, or start a new run with --run NAME"
        )
        if problems:
            named = [
                f"{self.path(step, '.pt').name}: {problems[step]}"
                for step in sorted(problems, reverse=True)
            ]
            more = f"; and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
            raise StorageFailure(
                f"no valid checkpoint in {self.folder} ({'; '.join(named[:_MOST_NAMED])}{more}): "
                f"{remedy}"
            )
        if damaged := len(list(self.folder.glob("step-*.damaged*"))):
            raise StorageFailure(
                f"no valid checkpoint in {self.folder} ({damaged} file(s) set aside as "
                f"damaged): {remedy}"
            )
        if os.path.lexists(self.first):
            raise StorageFailure(
                f"no checkpoint in {self.folder}, but this run has saved some "
                f"({self.first.name} exists): {remedy}"
            )

    def steps(self) -> list[int]:
        """Return the steps that have a sidecar, oldest first."""
        return steps_in(self.folder)

    def run_id_found(self) -> str | None:
        """Return the run's id from its newest readable sidecar, for a run without a manifest."""
        for step in reversed(self.steps()):
            with contextlib.suppress(OSError, ValueError):
                found = read_object(self.path(step)).get("run_id")
                return found if isinstance(found, str) else None
        return None

    def load(self, step: int) -> dict[str, Any]:
        """Return the state saved at `step`: tensors on the CPU and primitive values.

        Raises:
            StorageFailure: Loading the file could run code.
        """
        state = self._load(step, self._mapped)
        state.pop("checkpoint", None)
        return state

    def _load(self, step: int, mmap: bool) -> dict[str, Any]:
        path = self.path(step, ".pt")
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except Exception as error:
            # The file matches its sidecar, so it is not damaged: another program wrote both.
            raise StorageFailure(f"checkpoint {path} cannot be loaded safely: {error}") from error
        if not isinstance(state, dict):
            raise StorageFailure(
                f"checkpoint {path} cannot be loaded safely: it contains a "
                f"{type(state).__name__}, not a state"
            )
        return state

    def write_best(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Write model.safetensors."""
        model = {name: tensor.contiguous() for name, tensor in tensors.items()}
        with replacing(self.best) as file:
            file.write(to_safetensors(model, {"format": "pt", "step": str(step)}))

    def restore_best(self, best_step: int) -> None:
        """Write model.safetensors again if it is missing, damaged, edited or of an earlier step.

        The weights come from the checkpoint of `best_step`. A file of a later step was written
        before its checkpoint was complete, and the run will write it again.

        Raises:
            StorageFailure: That checkpoint is missing or damaged too, so the best weights are lost.
        """
        with contextlib.suppress(ValueError):
            if self.check_best() >= best_step:
                return
        problem = self.problem(best_step)
        if problem is not None:
            raise StorageFailure(
                f"{self.best} is missing or damaged, and so is the checkpoint of the best step "
                f"{best_step} ({problem}): restore one of them from a backup, or start a new "
                "run with --run NAME"
            )
        state = self.load(best_step)["model"]
        try:
            self.write_best(
                best_step,
                {name: value for name, value in state.items() if isinstance(value, Tensor)},
            )
        except OSError as error:
            raise storage_failure(self.best, error) from error
        self._report(
            f"{self.best} was missing or damaged: rewritten from the checkpoint of step {best_step}"
        )

    def problem(self, step: int) -> str | None:
        """Return what is wrong with the checkpoint of `step`, or None.

        Raises:
            StorageFailure: The digest is correct, but loading the file could run code.
        """
        try:
            sidecar = read_object(self.path(step))
        except (OSError, ValueError) as error:
            return f"its sidecar cannot be read: {getattr(error, 'strerror', None) or error}"
        if problem := self._identity_problem("sidecar", sidecar, step):
            return problem
        if problem := damage(self.path(step, ".pt"), sidecar):
            return problem
        state = self._load(step, mmap=True)
        # An earlier version did not write the identity.
        identity = state.get("checkpoint")
        identity = {"step": step} if identity is None else identity
        return self._identity_problem("content", identity, step) or _content_problem(
            state, sidecar, step, self.entries(step)
        )

    def check_best(self) -> int:
        """Compare model.safetensors with digests.jsonl, and return the step of its weights.

        Raises:
            ValueError: It is missing, damaged or edited.
        """
        try:
            open_regular(self.best).close()
            with safe_open(self.best, "pt") as file:
                step = int((file.metadata() or {}).get("step", ""))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError as error:
            raise ValueError("it is missing") from error
        except (OSError, SafetensorError) as error:
            raise ValueError(f"it cannot be read: {error}") from error
        if problem := _weights_problem(tensors, step, self.entries(step), whole=False):
            raise ValueError(problem)
        return step

    def entries(self, step: int) -> list[dict[str, Any]]:
        """Return the valid entries of `step` in digests.jsonl, or none for a checkpoint alone."""
        path = self.folder.parent / "digests.jsonl"
        return [entry for entry in read_entries(path, digest_problem) if entry["step"] == step]

    def _identity_problem(self, what: str, identity: Any, step: int) -> str | None:
        """Return why `identity` is not of this run and `step`, or None."""
        if not isinstance(identity, dict) or identity.get("step") != step:
            return (
                f"its {what} is of step "
                f"{short(identity.get('step') if isinstance(identity, dict) else identity)}"
            )
        if (other := identity.get("run_id")) != self.run_id:
            return (
                f"its {what} is of another run, with the id {short(other)} instead of "
                f"{short(self.run_id)}"
            )
        return None

    def path(self, step: int, suffix: str = ".json") -> Path:
        return checkpoint_path(self.folder, step, suffix)


def _content_problem(
    state: Mapping[str, Any],
    sidecar: Mapping[str, Any],
    step: int,
    entries: Sequence[Mapping[str, Any]],
) -> str | None:
    """Return how the content of a checkpoint differs from its sidecar and its `entries`, or None.

    A step that was saved twice has two entries.
    """
    model, progress = state.get("model"), state.get("progress")
    if not isinstance(model, dict) or not isinstance(progress, dict):
        return "it has no model or no progress"
    if progress.get("step") != step:
        return f"its progress is of step {short(progress.get('step'))}"
    best_step = sidecar.get("best_step")
    if progress.get("best_step", best_step) != best_step:
        return f"its best step is {progress['best_step']}, but {best_step!r} in its sidecar"
    if problem := _weights_problem(model, step, entries, whole=True):
        return problem
    recorded = [entry["saved"] for entry in entries if "saved" in entry]
    found = saved_digests(state)
    if recorded and found not in recorded:
        last = recorded[-1]
        name = next(name for name in {**last, **found} if last.get(name) != found.get(name))
        return f"its {name} differs from the entry of step {step} in digests.jsonl"
    return None


def _weights_problem(
    weights: Mapping[str, Any], step: int, entries: Sequence[Mapping[str, Any]], whole: bool
) -> str | None:
    """Return how `weights` differ from the `entries` of their step, or None.

    If `whole` is false, they may lack the extra state of modules.
    """
    if not entries:
        return None
    digests, recorded = tensor_digests(weights), dict(entries[-1]["tensors"])
    absent = {name for name in recorded if name.endswith(_EXTRA_STATE) and name not in digests}
    names = [
        name
        for name in {**recorded, **digests}
        if not (name.startswith(_OPTIMIZER) and name not in digests)
        and (whole or name not in absent)
        and digests.get(name, "")[:16] != recorded.get(name)
    ]
    if not names and (whole or not absent) and digest_of_digests(digests) != entries[-1]["model"]:
        names = ["(all together)"]
    if not names:
        return None
    return (
        f"its weights differ from the entry of step {step} in digests.jsonl: first tensor "
        f"{names[0]}, {len(names)} in all"
    )
