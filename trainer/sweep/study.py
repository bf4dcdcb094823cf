"""Record a sweep in an Optuna study that all its processes share.

Only this file imports optuna. The study is the source of truth. Trial number N has the Nth
combination, and it ends once: complete, failed or pruned. A trial whose process was killed or lost
with its machine becomes pending again. It keeps its number and its folder.
"""

import contextlib
import json
import math
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from trainer.errors import StorageFailure, WrongUse
from trainer.settings.config import split_metric
from trainer.sweep.grid import Range, Sweep, Value, from_identity
from trainer.system.hints import command
from trainer.system.processes import start_ticks
from trainer.system.storage import storage_failure as file_failure

_LOCK_GRACE_S = 10
_TRIES = 4
_SILENCE_S = 60.0  # a machine that sends no sign of life for this long counts as lost
_STORAGE_ERRORS = (OSError, optuna.exceptions.StorageInternalError)
_RESTORE = "restore it from a backup, or start a new sweep with another --name"
_LINE_BEGINS = b'{"op_code":'
_CREATE_TRIAL = 4  # Optuna's code of this operation; the codes 5 to 9 change a trial
_STATES = {
    TrialState.COMPLETE: "done",
    TrialState.FAIL: "failed",
    TrialState.PRUNED: "pruned",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "pending",
}


@dataclass(frozen=True)
class Trial:
    """A trial that this process has claimed."""

    id: int
    number: int
    point: dict[str, Value]
    seed: int
    attempts: int  # the number of earlier attempts, which failed


@dataclass(frozen=True)
class Record:
    """The state of a trial in the study. `message` is the reason of a failure."""

    number: int
    state: str
    point: dict[str, Value]
    seed: int
    metrics: dict[str, float] = field(default_factory=dict)
    message: str = ""
    seconds: float | None = None


class Study:
    """The view of one process on the study `name`."""

    def __init__(
        self, storage: BaseStorage, name: str, sweep: Sweep | None, owner: str | None = None
    ) -> None:
        """Open the study, or create it. Without `sweep`, only look at it.

        Raises:
            WrongUse: There is no study to look at, or the study has other settings.
        """
        self.owner = owner or _own_place()
        self._storage, self._beats = storage, 0
        self._heard: dict[str, tuple[Any, float]] = {}
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        # Open or create the study. A journal has only one, and its folder may have been renamed.
        stored_as = "sweep" if isinstance(storage, JournalStorage) else name
        try:
            self._study = optuna.load_study(study_name=stored_as, storage=storage)
        except KeyError:
            if sweep is None:
                raise WrongUse(
                    f"there is no sweep {name}: "
                    f"`{command('sweep', f'TASK --name {name}')}` starts one"
                ) from None
            maximize = (
                sweep.metric is not None and split_metric(sweep.metric, "--metric")[0] == "max"
            )
            direction = StudyDirection.MAXIMIZE if maximize else StudyDirection.MINIMIZE
            self._study = optuna.create_study(
                study_name=stored_as, storage=storage, direction=direction, load_if_exists=True
            )
        # Compare the settings with those of the sweep's start.
        stored = self._study.user_attrs.get("sweep")
        if stored is None:
            if sweep is None:
                raise WrongUse(f"the study {name} was not made by a sweep: give it another --name")
            stored = sweep.identity()
            self._study.set_user_attr("sweep", stored)
        if sweep is not None and stored != sweep.identity():
            changed = _difference(stored, sweep.identity())
            raise WrongUse(
                f"the sweep {name} was begun with other settings ({changed}): give those "
                "again, or another --name"
            )
        self.total: int = max(self._study.user_attrs.get("total", 0), sweep.total if sweep else 0)
        if self.total > self._study.user_attrs.get("total", 0):
            self._study.set_user_attr("total", self.total)
        # Trial N is the Nth combination of the grid, in the order of the sweep's first start.
        self.sweep = (
            replace(sweep, grid={n: sweep.grid[n] for n in stored["grid"]})
            if sweep
            else from_identity(stored)
        )
        self._study.sampler = self._sampler()
        if self.sweep.pruner == "median":
            self._study.pruner = optuna.pruners.MedianPruner()

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
        trial = self._study.ask(_distributions(self.sweep))
        (number,) = (number for number, t in self._numbered() if t.number == trial.number)
        if number >= self.total:
            self._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
            return None
        # Claim it, unless another process has done so.
        trial.set_user_attr("owner", self.owner)
        seed = self.sweep.seed(number)
        trial.set_user_attr("seed", seed)
        if not self._is_mine(trial._trial_id):
            return None
        return Trial(
            trial._trial_id, number, dict(trial.params), seed, trial.user_attrs.get("attempts", 0)
        )

    def done(self, trial: Trial, metrics: Mapping[str, float], seconds: float) -> None:
        """Record the best metrics of a trial, or a failure if the compared metric is not finite.

        Raises:
            WrongUse: The task does not have the metric that trials are compared by.
        """
        value = self.value(metrics)
        if not math.isfinite(value):
            self.failed(trial, f"{self.sweep.metric} is {value}")
            return
        self._end(trial, TrialState.COMPLETE, value, {"metrics": dict(metrics), "seconds": seconds})

    def value(self, metrics: Mapping[str, float]) -> float:
        """Return the value that trials are compared by, or 0 without a metric.

        Raises:
            WrongUse: The task does not have the metric that trials are compared by.
        """
        if self.sweep.metric is None:
            return 0.0
        _, name = split_metric(self.sweep.metric, "--metric")
        if name not in metrics:
            raise WrongUse(
                f"--metric {self.sweep.metric}: the task has no metric {name}; it has "
                f"{', '.join(metrics)}"
            )
        return metrics[name]

    def failed(self, trial: Trial, message: str) -> None:
        """Record that a trial failed and is not repeated."""
        self._end(trial, TrialState.FAIL, None, {"message": message})

    def pruned(self, trial: Trial, metrics: Mapping[str, float], seconds: float) -> None:
        """Record that a trial was stopped, because other trials were better at the same step."""
        self._end(trial, TrialState.PRUNED, None, {"metrics": dict(metrics), "seconds": seconds})

    def attempted(self, trial: Trial) -> Trial:
        """Count a failure of a trial that is then repeated."""
        self._storage.set_trial_user_attr(trial.id, "attempts", trial.attempts + 1)
        return Trial(trial.id, trial.number, trial.point, trial.seed, trial.attempts + 1)

    def give_back(self, trial: Trial) -> None:
        """Make the trial pending, so that any process can claim it."""
        if self._is_mine(trial.id):
            self._back(trial.id)

    def should_prune(self, trial: Trial, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether the trial is worse at `step` than earlier trials were."""
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
        """Show the other processes that this process is alive. Call this every few seconds."""
        self._beats += 1
        self._study.set_user_attr(f"alive {self.owner}", self._beats)

    def give_back_of_the_lost(self) -> int:
        """Make the trials of lost processes pending, and return their number.

        A process on this machine is found lost at once, a process elsewhere after a minute of
        silence.
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
                _is_gone(owner) or self._is_silent(owner, alive.get(owner))
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
        """Return the last trial of each number, which is the one that counts."""
        return {number: trial for number, trial in self._numbered() if number < self.total}

    def _sampler(self) -> BaseSampler:
        """Return the sampler of the sweep."""
        if self.sweep.sampler == "grid":
            return _InOrder(
                lambda trial: self.sweep.point(
                    next(n for n, t in self._numbered() if t.number == trial.number)
                )
            )
        # Without a seed: each process that shares the study must draw different numbers.
        return _RoundedTPE() if self.sweep.sampler == "tpe" else _RoundedRandom()

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

    def _is_silent(self, owner: str, beats: Any) -> bool:
        """Return whether `owner` has sent no sign of life for a minute.

        The minute is measured by the clock of this machine, so clocks are never compared.
        """
        if owner not in self._heard or self._heard[owner][0] != beats:
            self._heard[owner] = (beats, time.monotonic())
        return time.monotonic() - self._heard[owner][1] > _SILENCE_S


class _Rounded(BaseSampler):
    """A mixin that makes a sampler draw numbers that are easy to read and type."""

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: Any
    ) -> dict[str, Any]:
        drawn = super().sample_relative(study, trial, search_space)  # type: ignore[safe-super]
        return {name: _rounded(value, search_space[name]) for name, value in drawn.items()}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: Any
    ) -> Value:
        drawn = super().sample_independent(study, trial, param_name, param_distribution)  # type: ignore[safe-super]
        return _rounded(drawn, param_distribution)


class _RoundedTPE(_Rounded, TPESampler):
    pass


class _RoundedRandom(_Rounded, RandomSampler):
    pass


def _rounded(value: Value, distribution: BaseDistribution) -> Value:
    """Return a drawn number with three significant digits.

    In a narrow range the number has more digits, so that at least a hundred values remain.
    """
    if not isinstance(distribution, FloatDistribution) or not isinstance(value, float):
        return value
    places = 3 - math.ceil(math.log10(distribution.high - distribution.low))
    if distribution.log:
        places = max(places, 2 - math.floor(math.log10(value)))
    return min(max(round(value, places), distribution.low), distribution.high)


class _InOrder(BaseSampler):
    """A sampler that gives trial N the Nth combination.

    Optuna's GridSampler draws combinations at random, and processes that ask at once get the same
    one.
    """

    def __init__(self, point: Callable[[FrozenTrial], dict[str, Value]]) -> None:
        self._point = point

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: Any
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: Any
    ) -> Value:
        return self._point(trial)[param_name]


def open_study(url: str | None, folder: Path, name: str, sweep: Sweep | None) -> Study:
    """Open the study and read all of it. Without `sweep`, only look at it.

    Raises:
        WrongUse: There is no study to look at, or the study has other settings.
        StorageFailure: The study is damaged.
    """
    storage = open_storage(url, folder, only_look=sweep is None)
    try:
        study = Study(storage, name, sweep)
        study.records()
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        place = _shown(url) if url else folder / "study.journal"
        raise StorageFailure(f"{place} is damaged ({error!r}): {_RESTORE}") from error
    return study


def open_storage(url: str | None, folder: Path, only_look: bool = False) -> BaseStorage:
    """Open the database at `url`, or a journal in `folder`, which may be on a network file system.

    Raises:
        WrongUse: The database cannot be opened.
        StorageFailure: The database or the journal is damaged.
    """
    if url is not None:
        return _open_database(url)
    path = folder.absolute() / "study.journal"
    lock = JournalFileOpenLock(str(path), grace_period=_LOCK_GRACE_S)
    if path.exists() and not path.is_file():
        raise StorageFailure(f"{path} is not a file: remove it, or choose another --name")
    backend = _Journal(path, lock)
    if only_look:
        _check_journal(path)
    else:
        lock.acquire()
        try:
            _drop_torn_end(path, _check_journal(path))
        finally:
            lock.release()
    try:
        return JournalStorage(backend)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, backend.line, repr(error)) from error


class _Journal(JournalFileBackend):
    """An Optuna journal that reports which line it cannot read."""

    def __init__(self, path: Path, lock: JournalFileOpenLock) -> None:
        super().__init__(str(path), lock_obj=lock)
        self._path, self.line = path, 0

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        self.line = log_number_from
        try:
            for log in super().read_logs(log_number_from):
                self.line += 1
                yield log
        except ValueError as error:
            raise _damaged(self._path, self.line + 1, str(error)) from error


def _check_journal(path: Path) -> int:
    """Parse each line of the journal, and return the end of the last complete line in bytes.

    Optuna does not parse the last line. It also skips a line about an unknown trial, so a lost line
    could hide the result of a trial.

    Raises:
        StorageFailure: A line is damaged.
    """
    *lines, end = path.read_bytes().split(b"\n")
    trials = 0
    for number, line in enumerate(lines, 1):
        try:
            log = json.loads(line)
            trials += log["op_code"] == _CREATE_TRIAL
            unknown = _CREATE_TRIAL < log["op_code"] < 10 and not 0 <= log["trial_id"] < trials
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            raise _damaged(path, number, repr(error)) from error
        if unknown:
            raise _damaged(path, number, f"no line before it begins trial {log['trial_id']}")
    # A crash in the middle of a write leaves part of a line, or zeros in its place.
    if not (end.startswith(_LINE_BEGINS) or _LINE_BEGINS.startswith(end) or not end.strip(b"\0")):
        raise _damaged(path, len(lines) + 1, "not a line of a journal")
    return sum(len(line) + 1 for line in lines)


def _damaged(path: Path, line: int, reason: str) -> StorageFailure:
    """Return the failure for a damaged line of a journal."""
    return StorageFailure(f"{path} is damaged in line {line} ({reason}): {_RESTORE}")


def _open_database(url: str) -> BaseStorage:
    """Open the database at `url`. Try again while another process creates the tables."""
    for tries_left in reversed(range(_TRIES)):
        try:
            return RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
        except Exception as error:
            reason = _reason(error)
            if type(reason) is sqlite3.DatabaseError:
                raise storage_failure(error, url) from error
            if tries_left and not isinstance(error, ImportError | ValueError):
                time.sleep(1)  # another process may be creating the tables
                continue
            first_line = (str(reason) or type(reason).__name__).splitlines()[0]
            raise WrongUse(
                f"--storage {_shown(url)} cannot be opened ({first_line}): write it as "
                "SQLAlchemy does"
            ) from error
    raise AssertionError


@contextlib.contextmanager
def storage_failures(url: str | None, folder: Path) -> Iterator[None]:
    """Raise the errors of a study's file or database as StorageFailure."""
    try:
        yield
    except _STORAGE_ERRORS as error:
        raise storage_failure(error, url or folder) from error


def storage_failure(error: Exception, place: str | Path) -> StorageFailure:
    """Return the failure for `error` of the study at `place`."""
    reason = _reason(error)
    shown = getattr(error, "filename", None) or _shown(str(place))
    # This class itself means damage. Its subclasses mean a locked, missing or full database.
    if type(reason) is sqlite3.DatabaseError:
        return StorageFailure(f"{shown} is damaged ({reason}): {_RESTORE}")
    if isinstance(reason, OSError):
        return file_failure(Path(place), reason)
    return StorageFailure(
        f"{shown} cannot be written ({str(reason).splitlines()[0]}): make room, or choose "
        "another --runs-dir"
    )


def _reason(error: Exception) -> BaseException:
    """Return the error of the database driver, which Optuna and SQLAlchemy wrap."""
    cause = error.__cause__ or error
    return getattr(cause, "orig", None) or cause


def _shown(url: str) -> str:
    """Return the address of a database without its password."""
    return url.rpartition("@")[2]


def _drop_torn_end(path: Path, whole: int) -> None:
    """Remove the incomplete line that a crash has left.

    Optuna would append the next line to it.
    """
    with path.open("rb+") as file:
        file.truncate(whole)


def _distributions(sweep: Sweep) -> dict[str, BaseDistribution]:
    """Return Optuna's distributions of the grid and the ranges."""
    chosen: dict[str, BaseDistribution] = {
        name: CategoricalDistribution(values) for name, values in sweep.grid.items()
    }
    return chosen | {name: _distribution(drawn) for name, drawn in sweep.ranges.items()}


def _distribution(drawn: Range) -> BaseDistribution:
    if isinstance(drawn.low, int) and isinstance(drawn.high, int):
        return IntDistribution(drawn.low, drawn.high, log=drawn.log)
    return FloatDistribution(drawn.low, drawn.high, log=drawn.log)


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

    def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
        return {**{f"{k}": v for k, v in tree.items() if k != "config"}, **tree.get("config", {})}

    before, after = flat(stored), flat(now)
    return "; ".join(
        f"{name}: {before.get(name)} -> {after.get(name)}"
        for name in after
        if before.get(name) != after.get(name)
    )


def _own_place() -> str:
    """Return a name for this process, from which other processes can see whether it is alive."""
    space = _pid_space()
    return (
        f"{uuid.uuid4().hex[:8]} {space} {os.getpid()} {start_ticks(os.getpid())}"
        if space
        else uuid.uuid4().hex
    )


def _pid_space() -> str | None:
    """Return the boot and the PID namespace, in which a process id is unique.

    Return None if they cannot be read, as on systems other than Linux.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116
    except OSError:
        return None


def _is_gone(owner: str) -> bool:
    """Return whether `owner` ran in this PID namespace and has ended.

    Return False if it may run elsewhere.
    """
    _, *place = owner.split()
    return len(place) == 3 and place[0] == _pid_space() and start_ticks(int(place[1])) != place[2]
