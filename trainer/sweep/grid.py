"""What a sweep consists of: its trials' settings, by their numbers. Pure, and no torch here."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.errors import WrongUse
from trainer.settings.config import FREE_AT_RESUME, Config, split_metric

Value = str | int | float | bool


@dataclass(frozen=True)
class Range:
    """Where a sampler may draw a setting from; whole numbers if both ends are."""

    low: int | float
    high: int | float
    log: bool = False


@dataclass(frozen=True)
class Sweep:
    """All trials: `config` with one value for each name of `grid`, or drawn from `ranges`, and a
    seed of its own.
    """

    config: Config
    grid: dict[str, list[Value]] = field(default_factory=dict)
    ranges: dict[str, Range] = field(default_factory=dict)
    seeds: int = 1
    sampler: str = "grid"
    trials: int | None = None
    metric: str | None = None
    pruner: str = "none"

    @property
    def total(self) -> int:
        """How many trials there are."""
        return (
            self.trials
            if self.trials is not None
            else math.prod(map(len, self.grid.values())) * self.seeds
        )

    def point(self, number: int) -> dict[str, Value]:
        """The combination of the grid that trial `number` has: all of them with one seed, then with
        the next.
        """
        point = {}
        for name, values in reversed(self.grid.items()):
            number, place = divmod(number, len(values))
            point[name] = values[place]
        return {name: point[name] for name in self.grid}

    def seed(self, number: int) -> int:
        """A sampler's trials share the first seed: what differs is then the settings' doing."""
        return self.config.seed + (
            number // math.prod(map(len, self.grid.values())) if self.sampler == "grid" else 0
        )

    def trial_config(self, point: Mapping[str, Value], seed: int) -> Config:
        """The settings of a trial; a name of `point` is a setting's, or else one of the task's
        fields.
        """
        settings: dict[str, Any] = {
            name: value for name, value in point.items() if is_setting(name)
        }
        fields = {name: value for name, value in point.items() if not is_setting(name)}
        return dataclasses.replace(
            self.config, **settings, fields=self.config.fields | fields, seed=seed
        )

    def identity(self) -> dict[str, Any]:
        """What a sweep that goes on must share with the one that was begun, as primitives: all but
        how far it goes.
        """
        # left out, so that a setting that is new tomorrow renames no sweep of today
        usual = dataclasses.asdict(Config())
        config = {
            name: value
            for name, value in dataclasses.asdict(self.config).items()
            if name == "task" or (value != usual[name] and name not in FREE_AT_RESUME)
        }
        whole = dataclasses.asdict(dataclasses.replace(self, seeds=1, trials=None)) | {
            "config": config
        }
        shared: dict[str, Any] = json.loads(json.dumps(whole))
        return shared

    def fingerprint(self) -> str:
        """Eight hex digits that differ when anything but the number of trials does: names a sweep's
        folder.
        """
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:8]


def from_identity(stored: Mapping[str, Any]) -> Sweep:
    """The sweep, of one seed, that `identity` described."""
    ranges = {name: Range(**drawn) for name, drawn in stored["ranges"].items()}
    return Sweep(**{**stored, "config": Config(**stored["config"]), "ranges": ranges})


def is_setting(name: str) -> bool:
    """Whether `name` is one of Config's own, and no field of a task."""
    return name in Config.__dataclass_fields__ and name not in ("task", "fields", "seed")


def parse_grid(text: str) -> tuple[str, list[str]]:
    """(name, values) of `--grid width=4,8,16`.

    Raises:
        WrongUse: another form, or the same value twice.
    """
    name, equals, rest = text.partition("=")
    values = rest.split(",")
    if not (name and equals and all(values)):
        raise WrongUse(f"--grid {text}: write NAME=VALUE,VALUE, as in --grid width=4,8,16")
    return name, values


def parse_range(text: str) -> tuple[str, str, str, bool]:
    """(name, low end, high end, on a logarithmic scale) of `--range lr=1e-4:1e-1:log`.

    Raises:
        WrongUse: another form.
    """
    name, equals, rest = text.partition("=")
    low, _, rest = rest.partition(":")
    high, _, kind = rest.partition(":")
    if not (name and equals and low and high) or kind not in ("", "log"):
        raise WrongUse(
            f"--range {text}: write NAME=LOW:HIGH or NAME=LOW:HIGH:log, as in --range "
            "lr=1e-4:1e-1:log"
        )
    return name, low, high, kind == "log"


def choices(text: str, values: list[Value]) -> list[Value]:
    """The converted values of a --grid; raises WrongUse if one stands there twice."""
    if len({repr(value) for value in values}) < len(values):
        raise WrongUse(
            f"--grid {text}: a value stands there twice, and each combination is trained "
            "once: name each once"
        )
    return values


def between(text: str, low: Value, high: Value, log: bool) -> Range:
    """The range between two converted ends; raises WrongUse if there is nothing between them, or
    they are no numbers.
    """
    if isinstance(low, bool | str) or isinstance(high, bool | str):
        raise WrongUse(f"--range {text}: only numbers lie in a range; for a choice use --grid")
    if not (math.isfinite(low) and math.isfinite(high) and low < high) or (log and low <= 0):
        raise WrongUse(
            f"--range {text}: the low end must be below the high one{', and above 0' * log}"
        )
    return Range(low, high, log)


def check(sweep: Sweep) -> None:
    """Raise WrongUse for choices that contradict each other."""
    if both := sweep.grid.keys() & sweep.ranges.keys():
        raise WrongUse(f"{sorted(both)[0]} stands in --grid and in --range: drop one")
    if sweep.metric is not None:
        split_metric(sweep.metric, "--metric")
    if sweep.sampler == "grid":
        if sweep.ranges or sweep.trials is not None:
            raise WrongUse(
                "--range and --trials are for --sampler random or tpe; the grid has its "
                "own number of trials"
            )
        if sweep.pruner != "none" and sweep.metric is None:
            raise WrongUse(
                f"--pruner {sweep.pruner} compares trials: say by what, as in --metric max:accuracy"
            )
        return
    if sweep.seeds > 1:
        raise WrongUse(
            f"--seeds repeats the points of a grid; --sampler {sweep.sampler} takes --trials N"
        )
    if sweep.trials is None or sweep.metric is None or not (sweep.grid or sweep.ranges):
        raise WrongUse(
            f"--sampler {sweep.sampler} needs --trials N, --metric NAME and something to "
            "draw: --range lr=1e-4:1e-1:log, or "
            "--grid width=4,8,16 for a choice"
        )
