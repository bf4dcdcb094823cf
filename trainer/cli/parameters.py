"""Define the types of options, and how an option is made."""

import math
from collections.abc import Callable
from typing import Any

import click

from trainbox.contract.environment import PREFIX


class Number(click.ParamType[float]):
    """A finite number above `low`, or from `low` if not `open_low`, and up to `high`.

    The ranges of click accept NaN.
    """

    name = "number"

    def __init__(self, low: float, open_low: bool = True, high: float = math.inf) -> None:
        self.low, self.open_low, self.high = low, open_low, high

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            self.fail(f"{value!r} is not a number", param, ctx)
        if not math.isfinite(number) or number < self.low or (self.open_low and number == self.low):
            self.fail(
                f"{value} is not a finite number {'above' if self.open_low else 'from'} "
                f"{self.low:g}",
                param,
                ctx,
            )
        if number > self.high:
            self.fail(f"{value} is more than {self.high:g}", param, ctx)
        return number


class Whole(click.ParamType[int]):
    """A whole number from `low` to `high`, by default the largest that a float counts exactly."""

    name = "whole number"

    def __init__(self, low: int, high: int = 2**53) -> None:
        self.low, self.high = low, high

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a whole number", param, ctx)
        if not self.low <= number <= self.high:
            self.fail(f"{value} is not a whole number from {self.low} to {self.high}", param, ctx)
        return number


COUNT = Whole(1)


class Option(click.Option):
    """An option with its section of the help page.

    `--help` shows the everyday options, and `--help-all` shows all options in sections.
    """

    def __init__(
        self, *names: Any, section: str = "", everyday: bool = False, **attributes: Any
    ) -> None:
        super().__init__(*names, **attributes)
        self.section, self.everyday = section, everyday


TRAINING, BATCH, BITS = "Training", "Batch", "Same bits"
VALIDATION, STORAGE, SWEEP = "Validation", "Storage", "Sweep"


def make_option(*names: str, **attributes: Any) -> Any:
    """Return an option with its environment name: `--batch-size` is TRAINBOX_BATCH_SIZE."""
    variable = PREFIX + names[0].split("/")[0].lstrip("-").replace("-", "_").upper()
    envvar = [*attributes.pop("also", []), variable]
    return click.option(*names, cls=Option, envvar=envvar, **attributes)


def add_options(*options: Any) -> Callable[[Any], Any]:
    """Return a decorator that adds `options` to a command, in the order of its help."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
