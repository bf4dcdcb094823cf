"""Read the record of a run: the one reader of its settings, manifest, checkpoints and digests.

The run may still train. What is read is compared with the other files of the run: a forged or
damaged file is an error for each command in the same way. docs/decisions/0014 has the rules.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainbox.disclosure.recorded_values import edited_settings, listed_changes
from trainbox.errors import StorageFailure, WrongUse
from trainbox.files.regular_files import read_object
from trainbox.files.sidecar import read_sidecar
from trainbox.folders.record_folder import CHECKPOINTS, MANIFEST
from trainbox.options.config import Config, config_in
from trainer.records.checkpoint_files import CheckpointFiles
from trainer.records.jsonl import KEYS_OF_ENTRIES, read_entries
from trainer.records.run_folder import RunFolder

LAST = "last"  # the name of the newest checkpoint; the other one is `best`


class Edited(WrongUse):
    """The settings of a run were edited after its start."""


@dataclass(frozen=True)
class RunRecord:
    """A run whose settings and manifest agree.

    Attributes:
        values: The content of config.json.
    """

    path: Path
    values: Mapping[str, Any]
    config: Config
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> "RunRecord":
        """Read the settings and the manifest of the run in `path`.

        Raises:
            WrongUse: A file is missing, damaged or edited, or the run is one of a script.
        """
        values, manifest = object_in(path / "config.json"), object_in(path / "manifest.json")
        if problem := manifest_problem(manifest):
            raise WrongUse(f"{path}/manifest.json is damaged ({problem}): restore it")
        if edited := edited_settings(manifest, values):
            problem = manifest_of_another_run(path, manifest) or (
                f"{path}/config.json was edited after the run was started "
                f"({listed_changes(edited)})"
            )
            raise Edited(f"{problem}: restore it")
        # Also check the settings that the manifest does not have.
        config = config_in(values, path / "config.json")
        return cls(path, values, config, manifest)

    @property
    def starts(self) -> Sequence[Mapping[str, Any]]:
        """The starts of the run, each with its `step` and its `plan`."""
        return [{**self.manifest, "step": 0}, *self.manifest.get("resumes", [])]

    @property
    def plan(self) -> Mapping[str, Any]:
        """The strategy and the number of processes of the newest start."""
        return dict(self.starts[-1]["plan"])

    @property
    def files(self) -> CheckpointFiles:
        """The checkpoints of the run, which are only read."""
        return CheckpointFiles(self.path / CHECKPOINTS, print, self.manifest["run_id"], mapped=True)

    def find(self, which: str) -> int:
        """Return the step of the newest checkpoint or the best one, after a check of its content.

        The newest one names the best step, so both are checked. A training that still runs may
        remove a checkpoint at any time.

        Raises:
            WrongUse: The run does not have a checkpoint, or was never validated.
            StorageFailure: A checkpoint is missing, damaged or edited.
            FileNotFoundError: It was removed during the call.
        """
        files = self.files
        if not (steps := files.steps()):
            files.refuse_to_restart(files.without_sidecar())
            raise WrongUse(
                f"{self.path} has no checkpoint: wait for the first one, or train it with the same "
                "command"
            )
        for lost, problem in files.without_sidecar().items():
            if lost > steps[-1]:
                self._refuse(lost, problem)
        self._check(steps[-1])
        if which == LAST:
            return steps[-1]
        best_step: int | None = read_sidecar(files.path(steps[-1])).get("best_step")
        if best_step is None:
            raise WrongUse(
                f"{self.path} has no best checkpoint: it was not validated yet, or only with NaN "
                f"as the metric: wait for a validation, or use --checkpoint {LAST}"
            )
        if best_step != steps[-1]:
            self._check(best_step)
        return best_step

    def find_weights(self, which: str) -> tuple[int, Path]:
        """Return the step and the file of the newest or the best weights, after a check of them.

        The file is a checkpoint, or model.safetensors if the checkpoint of the best weights was
        removed. See `find` for the errors.
        """
        files = self.files
        if which != LAST and os.path.lexists(files.best):
            steps, lost = files.steps(), files.without_sidecar()
            if not steps and not lost:
                return self.check_best(None), files.best
            if steps:
                self._check(steps[-1])
                best_step = read_sidecar(files.path(steps[-1])).get("best_step")
                if best_step is not None and best_step not in {*steps, *lost}:
                    return self.check_best(steps[-1]), files.best
        step = self.find(which)
        return step, files.path(step, ".pt")

    def _check(self, step: int) -> None:
        """Check the checkpoint of `step`. See `find` for the errors."""
        files = self.files
        if problem := files.problem_in_run(step):
            if step not in {*files.steps(), *files.without_sidecar()}:
                raise FileNotFoundError(files.path(step))
            self._refuse(step, problem)

    def _refuse(self, step: int, problem: str) -> None:
        raise StorageFailure(
            f"checkpoint {self.files.path(step, '.pt')} is damaged ({problem}): restore it, or "
            "remove it and its sidecar"
        )

    def load(self, step: int) -> Mapping[str, Any]:
        """Return the state in the checkpoint of `step`: tensors on the CPU and plain values.

        Raises:
            FileNotFoundError: The checkpoint was removed.
            StorageFailure: Loading the file could run code.
        """
        if not self.files.path(step, ".pt").exists():
            raise FileNotFoundError(self.files.path(step, ".pt"))
        return self.files.load(step)

    def best_weights(self) -> Path:
        """Return model.safetensors after a check of its content.

        Raises:
            StorageFailure: It is damaged or edited, or of another step than the best.
        """
        try:
            files = self.files
            alone = not files.steps() and not files.without_sidecar() and files.best.exists()
            self.check_best(None if alone else self.find(LAST))
        except FileNotFoundError as error:
            raise StorageFailure(
                f"{error.filename} was removed by the training of {self.path}: let that run end"
            ) from error
        return self.files.best

    def check_best(self, newest: int | None) -> int:
        """Return the step of model.safetensors, which the checkpoint of step `newest` names.

        A save that was interrupted may have replaced the weights but not written its checkpoint.
        The weights are then of a later step.

        Raises:
            StorageFailure: It is missing, damaged or edited, or of another step.
        """
        try:
            step = self.files.check_best()
            if newest is not None and step <= newest:
                expected = read_sidecar(self.files.path(newest)).get("best_step")
                if step != expected:
                    raise ValueError(
                        f"it is of step {step}, but the best step of the newest checkpoint is "
                        f"{expected}"
                    )
            if problem := self.files.unrecorded(step):
                raise ValueError(problem)
        except ValueError as error:
            raise StorageFailure(f"{self.files.best} is damaged ({error}): restore it") from error
        return step

    def check_all(self, validated: Sequence[int]) -> tuple[int, int | None]:
        """Check each checkpoint and the best weights, and return the steps of the newest and best.

        `validated` has the steps of the validations in metrics.jsonl.

        Raises:
            StorageFailure: A file is missing, damaged or edited.
        """
        files, newest, best, needed = self.files, 0, None, list[int]()
        if not (steps := files.steps()):
            files.refuse_to_restart(files.without_sidecar())
        for step, lost in files.without_sidecar().items():
            self._refuse(step, lost)
        for newest in steps:
            with contextlib.suppress(FileNotFoundError):  # the training has removed it
                self._check(newest)
        expected = next(iter(validated), None)
        if steps:
            progress = files.load(newest)["progress"]
            expected = progress.get("best_step")
            needed = [progress.get("evaluated_step"), expected]
        if expected is not None or os.path.lexists(files.best):
            best = self.check_best(newest if steps else None)
        for step in sorted({step for step in [*needed, best] if step} - set(validated)):
            raise StorageFailure(
                f"{self.path}/metrics.jsonl has no validation at step {step}, but a saved file "
                "refers to one: restore it"
            )
        return newest, best

    def figures_at(self, step: int) -> dict[str, Any] | None:
        """Return the figures of the validation at `step` in metrics.jsonl, or None."""
        for entry in read_entries(self.path / "metrics.jsonl"):
            if entry["kind"] == "validation" and entry["step"] == step:
                return {name: x for name, x in entry.items() if name not in KEYS_OF_ENTRIES}
        return None


def object_in(path: Path) -> dict[str, Any]:
    """Return the object in config.json or manifest.json of a run.

    Raises:
        WrongUse: The file is missing or damaged.
    """
    try:
        return read_object(path)
    except OSError as error:
        raise WrongUse(
            f"{path} cannot be read ({error.strerror}): name the folder of a run"
        ) from error
    except ValueError as error:
        raise WrongUse(f"{path} is damaged ({error}): restore it") from error


_ENTRIES = {
    "data": dict,
    "sources": dict,
    "settings": dict,
    "classes": list | None,
    "resumes": list,
    "run_id": str,
}


def read_manifest(folder: RunFolder) -> dict[str, Any] | None:
    """Return the run's manifest, or None if it is missing or damaged."""
    found = folder.read_json(MANIFEST)
    return None if found is None or manifest_problem(found) else found


def manifest_of_another_run(path: Path, manifest: Mapping[str, Any]) -> str | None:
    """Return that the manifest and the checkpoints in `path` are of two runs, or None."""
    found = CheckpointFiles(path / CHECKPOINTS, print).run_id_found()
    if found in (None, manifest.get("run_id")):
        return None
    return (
        f"{path}/manifest.json is of another run (its run_id is {manifest.get('run_id')}, and the "
        f"checkpoints have {found})"
    )


def manifest_problem(manifest: Mapping[str, Any]) -> str | None:
    """Return which of the entries that are read is wrong, or None."""
    entries = {"data": {}, "sources": {}, "resumes": [], **manifest}
    for name, kind in _ENTRIES.items():
        if name not in entries or not isinstance(entries[name], kind):
            return f"{name} is missing or malformed"
    resumes = entries["resumes"]
    if not all(isinstance(start, dict) and type(start.get("step")) is int for start in resumes):
        return "resumes is malformed"
    for plan in (start.get("plan") for start in (manifest, *resumes)):
        if not (
            isinstance(plan, dict)
            and isinstance(plan.get("strategy"), str)
            and type(plan.get("world_size")) is int
        ):
            return "plan is missing or malformed"
    return None
