"""The checkpoints in a folder: verified, chosen and loaded, for scripts and for the trainer."""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from trainbox import ranks
from trainbox.errors import StorageFailure
from trainbox.files.regular_files import read_object
from trainbox.files.sidecar import (
    checkpoint_path,
    damage,
    read_sidecar,
    set_aside,
    short,
    steps_in,
)
from trainbox.tensor_files import read_tensor_file

_MOST_NAMED = 3  # the most damaged checkpoints that a message names


class StoredCheckpoints:
    """The checkpoints of one run in `folder`.

    Attributes:
        marker: This file appears once the run has completed a checkpoint.
        run_id: Only checkpoints with this id belong to the run.
    """

    def __init__(
        self,
        folder: Path,
        marker: Path,
        report: Callable[[str], None],
        instead: str,
        run_id: str | None = None,
    ) -> None:
        """Use the checkpoints in `folder`.

        `report` logs a message. `instead` is what a user can do who has lost all checkpoints.
        """
        self.folder, self.marker, self.run_id = folder, marker, run_id
        self.report, self._instead = report, instead

    def path(self, step: int, suffix: str = ".json") -> Path:
        return checkpoint_path(self.folder, step, suffix)

    def steps(self) -> list[int]:
        """Return the steps that have a sidecar, oldest first."""
        return steps_in(self.folder)

    def without_sidecar(self) -> dict[int, str]:
        """Return the problems of files whose sidecar is missing, also under a temporary name."""
        return {
            step: f"its sidecar {self.path(step).name} is missing"
            for step in steps_in(self.folder, ".pt")
            # A training may rename the sidecar, or remove the checkpoint, between two looks.
            if not any(self.path(step, end).exists() for end in (".json.tmp", ".json", ".json.tmp"))
            and os.path.lexists(self.path(step, ".pt"))
        }

    def run_id_found(self) -> str | None:
        """Return the run's id from the marker or its newest readable sidecar."""
        for path in (self.marker, *map(self.path, reversed(self.steps()))):
            read = read_object if path == self.marker else read_sidecar
            with contextlib.suppress(OSError, ValueError):
                found = read(path).get("run_id")
                return found if isinstance(found, str) else None
        return None

    def sidecar(self, step: int) -> dict[str, Any]:
        """Return the sidecar of `step`.

        Raises:
            ValueError: It cannot be read, or is of another step, run or program.
        """
        try:
            sidecar = read_sidecar(self.path(step))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"its sidecar cannot be used: {reason}") from error
        self.refuse_another("sidecar", sidecar, step)
        return sidecar

    def refuse_another(self, what: str, identity: Any, step: int) -> None:
        """Raise ValueError if `identity`, which a checkpoint's `what` has, is of another one."""
        if not isinstance(identity, dict) or identity.get("step") != step:
            found = identity.get("step") if isinstance(identity, dict) else identity
            raise ValueError(f"its {what} is of step {short(found)}")
        if (other := identity.get("run_id")) is None or other != self.run_id:
            raise ValueError(
                f"its {what} is of another run, with the id {short(other)} instead of "
                f"{short(self.run_id)}"
            )

    def problem(self, step: int) -> str | None:
        """Return what is wrong with the checkpoint of `step`, or None.

        Raises:
            StorageFailure: Its digest is correct, but loading the file could run code.
        """
        try:
            self.check(step)
        except ValueError as error:
            return str(error)
        return None

    def check(self, step: int) -> None:
        """Raise ValueError if the checkpoint of `step` is damaged."""
        if problem := damage(self.path(step, ".pt"), self.sidecar(step)):
            raise ValueError(problem)

    def first_valid(
        self,
        steps: Iterable[int],
        problem_of: Callable[[int], str | None] | None = None,
    ) -> int | None:
        """Return the first valid checkpoint of `steps`, or None if the run never completed one.

        `problem_of` is `problem` by default. If a checkpoint is valid, the damaged ones before it
        in `steps` and newer files without a sidecar are renamed to `.damaged`. An older file may be
        of another program.

        Raises:
            StorageFailure: The run had checkpoints, and none of them is valid. A restart would hide
                this loss. Nothing is renamed.
        """
        problems, valid = dict[int, str](), None
        for step in steps:
            problem = (problem_of or self.problem)(step)
            if problem is None:
                valid = step
                break
            problems[step] = problem
        lost = self.without_sidecar()
        problems |= {step: lost[step] for step in lost if valid is None or step > valid}
        if valid is None:
            self.refuse_to_restart(problems)
            return None
        for step in sorted(problems, reverse=True):
            self.report(
                f"checkpoint {self.path(step, '.pt')} is damaged ({problems[step]}): set "
                f"aside, using step {valid}"
            )
            for suffix in (".pt", ".json"):
                set_aside(self.path(step, suffix))
        return valid

    def refuse_to_restart(self, problems: Mapping[int, str]) -> None:
        """Raise StorageFailure if there is any sign that this run had a checkpoint."""
        named = [
            f"{self.path(step, '.pt').name}: {problems[step]}"
            for step in sorted(problems, reverse=True)
        ]
        if named:
            more = f"; and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
            lost = f"no valid checkpoint in {self.folder} ({'; '.join(named[:_MOST_NAMED])}{more})"
        elif damaged := len(list(self.folder.glob("step-*.damaged*"))):
            lost = f"no valid checkpoint in {self.folder} ({damaged} file(s) set aside as damaged)"
        elif os.path.lexists(self.marker):
            lost = (
                f"no checkpoint in {self.folder}, but this run has saved some "
                f"({self.marker.name} exists)"
            )
        else:
            return
        raise StorageFailure(
            f"{lost}: restore the missing or damaged files from a backup, or {self._instead}"
        )

    def load(self, step: int, mapped: bool = False) -> dict[str, Any]:
        """Return the state saved at `step`: tensors on the CPU and primitive values.

        The tensors are read from the file when they are used, if they are `mapped`.

        Raises:
            StorageFailure: This rank cannot read the file, or loading it could run code.
        """
        path = self.path(step, ".pt")
        try:
            state = read_tensor_file(path, mapped)
        except OSError as error:
            raise StorageFailure(
                f"rank {ranks.rank()} cannot read {path}: {error.strerror or error}: use a folder "
                "that all machines share"
            ) from error
        except ValueError as error:
            # The file matches its sidecar, so another program wrote both.
            raise StorageFailure(self._unsafe(path, error)) from error
        if not isinstance(state, dict):
            raise StorageFailure(self._unsafe(path, f"it is a {type(state).__name__}"))
        return state

    def _unsafe(self, path: Path, reason: object) -> str:
        return (
            f"checkpoint {path} cannot be loaded safely ({reason}): restore it from a backup, or "
            f"{self._instead}"
        )
