"""Record a sweep in an Optuna study, a journal in its folder, that all its processes share.

The study is the source of truth. Trial number N has the Nth combination, and it ends once:
complete, failed or pruned. A trial whose process was killed or lost with its machine becomes
pending again. It keeps its number and its folder.
"""

import contextlib
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from trainbox.disclosure.secret_rule import arguments_without_secrets
from trainbox.disclosure.suggested_commands import command
from trainbox.errors import StorageFailure, WrongUse
from trainbox.folders.record_folder import CONFIG, STUDY
from trainbox.processes.identity import is_alive, own_name
from trainer.sweep.grid import (
    NO_METRIC,
    TRIAL_FOLDERS,
    Record,
    Sweep,
    Trial,
    from_identity,
    trial_number,
)
from trainer.sweep.samplers import distributions, draw, make_sampler
from trainer.sweep.script_template import Script, not_reported
from trainer.sweep.trial_owner import Heartbeats

_STUDY_NAME = "sweep"  # the only one in its journal
_LOCK_GRACE_S = 10
# The errors that Optuna raises for content that it did not write.
_DAMAGE = (AssertionError, AttributeError, KeyError, TypeError, ValueError)
_STATES = {
    TrialState.COMPLETE: "done",
    TrialState.FAIL: "failed",
    TrialState.PRUNED: "pruned",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "pending",
}


class Study:
    """The view of one process on the study `name`."""

    def __init__(
        self,
        storage: BaseStorage,
        name: str,
        sweep: Sweep | None,
        owner: str | None = None,
        begun: Collection[int] = (),
    ) -> None:
        """Open the study, or create it. Without `sweep`, only read it.

        Raises:
            KeyError: the study has no total.
            StorageFailure: the study lacks a trial that has `begun`, which a sweep would repeat.
            WrongUse: the study does not exist, or has other settings.
        """
        self.owner = owner or own_name()
        self._storage, self._beats, self._heartbeats = storage, 0, Heartbeats()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._study = _load_or_create(storage, name, sweep, begun)
        # A trial is claimed before it has a folder.
        claimed = {number for number, trial in self._numbered() if "owner" in trial.user_attrs}
        if sweep and (lost := {*begun} - claimed):
            raise _lost(name, lost)
        stored = self._identity(name, sweep)
        # More seeds or trials than before extend the sweep. Fewer do not shorten it.
        known = self._study.user_attrs
        self.total: int = max(known.get("total", 0), sweep.total) if sweep else known["total"]
        if sweep and self.total > known.get("total", 0):
            self._study.set_user_attr("total", self.total)
        # Trial N is the Nth combination of the grid, in the order of the sweep's first start.
        self.sweep = (
            replace(sweep, grid={n: sweep.grid[n] for n in stored["grid"]})
            if sweep
            else from_identity(stored)
        )
        self._study.sampler = make_sampler(self.sweep)
        if self.sweep.pruner == "median":
            self._study.pruner = optuna.pruners.MedianPruner()

    def _identity(self, name: str, sweep: Sweep | None) -> dict[str, Any]:
        """Return the stored settings, which must agree with `sweep`. Store them if none are.

        Raises:
            WrongUse: the study has other settings, or has none and `sweep` is None.
        """
        stored: dict[str, Any] | None = self._study.user_attrs.get("sweep")
        if stored is None:
            if sweep is None:
                raise WrongUse(
                    f"the study {name} does not belong to a sweep: choose another --name"
                )
            stored = sweep.identity()
            self._study.set_user_attr("total", sweep.total)  # first, for those who only read
            self._study.set_user_attr("sweep", stored)
        if sweep is not None and stored != sweep.identity():
            changed = _difference(stored, sweep.identity())
            raise WrongUse(
                f"sweep {name} was started with other settings ({changed}): restore them, or "
                "choose another --name"
            )
        return stored

    def claim(self) -> Trial | None:
        """Claim and return the next pending trial, or return None if no trial is pending."""
        # Return early if all trials have started and none is pending.
        trials = self._numbered()
        begun = {number for number, _ in trials}
        if len(begun) >= self.total and not any(
            t.state == TrialState.WAITING and n < self.total for n, t in trials
        ):
            return None
        # Ask Optuna for a trial. Several processes may ask for the last one at the same time.
        trial = self._study.ask()
        (number,) = (number for number, t in self._numbered() if t.number == trial.number)
        if number >= self.total:
            other = self.claim()  # Optuna would return a waiting trial first
            self._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
            return other
        # Choose the settings of a trial that does not have all of them yet. Optuna's GridSampler
        # would draw from a grid at random, and give processes that ask at the same time the same
        # combination.
        point, space = dict(trial.params), distributions(self.sweep)
        if point.keys() != space.keys():
            frozen = self._storage.get_trial(trial._trial_id)
            is_grid = self.sweep.sampler == "grid"
            point = self.sweep.point(number) if is_grid else draw(self._study, frozen, space)
            for name, value in point.items():
                stored = space[name].to_internal_repr(value)
                self._storage.set_trial_param(trial._trial_id, name, stored, space[name])
        # Claim it, unless another process has done so.
        trial.set_user_attr("owner", self.owner)
        seed = self.sweep.seed(number)
        trial.set_user_attr("seed", seed)
        if not self._is_mine(trial._trial_id):
            return None
        attempts = trial.user_attrs.get("attempts", 0)
        return Trial(trial._trial_id, number, point, seed, attempts)

    def done(self, trial: Trial, metrics: Mapping[str, float], seconds: float) -> None:
        """Record the best metrics of a trial, or a failure if the compared metric is not finite.

        Raises:
            WrongUse: the task does not have the metric that trials are compared by.
        """
        value = self.value(metrics)
        if not math.isfinite(value):
            self.failed(trial, f"{self.sweep.metric} is {value}")
            return
        self._end(trial, TrialState.COMPLETE, value, {"metrics": dict(metrics), "seconds": seconds})

    def value(self, metrics: Mapping[str, float]) -> float:
        """Return the value that trials are compared by, or 0 without a metric.

        Raises:
            WrongUse: the trial does not have the metric that trials are compared by.
        """
        goal, what = self.sweep.goal, self.sweep.config
        if goal is not None and goal[1] in metrics:
            return metrics[goal[1]]
        if isinstance(what, Script):
            if goal is None and (metrics or self.sweep.metric == NO_METRIC):
                return 0.0
            raise WrongUse(not_reported(what, goal, metrics))
        if goal is None:
            return 0.0
        raise WrongUse(
            f"--metric {self.sweep.metric}: the task has no metric {goal[1]}: use one of "
            f"{', '.join(metrics)}"
        )

    def failed(self, trial: Trial, message: str) -> None:
        """Record that a trial failed and is not retried."""
        self._end(trial, TrialState.FAIL, None, {"message": message})

    def pruned(self, trial: Trial, metrics: Mapping[str, float], seconds: float) -> None:
        """Record that a trial was stopped, because other trials were better at the same step."""
        self._end(trial, TrialState.PRUNED, None, {"metrics": dict(metrics), "seconds": seconds})

    def attempted(self, trial: Trial) -> Trial:
        """Count a failure of a trial that is then retried."""
        if self._is_mine(trial.id):
            self._storage.set_trial_user_attr(trial.id, "attempts", trial.attempts + 1)
        return Trial(trial.id, trial.number, trial.point, trial.seed, trial.attempts + 1)

    def give_back(self, trial: Trial) -> None:
        """Make the trial pending, so that any process can claim it."""
        if self._is_mine(trial.id):
            self._back(trial.id)

    def should_prune(self, trial: Trial, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether the trial is worse at `step` than earlier trials were, or is lost."""
        if not self._is_mine(trial.id):
            return True
        self._storage.set_trial_intermediate_value(trial.id, step, self.value(metrics))
        frozen = self._storage.get_trial(trial.id)
        return bool(self._study.pruner.prune(self._study, frozen))  # from a NumPy bool

    def retry_failed(self) -> None:
        """Make each failed trial pending once more, with the same number."""
        for number, trial in self._latest().items():
            if trial.state == TrialState.FAIL:
                kept = {"replaces": number, "seed": trial.user_attrs.get("seed")}
                again = optuna.trial.create_trial(
                    state=TrialState.WAITING,
                    params=trial.params,
                    distributions=trial.distributions,
                    user_attrs=kept,
                )
                self._study.add_trial(again)

    def beat(self) -> None:
        """Write a heartbeat for the other processes. Call this every few seconds."""
        self._beats += 1
        self._study.set_user_attr(f"alive {self.owner}", self._beats)

    def give_back_of_the_lost(self) -> int:
        """Make the trials of lost processes pending, and return their number.

        A process of this machine counts as lost as soon as it has ended. A process of another
        machine counts as lost after a minute without a heartbeat.
        """
        alive = {
            name.removeprefix("alive "): beats
            for name, beats in self._study.user_attrs.items()
            if name.startswith("alive ")
        }
        given = 0
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            owner = trial.user_attrs.get("owner") or f"nobody {trial.number}"
            if owner != self.owner and (
                is_alive(owner) is False or self._heartbeats.is_silent(owner, alive.get(owner))
            ):
                self._back(trial._trial_id)
                given += 1
        return given

    def unfinished(self) -> int:
        """Return the number of trials that have not ended."""
        return self.total - self.ended()[0]

    def ended(self) -> tuple[int, int]:
        """Return the number of trials that have ended, and the number of these that failed."""
        states = [trial.state for trial in self._latest().values()]
        return sum(state.is_finished() for state in states), states.count(TrialState.FAIL)

    def records(self) -> list[Record]:
        """Return all trials in the order of their numbers.

        Trials that have not started are included only for a grid, whose combinations are known.
        """
        found = self._latest()
        records = [_record(number, trial) for number, trial in sorted(found.items())]
        if self.sweep.sampler == "grid":
            missing = [n for n in range(self.total) if n not in found]
            records += [
                Record(n, "pending", self.sweep.point(n), self.sweep.seed(n)) for n in missing
            ]
        return records

    def _end(
        self, trial: Trial, state: TrialState, value: float | None, attributes: Mapping[str, Any]
    ) -> None:
        """Record the end of a trial, if this process still owns it."""
        if not self._is_mine(trial.id):
            return  # this process was considered lost, and another process owns the trial
        for name, attribute in attributes.items():
            self._storage.set_trial_user_attr(trial.id, name, attribute)
        self._storage.set_trial_state_values(trial.id, state, None if value is None else [value])

    def _numbered(self) -> list[tuple[int, FrozenTrial]]:
        """Return Optuna's trials with the numbers of the sweep.

        A trial that replaces a failed one has the number of the failed one. All others are counted.
        """
        numbered, replacements = [], 0
        for trial in self._study.get_trials(deepcopy=False):
            replaced = trial.user_attrs.get("replaces")
            numbered.append((trial.number - replacements if replaced is None else replaced, trial))
            replacements += replaced is not None
        return numbered

    def _latest(self) -> dict[int, FrozenTrial]:
        """Return the last trial of each number. An earlier trial of the number was replaced."""
        return {number: trial for number, trial in self._numbered() if number < self.total}

    def _is_mine(self, trial_id: int) -> bool:
        """Return whether the trial runs, and this process owns it."""
        found = self._storage.get_trial(trial_id)
        return found.state == TrialState.RUNNING and found.user_attrs.get("owner") == self.owner

    def _back(self, trial_id: int) -> None:
        """Make a trial pending, unless it has ended in the meantime."""
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            # Remove the owner first. The next process enters its name only after its claim. Until
            # then, the trial must not seem to belong to the lost owner.
            self._storage.set_trial_user_attr(trial_id, "owner", "")
            self._storage.set_trial_state_values(trial_id, TrialState.WAITING)


def open_study(folder: Path, sweep: Sweep | None) -> Study:
    """Open the study of the sweep in `folder` and read all of it. Without `sweep`, only read it.

    Raises:
        WrongUse: the study does not exist, or has other settings.
        StorageFailure: the study is damaged, or lacks trials that have begun.
    """
    # Another machine may claim a trial meanwhile, so these are found before the journal is read.
    begun = {trial_number(path.parent) for path in folder.glob(f"{TRIAL_FOLDERS}/{CONFIG}")}
    try:
        storage = open_journal(folder, read_only=sweep is None)
        study = Study(storage, folder.absolute().name, sweep, begun=begun)
        study.records()
    except _DAMAGE as error:
        raise StorageFailure(
            f"{folder / STUDY} is damaged ({error!r}): restore it from a backup, or start a new "
            "sweep with another --name"
        ) from error
    return study


def open_journal(folder: Path, read_only: bool = False) -> JournalStorage:
    """Open the journal in `folder`, which may be on a network file system."""
    path = folder.absolute() / STUDY
    lock = JournalFileOpenLock(str(path), grace_period=_LOCK_GRACE_S)
    backend = JournalFileBackend(str(path), lock)
    if not read_only:
        # On a full disk, a write ends with part of a line, to which Optuna would append.
        lock.acquire()
        try:
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        finally:
            lock.release()
    return JournalStorage(backend)


def _lost(name: str, numbers: Collection[int]) -> StorageFailure:
    """Return that the study lacks trials. New trials with their numbers would continue them."""
    first, *others = sorted(numbers)
    more = f" and {len(others)} more" if others else ""
    return StorageFailure(
        f"{STUDY} of the sweep {name} has lost trial {first}{more}, whose folder another trial "
        "would continue: restore the file from a backup, or start a new sweep with another --name"
    )


def _load_or_create(
    storage: BaseStorage, name: str, sweep: Sweep | None, begun: Collection[int]
) -> optuna.Study:
    """Return Optuna's study. Create it for `sweep` if it does not exist.

    Raises:
        StorageFailure: the study does not exist, and trials have `begun`.
        WrongUse: the study does not exist, and `sweep` is None.
    """
    try:
        return optuna.load_study(study_name=_STUDY_NAME, storage=storage)
    except KeyError:
        if begun:
            raise _lost(name, begun) from None
        if sweep is None:
            raise WrongUse(
                f"sweep {name} does not exist: start it with "
                f"`{command('sweep', f'TASK --name {name}')}`"
            ) from None
    maximize = sweep.goal is not None and sweep.goal[0] == "max"
    direction = StudyDirection.MAXIMIZE if maximize else StudyDirection.MINIMIZE
    return optuna.create_study(
        study_name=_STUDY_NAME, storage=storage, direction=direction, load_if_exists=True
    )


def _record(number: int, trial: FrozenTrial) -> Record:
    """Return the record of a trial.

    Raises:
        KeyError: The outcome of an ended trial is missing.
        TypeError: The metrics or the seconds are not numbers.
    """
    known = trial.user_attrs
    metrics, seconds = known.get("metrics", {}), known.get("seconds")
    outcome = "message" if trial.state == TrialState.FAIL else "metrics"
    if trial.state.is_finished() and outcome not in known:
        raise KeyError(f"the {outcome} of trial {number}")
    if not isinstance(metrics, dict) or not all(
        isinstance(figure, int | float) for figure in [*metrics.values(), seconds or 0]
    ):
        raise TypeError(f"trial {number} has the metrics {metrics} and took {seconds} s")
    return Record(
        number,
        _STATES[trial.state],
        dict(trial.params),
        known.get("seed", -1),
        metrics,
        known.get("message", ""),
        seconds,
    )


def _difference(stored: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the settings that differ, as `name: before -> after`."""

    def shown(name: str, value: Any) -> Any:
        is_template = name == "template" and value  # the arguments of a script
        return arguments_without_secrets(value, to_copy=True) if is_template else value

    before, after = ({**tree, **tree["config"], "config": None} for tree in (stored, now))
    return "; ".join(
        f"{name}: {shown(name, before.get(name))} -> {shown(name, after.get(name))}"
        for name in after
        if before.get(name) != after.get(name)
    )
