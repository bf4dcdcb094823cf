"""The options of `sweep` and `sweep run`."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from trainbox.contract.config import Config
from trainbox.contract.errors import WrongUse
from trainer.cli.invocation import check_run_name
from trainer.cli.parameters import COUNT, SWEEP, Number, Whole, add_options, make_option
from trainer.sweep import grid
from trainer.sweep.retries import TrialLimits
from trainer.sweep.script import Script
from trainer.sweep.work import Work
from trainer.system.signals import StopRequest


@dataclass(frozen=True)
class SweepOptions:
    """The values of the options, by their names."""

    grids: tuple[str, ...]
    ranges: tuple[str, ...]
    seeds: int
    sampler: str
    trials: int | None
    metric: str | None
    pruner: str
    retries: int
    retry_failed: bool
    trial_minutes: float | None
    name: str | None
    storage: str | None
    worker: bool

    def sweep_of(
        self,
        config: Config | Script,
        values_of: Callable[[str], tuple[str, list[grid.Value]]],
        range_of: Callable[[str], tuple[str, grid.Range]],
    ) -> grid.Sweep:
        """Return the sweep over `config`, whose --grid and --range these functions parse.

        Raises:
            WrongUse: an option is malformed, or options contradict each other.
        """
        check_run_name(self.name, "--name")
        given = config.fields if isinstance(config, Config) else ()
        requested = grid.Sweep(
            config,
            _once("--grid", [values_of(text) for text in self.grids], given),
            _once("--range", [range_of(text) for text in self.ranges], given),
            self.seeds,
            self.sampler,
            self.trials,
            self.metric,
            self.pruner,
        )
        grid.check(requested)
        return requested

    def run(
        self, sweep: grid.Sweep, work: Work, runs_dir: Path, limits: TrialLimits, stop: StopRequest
    ) -> None:
        """Train the trials. It raises what `run_sweep` does."""
        from trainer.sweep.session import run_sweep  # imports Optuna

        run_sweep(
            sweep,
            work,
            runs_dir,
            self.name,
            self.storage,
            limits,
            self.retry_failed,
            self.worker,
            stop,
        )


def sweep_options(what: str, values: str) -> Callable[[Any], Any]:
    """Return a decorator that adds the options, and passes their values as `chosen`.

    The help calls what is swept `what`, and what a --grid names `values`.
    """

    def decorate(command: Any) -> Any:
        @functools.wraps(command)
        def with_values(**given: Any) -> Any:
            names = [field.name for field in dataclasses.fields(SweepOptions)]
            chosen = SweepOptions(**{name: given.pop(name) for name in names})
            return command(chosen=chosen, **given)

        return add_options(*_options(what, values))(with_values)

    return decorate


def _options(what: str, values: str) -> list[Any]:
    return [
        make_option(
            "--seeds",
            section=SWEEP,
            everyday=True,
            type=COUNT,
            metavar="N",
            default=1,
            help="Trials of each combination, with seeds from --seed on. Default: 1.",
        ),
        make_option(
            "--grid",
            "grids",
            section=SWEEP,
            everyday=True,
            multiple=True,
            metavar="NAME=A,B,C",
            help=f"Values of {values}; repeatable.",
        ),
        make_option(
            "--range",
            "ranges",
            section=SWEEP,
            everyday=True,
            multiple=True,
            metavar="NAME=LOW:HIGH[:log]",
            help="Range that a sampler draws from; repeatable.",
        ),
        make_option(
            "--sampler",
            section=SWEEP,
            everyday=True,
            type=click.Choice(["grid", "random", "tpe"]),
            default="grid",
            help="Default: grid, which trains all combinations.",
        ),
        make_option(
            "--trials",
            section=SWEEP,
            everyday=True,
            type=COUNT,
            metavar="N",
            help="Number of trials that a sampler draws.",
        ),
        make_option(
            "--metric",
            section=SWEEP,
            everyday=True,
            metavar="METRIC",
            help="Metric that ranks the trials: accuracy, min:loss.",
        ),
        make_option(
            "--pruner",
            section=SWEEP,
            everyday=True,
            type=click.Choice(["none", "median"]),
            default="none",
            help="median: stop trials that are worse than the median. Default: none.",
        ),
        make_option(
            "--retries",
            section=SWEEP,
            type=Whole(0),
            metavar="N",
            default=1,
            help="Retries of a failed trial, on another GPU. Default: 1.",
        ),
        make_option(
            "--retry-failed",
            section=SWEEP,
            is_flag=True,
            help="Train trials again that failed after all retries.",
        ),
        make_option(
            "--trial-minutes",
            section=SWEEP,
            everyday=True,
            type=Number(0),
            metavar="N",
            help="Stop a trial that takes longer, as failed. Default: no limit.",
        ),
        make_option(
            "--name",
            section=SWEEP,
            everyday=True,
            metavar="NAME",
            help=f"The sweep's folder in --runs-dir. Default: the {what} and a digest.",
        ),
        make_option(
            "--storage",
            section=SWEEP,
            metavar="URL",
            help="Database of the study. Default: a journal in the sweep's folder.",
        ),
        make_option(
            "--worker",
            section=SWEEP,
            is_flag=True,
            help="Join the sweep of another machine: wait for it, and print no table.",
        ),
    ]


_T = TypeVar("_T")


def _once(
    option: str, named: Sequence[tuple[str, _T]], fields: Collection[str] = ()
) -> dict[str, _T]:
    """Return `named` as a mapping.

    Raises:
        WrongUse: A name is given twice, or is also in `fields`, which --set has given.
    """
    for number, (name, _) in enumerate(named):
        if name in dict(named[:number]) or name in fields:
            raise WrongUse(f"{option} {name}=...: {name} is given twice: drop one of the two")
    return dict(named)
