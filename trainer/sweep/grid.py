"""The definition of a sweep, and its trials by their numbers. Pure, without torch."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainbox.errors import WrongUse
from trainbox.options.config import Config, split_metric
from trainbox.options.run_name import short_digest
from trainer.sweep.script_template import Script

# Each look at the study takes a time in proportion to its trials.
_MOST_TRIALS = 100_000

NO_METRIC = "none"  # the --metric of trials that report no number

Value = str | int | float | bool


@dataclass(frozen=True)
class Range:
    """The range in which a sampler draws a setting; integers if both ends are integers."""

    low: int | float
    high: int | float
    log: bool = False


@dataclass(frozen=True)
class Sweep:
    """All trials of a sweep.

    Each trial has `config`, with values of `grid` or drawn from `ranges`, and a seed. For a user's
    own script, `config` is its command.
    """

    config: Config | Script
    grid: dict[str, list[Value]] = field(default_factory=dict)
    ranges: dict[str, Range] = field(default_factory=dict)
    seeds: int = 1
    sampler: str = "grid"
    trials: int | None = None
    metric: str | None = None
    pruner: str = "none"

    @property
    def total(self) -> int:
        """Return the number of trials."""
        return (
            self.trials
            if self.trials is not None
            else math.prod(map(len, self.grid.values())) * self.seeds
        )

    @property
    def goal(self) -> tuple[str, str] | None:
        """Return (`min` or `max`, name) of the metric that ranks the trials, or None."""
        if self.metric in (None, NO_METRIC):
            return None
        return split_metric(self.metric, "--metric")

    @property
    def default_name(self) -> str:
        """Return the name of the sweep's folder."""
        if isinstance(self.config, Script):
            label = self.config.label
        else:
            label = self.config.task.rpartition(":")[2].lower()
        return f"{label}-sweep-{short_digest(self.identity())}"

    def point(self, number: int) -> dict[str, Value]:
        """Return the grid's combination for trial `number`.

        The trials go through all combinations with one seed, then with the next.
        """
        point = {}
        for name, values in reversed(self.grid.items()):
            number, index = divmod(number, len(values))
            point[name] = values[index]
        return {name: point[name] for name in self.grid}

    def seed(self, number: int) -> int:
        """Return the seed of trial `number`.

        The trials of a sampler share one seed, so that only their settings differ.
        """
        return self.config.seed + (
            number // math.prod(map(len, self.grid.values())) if self.sampler == "grid" else 0
        )

    def trial_config(self, point: Mapping[str, Value], seed: int) -> Config:
        """Return the settings of a trial of a task.

        Each name in `point` is a field of Config, or else a field of the task.
        """
        assert isinstance(self.config, Config)
        settings: dict[str, Any] = {
            name: value for name, value in point.items() if is_setting(name)
        }
        fields = {name: value for name, value in point.items() if not is_setting(name)}
        return dataclasses.replace(
            self.config, **settings, fields=self.config.fields | fields, seed=seed
        )

    def identity(self) -> dict[str, Any]:
        """Return what a resumed sweep must share with its first start, as JSON values.

        The number of trials is not part of it.
        """
        if isinstance(self.config, Config):
            config = self.config.identity()
        else:
            given = dataclasses.asdict(self.config).items()
            config = {name: value for name, value in given if value is not None}
        whole = dataclasses.asdict(dataclasses.replace(self, seeds=1, trials=None)) | {
            "config": config
        }
        shared: dict[str, Any] = json.loads(json.dumps(whole))
        return shared


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


TRIAL_FOLDERS = "trial-" + 5 * "[0-9]"  # the pattern of what `trial_folder` returns


def trial_folder(sweep: Path, number: int) -> Path:
    """Return the run folder of trial `number` in the folder of the `sweep`."""
    return sweep / f"trial-{number:05d}"


def trial_number(folder: Path) -> int:
    """Return the number of the trial in `folder`, whose name has the pattern of a trial."""
    return int(folder.name.rpartition("-")[2])


def from_identity(stored: Mapping[str, Any]) -> Sweep:
    """Return the sweep with one seed that has this `identity`."""
    ranges = {name: Range(**drawn) for name, drawn in stored["ranges"].items()}
    config = stored["config"]
    if "script" in config:
        what: Config | Script = Script(**{**config, "template": tuple(config["template"])})
    else:
        what = Config(**config)
    return Sweep(**{**stored, "config": what, "ranges": ranges})


def is_setting(name: str) -> bool:
    """Return whether `name` is a training setting of Config, not a field of the task."""
    return name in Config.__dataclass_fields__ and name not in ("task", "fields", "seed")


def check(sweep: Sweep) -> None:
    """Raise WrongUse for choices that contradict each other."""
    if both := sweep.grid.keys() & sweep.ranges.keys():
        raise WrongUse(f"{sorted(both)[0]} is given in --grid and in --range: remove one")
    if sweep.total > _MOST_TRIALS:
        raise WrongUse(
            f"the sweep has {sweep.total:,} trials, more than {_MOST_TRIALS:,}: lower --seeds or "
            "--trials, or give --grid fewer values"
        )
    has_goal = sweep.goal is not None
    if sweep.sampler == "grid":
        if sweep.ranges or sweep.trials is not None:
            raise WrongUse(
                "--range and --trials are for samplers that draw: add --sampler random or "
                "--sampler tpe"
            )
        if sweep.pruner != "none" and not has_goal:
            raise WrongUse(
                f"--pruner {sweep.pruner} compares trials by a metric: add --metric, as in "
                "--metric max:accuracy"
            )
        return
    if sweep.seeds > 1:
        raise WrongUse(
            f"--seeds is for --sampler grid: with --sampler {sweep.sampler}, set --trials N"
        )
    if sweep.trials is None or not has_goal or not (sweep.grid or sweep.ranges):
        raise WrongUse(
            f"--sampler {sweep.sampler} needs --trials N, --metric NAME and settings to draw: "
            "add what is missing, as in --range lr=1e-4:1e-1:log, or --grid width=4,8,16 for a "
            "choice"
        )
    different = _combinations(sweep)
    if sweep.trials > different:
        raise WrongUse(
            f"--trials {sweep.trials} is more than the {different} combinations to draw from: "
            "lower --trials, or give more values"
        )


def _combinations(sweep: Sweep) -> float:
    """Return the number of combinations that a sampler can draw, infinite for real numbers."""
    numbers = [len(values) for values in sweep.grid.values()]
    for drawn in sweep.ranges.values():
        if isinstance(drawn.low, float) or isinstance(drawn.high, float):
            return math.inf
        numbers.append(drawn.high - drawn.low + 1)
    return math.prod(numbers)
