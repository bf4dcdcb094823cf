"""The cases that `trainbox bench` measures, and their figures. Pure."""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trainbox.errors import WrongUse

_FOREVER = "1000000000"


@dataclass(frozen=True)
class BenchCase:
    """A training on `count` GPUs or CPU processes.

    `batch_size` is global. If `batch_size` or `workers` is None, the task's own value is used.
    """

    count: int
    strategy: str
    batch_size: int | None
    workers: int | None


@dataclass(frozen=True)
class Line:
    """A line of a table: a case, and the case that it is compared with."""

    scaling: str
    case: BenchCase
    base: BenchCase


@dataclass(frozen=True)
class Measured:
    """The figures that a training wrote to measured.json.

    Lists are by process (times) or by GPU (memory).
    """

    samples_per_second: float
    steps: int
    seconds: float
    data_seconds: Sequence[float]
    exchange_seconds: Sequence[float] | None
    memory_mib: Sequence[float]
    device: str
    batch_size: int
    accumulation: int
    workers: int
    threads: int
    precision: str
    examples: int


@dataclass
class BenchResult:
    """The figures of a case by round, and the reason of its failure."""

    rounds: dict[int, Measured] = field(default_factory=dict)
    failure: str | None = None
    exit_code: int = 0


@dataclass(frozen=True)
class Spread:
    """The median and the range of a figure over the rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """A line with its figures; None for each figure that was not measured.

    Shares are fractions of the time, as means over the processes.
    """

    line: Line
    failure: str | None
    samples_per_second: Spread | None = None
    epoch_s: float | None = None
    speed_up: Spread | None = None
    efficiency: float | None = None
    data_share: float | None = None
    exchange_share: float | None = None
    memory_mib: tuple[float, ...] = ()
    accumulation: int = 1
    workers: int | None = None
    batch_size: int | None = None
    arithmetic: str = ""


def describe(case: BenchCase, unit: str) -> str:
    """Return a short description of a case."""
    plural = "" if case.count == 1 else "s" if unit == "GPU" else "es"
    batch = "" if case.batch_size is None else f", batch {case.batch_size}"
    workers = "" if case.workers is None else f", {case.workers} workers"
    return f"{case.count} {unit}{plural} {case.strategy}{batch}{workers}"


def doubling(most: int) -> tuple[int, ...]:
    """Return the powers of two below `most`, and `most`."""
    return tuple(sorted({*(1 << power for power in range(most.bit_length())), most}))


def choose_counts(
    counts: tuple[int, ...] | None, processes: tuple[int, ...] | None, gpus: int, cpus: int
) -> tuple[bool, tuple[int, ...]]:
    """Return whether the bench runs on the CPU, and the numbers of GPUs or processes.

    It may use `gpus` GPUs and `cpus` CPUs.

    Raises:
        WrongUse: it cannot run on the CPU and on GPUs.
    """
    if not gpus:
        return True, processes or doubling(min(4, cpus))
    if counts and 0 in counts:
        raise WrongUse("--gpus 0 is the CPU: measure it by itself")
    return False, counts or doubling(gpus)


def lines(
    counts: Sequence[int],
    strategies: Sequence[str],
    batch_sizes: Sequence[int | None],
    workers: Sequence[int | None],
) -> list[Line]:
    """Return the lines of all tables.

    With several counts, these are a table of strong scaling and, for each given batch size, one of
    weak scaling. With one count, there is one table without scaling.
    """
    found = []
    scalings = ["strong", "weak"] if len(counts) > 1 else [""]
    for scaling, batch_size, loaders in itertools.product(scalings, batch_sizes, workers):
        if scaling == "weak" and batch_size is None:
            continue
        for count, strategy in itertools.product(counts, strategies):
            one, base = (
                BenchCase(
                    n,
                    strategy if n > 1 else "single",
                    batch_size and batch_size * (n if scaling == "weak" else 1),
                    loaders,
                )
                for n in (count, counts[0])
            )
            found.append(Line(scaling, one, base))
    return list(dict.fromkeys(found))


def cases(table: Iterable[Line]) -> list[BenchCase]:
    """Return each case once. A case may be in several tables."""
    return list(dict.fromkeys(line.case for line in table))


def measurement_order(cases_: Sequence[BenchCase], rounds: int) -> list[tuple[int, BenchCase]]:
    """Return (round, case) in the order of measurement.

    Every second round is in reverse order. If the machine slows down, all cases slow down alike.
    """
    return [(n, case) for n in range(rounds) for case in (cases_[::-1] if n % 2 else cases_)]


def check_strategies(text: str, cpu: bool) -> tuple[str, ...]:
    """Return the strategies in `text`, for example `dp,ddp`.

    Raises:
        WrongUse: a strategy is unknown or not possible on the CPU.
    """
    named = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in named if name not in ("ddp", "dp")]:
        raise WrongUse(
            f"--strategies {text}: unknown strategy {unknown[0]!r}: give ddp, dp or both"
        )
    if cpu and "dp" in named:
        raise WrongUse(
            f"--strategies {text}: dp splits batches over GPUs, and the CPU is measured: drop dp"
        )
    return named


def own_defaults(given: Mapping[str, object], cpu: bool, threads: int) -> list[str]:
    """Return the bench's own defaults as arguments, except for the settings that are `given`."""
    # A batch that does not fit fails. Splitting it would change what is measured.
    defaults = {"accumulation": 1} | ({"threads": threads} if cpu else {})
    found = [f"--{name}={value}" for name, value in defaults.items() if given[name] is None]
    # Only a rehearsal can show that steps may be captured.
    return found if given["capture"] == "auto" else [*found, "--no-rehearsal"]


def training_arguments(
    case: BenchCase, arguments: Sequence[str], cpu: bool, runs_dir: str, seconds: float
) -> list[str]:
    """Return the arguments of `trainbox train` for a case.

    `arguments` are shared by all cases, with the task first.
    """
    device = {"--device": "cpu", "--processes": case.count} if cpu else {"--gpus": case.count}
    options = device | {
        "--batch-size": case.batch_size,
        "--workers": case.workers,
        "--strategy": case.strategy if case.count > 1 else None,
        "--max-steps": _FOREVER,
        "--eval-every": _FOREVER,
        "--checkpoint-minutes": _FOREVER,
        "--measure-seconds": f"{seconds:g}",
        "--runs-dir": runs_dir,
        "--run": "case",
        "--nnodes": 1,
    }
    given = [(name, str(value)) for name, value in options.items() if value is not None]
    return [*arguments, *itertools.chain.from_iterable(given)]


def rows(table: Iterable[Line], outcomes: Mapping[BenchCase, BenchResult]) -> list[Row]:
    """Return the lines with their figures.

    Figures are medians over the rounds. A speed-up compares a case with its base in the same round.
    """
    return [
        _row(line, outcomes.get(line.case, BenchResult()), outcomes.get(line.base, BenchResult()))
        for line in table
    ]


def _row(line: Line, outcome: BenchResult, base: BenchResult) -> Row:
    measured = list(outcome.rounds.values())
    if outcome.failure or not measured:
        return Row(line, outcome.failure or "not measured")
    speed = Spread.of([one.samples_per_second for one in measured])
    up = ratio(outcome, base) if line.scaling and not base.failure else None
    return Row(
        line,
        None,
        samples_per_second=speed,
        epoch_s=measured[0].examples / speed.median,
        speed_up=up,
        efficiency=None if up is None else up.median * line.base.count / line.case.count,
        data_share=waiting_share(measured, "data_seconds"),
        exchange_share=waiting_share(measured, "exchange_seconds"),
        memory_mib=tuple(map(max, zip(*(one.memory_mib for one in measured), strict=True))),
        accumulation=measured[0].accumulation,
        workers=measured[0].workers,
        batch_size=measured[0].batch_size,
        arithmetic=f"{measured[0].precision}, {measured[0].threads} CPU thread(s) a process",
    )


def ratio(outcome: BenchResult, against: BenchResult) -> Spread | None:
    """Return the ratio of the samples/s in the rounds that have both cases, or None."""
    both = outcome.rounds.keys() & against.rounds.keys()
    ratios = [
        outcome.rounds[n].samples_per_second / against.rounds[n].samples_per_second for n in both
    ]
    return Spread.of(ratios) if ratios else None


def waiting_share(measured: Iterable[Measured], name: str) -> float | None:
    """Return the fraction of the time that processes spend in `name`; None if not measured.

    This is the mean over the processes and the median over the rounds.
    """
    shares = [
        statistics.fmean(waits) / one.seconds
        for one in measured
        if (waits := getattr(one, name)) is not None
    ]
    return statistics.median(shares) if shares else None
