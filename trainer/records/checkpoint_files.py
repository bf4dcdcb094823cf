"""The files of checkpoints: how they are named, verified, loaded, kept and removed."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from trainbox.errors import StorageFailure, WrongUse
from trainbox.files.regular_files import open_regular, replacing
from trainbox.files.sidecar import (
    FIRST_CHECKPOINT,
    complete_or_remove,
    remove_temporary,
    set_aside,
    short,
)
from trainbox.folders.record_folder import CONFIG, DIGESTS, MANIFEST, METRICS, WEIGHTS
from trainbox.folders.write_failures import writing
from trainbox.stored_checkpoints import StoredCheckpoints
from trainer.records.digest import digest_of_digests, saved_digests, tensor_digests
from trainer.records.jsonl import digest_problem, read_entries

_FILES_BESIDE = (CONFIG, MANIFEST, METRICS, DIGESTS, WEIGHTS, FIRST_CHECKPOINT)
_OPTIMIZER = "optimizer."  # the prefix of the optimizer's tensors in digests.jsonl
_EXTRA_STATE = "_extra_state"  # a module's extra state, which a .safetensors file cannot hold


class CheckpointFiles(StoredCheckpoints):
    """The checkpoints of one training, and its best weights in model.safetensors.

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

        `report` logs a message. Only checkpoints with the id `run_id` are loaded. Loaded tensors
        are `mapped` from the file if each rank needs only its share of them.
        """
        instead = "start a new run with --run NAME"
        super().__init__(folder, folder.parent / FIRST_CHECKPOINT, report, instead, run_id)
        self.best, self._mapped = folder.parent / WEIGHTS, mapped

    def remove_leftovers(self) -> None:
        """Clean up after a killed process.

        A save that lacks only its last rename is finished. Temporary files are removed.
        """
        beside = (self.folder.parent / f"{name}.tmp" for name in _FILES_BESIDE)
        for path in [*complete_or_remove(self.folder), *remove_temporary(beside)]:
            self.report(
                f"{path} is not a temporary file of Trainbox (a folder, a link or a FIFO): set "
                "aside"
            )
            set_aside(path)

    def newest(self, recorded: bool = False) -> int | None:
        """Return the step of the newest valid checkpoint, or None if this run never completed one.

        If an older checkpoint is valid, damaged checkpoints and files without a sidecar are
        renamed to `.damaged`. With `recorded`, a valid checkpoint has an entry in digests.jsonl.

        Raises:
            StorageFailure: The run had checkpoints, and none of them is valid. A restart would hide
                this loss. Nothing is renamed.
        """
        problem_of = self.problem_in_run if recorded else self.problem
        return self.first_valid(reversed(self.steps()), problem_of)

    def problem_in_run(self, step: int) -> str | None:
        """Return what is wrong with the checkpoint of `step`, or None.

        A training records a checkpoint in digests.jsonl before the file is complete.
        """
        return self.problem(step) or self.unrecorded(step)

    def unrecorded(self, step: int) -> str | None:
        """Return that digests.jsonl has no entry of a checkpoint of `step`, or None if it has."""
        if any("saved" in entry for entry in self.entries(step)):
            return None
        return f"step {step} has no entry of a checkpoint in {DIGESTS}"

    def load(self, step: int, mapped: bool | None = None) -> dict[str, Any]:
        """Return the state saved at `step`, without its identity. See the base class."""
        state = super().load(step, self._mapped if mapped is None else mapped)
        state.pop("checkpoint", None)
        return state

    def write_best(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Write model.safetensors."""
        model = {name: tensor.contiguous() for name, tensor in tensors.items()}
        try:
            data = to_safetensors(model, {"format": "pt", "step": str(step)})
        except KeyError as error:
            raise WrongUse(
                f"the model has a tensor of type {error}, which {self.best.name} cannot have: "
                "use another type, such as two real numbers for a complex one"
            ) from error
        with replacing(self.best) as file:
            file.write(data)

    def restore_best(self, best_step: int) -> None:
        """Write model.safetensors again if it is missing, damaged, edited or of another step.

        The weights come from the checkpoint of `best_step`. A file of a later step was written
        before its checkpoint was complete. It stays if that checkpoint is missing or damaged, as
        the run will write it again.

        Raises:
            StorageFailure: That checkpoint is missing or damaged too, so the best weights are lost.
        """
        found = None
        with contextlib.suppress(ValueError):
            if (found := self.check_best()) == best_step:
                return
        problem = self.problem(best_step)
        if problem is not None and found is not None and found > best_step:
            return
        if problem is not None:
            raise StorageFailure(
                f"{self.best} is missing or damaged, and so is the checkpoint of the best step "
                f"{best_step} ({problem}): restore one of them from a backup, or start a new "
                "run with --run NAME"
            )
        state = self.load(best_step)["model"]
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        with writing(self.best):
            self.write_best(best_step, tensors)
        self.report(
            f"{self.best} was missing, damaged or of another step: rewritten from the checkpoint "
            f"of step {best_step}"
        )

    def check(self, step: int) -> None:
        """Also compare the content of the checkpoint with its sidecar and with digests.jsonl."""
        super().check(step)
        state = super().load(step, mapped=True)
        self.refuse_another("content", state.get("checkpoint"), step)
        if problem := _content_problem(state, self.sidecar(step), step, self.entries(step)):
            raise ValueError(problem)

    def check_best(self) -> int:
        """Compare model.safetensors with digests.jsonl, and return the step of its weights.

        Raises:
            ValueError: It is missing, damaged or edited.
        """
        try:
            open_regular(self.best).close()
            with safe_open(self.best, "pt") as file:
                if not (written := (file.metadata() or {}).get("step", "")).isdecimal():
                    raise ValueError(f"a run did not save it: its step is {written!r}")
                step = int(written)
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
        path = self.folder.parent / DIGESTS
        return [entry for entry in read_entries(path, digest_problem) if entry["step"] == step]


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
    recorded, found = [e["saved"] for e in entries if "saved" in e], saved_digests(state)
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
    digests = tensor_digests(weights)
    for entry in entries:
        recorded = dict(entry["tensors"])
        absent = {n for n in recorded if n.endswith(_EXTRA_STATE) and n not in digests}
        names = [
            name
            for name in {**recorded, **digests}
            if not (name.startswith(_OPTIMIZER) and name not in digests)
            and (whole or name not in absent)
            and digests.get(name, "")[:16] != recorded.get(name)
        ]
        if not names and (whole or not absent) and digest_of_digests(digests) != entry["model"]:
            names = ["(all together)"]
        if names:
            return (
                f"its weights differ from the entry of step {step} in digests.jsonl: first tensor "
                f"{names[0]}, {len(names)} in all"
            )
    return None
