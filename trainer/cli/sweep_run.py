"""The command `sweep-run`, which the user types as `trainbox sweep run`."""

import contextlib
import os
import subprocess
from pathlib import Path

import click

from trainbox.contract.errors import WrongUse
from trainbox.contract.python_path import own_environment
from trainbox.contract.usage import usage_message
from trainer.cli.invocation import Verb, read_device, report_environment
from trainer.cli.option_help import help_options
from trainer.cli.options import RUNS_DIR, planned_options, seed_option
from trainer.cli.parameters import SWEEP, add_options
from trainer.cli.sweep_options import SweepOptions, sweep_options
from trainer.sweep import grid
from trainer.sweep.retries import TrialLimits
from trainer.sweep.script import Script, check_template
from trainer.sweep.work import plan_command, run_environment, script_work
from trainer.system.signals import StopRequest

_TEMPLATE = "template"
_EXAMPLE = "as in train.py --seeds 5 -- --seed {seed} --out {run}"


class _Templated(Verb):
    """A command that takes what follows `--` as the template of a script's arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[_TEMPLATE] = tuple(args[end + 1 :])
        try:
            return super().parse_args(ctx, args[:end])
        except click.UsageError as error:
            is_of_the_script = isinstance(error, click.NoSuchOption) or "extra" in error.message
            if end < len(args) or not is_of_the_script:
                raise
            wrong = usage_message(error)
            end_mark = "" if wrong.endswith((".", "?")) else "."
            raise WrongUse(
                f"{wrong}{end_mark} The arguments of the script follow --, {_EXAMPLE}"
            ) from error


@click.command("sweep-run", cls=_Templated)
@click.argument("script", required=False)
@click.option("-m", "--module", metavar="MODULE", help="Run a module instead of a file.")
@sweep_options("script", "{NAME} in ARGS")
@seed_option(SWEEP, "The first {seed}. Default: 0.")
@add_options(RUNS_DIR)
@planned_options
@help_options()
def sweep_run(
    script: str | None,
    module: str | None,
    chosen: SweepOptions,
    seed: int,
    runs_dir: Path,
    device: str,
    only_check: bool,
    device_on_stdin: bool,
) -> None:
    """Run SCRIPT once for each combination and seed, each on a GPU of its own."""
    device = read_device(device, device_on_stdin)
    if (script is None) == (module is None):
        raise WrongUse(f"sweep run needs one script, or -m MODULE: name it before --, {_EXAMPLE}")
    what = Script(
        script or module or "",
        module is not None,
        click.get_current_context().meta[_TEMPLATE],
        seed,
    )
    requested = chosen.sweep_of(what, _values, _range)
    check_template(what, requested.grid, requested.ranges, requested.seeds)
    if only_check:
        _check_script(what)
        report_environment()
        return
    stop = StopRequest.install()
    # A worker ends a trial that takes too long, so that the script can save.
    work, limits = script_work(requested, device, chosen.trial_minutes), TrialLimits(chosen.retries)
    chosen.run(requested, work, runs_dir, limits, stop)


def _check_script(what: Script) -> None:
    """Let `trainbox plan run` find the script. It reports what is wrong.

    Raises:
        Exit: the script is missing, or is not valid Python.
    """
    checked = subprocess.run(
        plan_command(what),
        env=own_environment(run_environment(os.environ)),
        stdout=subprocess.DEVNULL,
        check=False,
    )
    if checked.returncode:
        raise click.exceptions.Exit(checked.returncode)


def _values(text: str) -> tuple[str, list[grid.Value]]:
    """Return the name and the values of a --grid. The script gets the values as they are typed."""
    name, texts = grid.parse_grid(text)
    return name, grid.choices(text, list(texts))


def _range(text: str) -> tuple[str, grid.Range]:
    name, low, high, log = grid.parse_range(text)
    return name, grid.between(text, _number(low), _number(high), log)


def _number(text: str) -> grid.Value:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
