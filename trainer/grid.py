"""What a sweep consists of: its trials' settings, by their numbers. Pure, and no torch here."""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.config import Config
from trainer.errors import WrongUse

Value = str | int | float | bool


@dataclass(frozen=True)
class Range:
    """Where a sampler may draw a setting from; whole numbers if both ends are."""

    low: int | float
    high: int | float
    log: bool = False


@dataclass(frozen=True)
class Sweep:
    """All trials: `config` with one value for each name of `grid`, or drawn from `ranges`, and a seed of its own."""

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
        return self.trials if self.trials is not None else math.prod(map(len, self.grid.values())) * self.seeds

    def point(self, number: int) -> dict[str, Value]:
        """The combination of the grid that trial `number` has: all of them with one seed, then with the next."""
        points = list(itertools.product(*self.grid.values()))
        return dict(zip(self.grid, points[number % len(points)], strict=True))

    def seed(self, number: int) -> int:
        """A sampler's trials share the first seed: what differs is then the settings' doing."""
        return self.config.seed + (number // math.prod(map(len, self.grid.values())) if self.sampler == "grid" else 0)

    def trial_config(self, point: Mapping[str, Value], seed: int) -> Config:
        """The settings of a trial; a name of `point` is a setting's, or else one of the task's fields."""
        settings: dict[str, Any] = {name: value for name, value in point.items() if is_setting(name)}
        fields = {name: value for name, value in point.items() if not is_setting(name)}
        return dataclasses.replace(self.config, **settings, fields=self.config.fields | fields, seed=seed)

    def identity(self) -> dict[str, Any]:
        """What a sweep that goes on must share with the one that was begun, as primitives: all but how far it goes."""
        shared: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(dataclasses.replace(self, seeds=1, trials=None))))
        return shared

    def fingerprint(self) -> str:
        """Eight hex digits that differ when anything but the number of trials does: names a sweep's folder."""
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
    if len(set(values)) < len(values):
        raise WrongUse(f"--grid {text}: a value stands there twice, and each combination is trained once: name each once")
    return name, values


def parse_range(text: str) -> tuple[str, Range]:
    """(name, range) of `--range lr=1e-4:1e-1:log`.

    Raises:
        WrongUse: another form, or nothing between the ends.
    """
    name, equals, rest = text.partition("=")
    low, _, rest = rest.partition(":")
    high, _, kind = rest.partition(":")
    try:
        ends = [int(end) if end.lstrip("-").isdecimal() else float(end) for end in (low, high)]
    except ValueError:
        ends = []
    if not (name and equals and ends) or kind not in ("", "log"):
        raise WrongUse(f"--range {text}: write NAME=LOW:HIGH or NAME=LOW:HIGH:log, as in --range lr=1e-4:1e-1:log")
    if not (math.isfinite(ends[0]) and math.isfinite(ends[1]) and ends[0] < ends[1]) or (kind == "log" and ends[0] <= 0):
        raise WrongUse(f"--range {text}: the low end must be below the high one{', and above 0' * (kind == 'log')}")
    return name, Range(ends[0], ends[1], kind == "log")


def check(sweep: Sweep) -> None:
    """Raise WrongUse for choices that contradict each other."""
    if both := sweep.grid.keys() & sweep.ranges.keys():
        raise WrongUse(f"{sorted(both)[0]} stands in --grid and in --range: drop one")
    if sweep.sampler == "grid":
        if sweep.ranges or sweep.trials is not None:
            raise WrongUse("--range and --trials are for --sampler random or tpe; the grid has its own number of trials")
        if sweep.pruner != "none" and sweep.metric is None:
            raise WrongUse(f"--pruner {sweep.pruner} compares trials: say by what, as in --metric max:accuracy")
        return
    if sweep.seeds > 1:
        raise WrongUse(f"--seeds repeats the points of a grid; --sampler {sweep.sampler} takes --trials N")
    if sweep.trials is None or sweep.metric is None or not (sweep.grid or sweep.ranges):
        raise WrongUse(
            f"--sampler {sweep.sampler} needs --trials N, --metric NAME and something to draw: --range lr=1e-4:1e-1:log, or "
            "--grid width=4,8,16 for a choice"
        )
