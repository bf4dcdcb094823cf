"""The types of options. The messages of click for a wrong value are replaced by ours."""

import math
import os
import re
from pathlib import Path
from typing import Any

import click

from trainbox.files.parsing import parse_whole


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
            several = ": write one number, with a point; several are for `trainbox sweep --grid`"
            self.fail(
                f"{value!r} is not a number{several if ',' in str(value) else ''}", param, ctx
            )
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

    name = "N"

    def __init__(self, low: int, high: int = 2**53) -> None:
        self.low, self.high = low, high

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = parse_whole(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a whole number{_as_whole(str(value))}", param, ctx)
        except OverflowError as error:
            self.fail(f"{value}: {error}", param, ctx)
        if number < self.low:
            self.fail(f"{value} is less than {self.low}", param, ctx)
        if number > self.high:
            self.fail(f"{value} is more than {self.high}", param, ctx)
        return number


def _as_whole(text: str) -> str:
    """Return the cure for a whole number in another notation, such as 1e3 or 1,000, or ""."""
    try:
        number = float(text.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+", text) else text)
    except ValueError:
        return ": write one number" if re.fullmatch(r"\d+(,\d+)+", text) else ""
    return f": write {int(number)}" if number.is_integer() and abs(number) < 2**53 else ""


class ResumeMode(click.Choice[str]):
    """How a run resumes. Other programs have `--resume RUN`, so other values get this message."""

    def __init__(self) -> None:
        super().__init__(["auto", "never", "anyway"])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            self.fail(
                f"{value!r} is neither auto, never nor anyway: leave out --resume, because the "
                "command that started a run resumes it; --init RUN starts a new run from the "
                "weights of another run",
                param,
                ctx,
            )
        return str(value)


class GpuCount(click.ParamType[int | str]):
    """A number of GPUs, or `all`."""

    name = "N|all"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self.name

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        if value == "all" or isinstance(value, int):
            return "all" if value == "all" else int(value)
        if not (value.isascii() and value.isdigit()):
            cure = "write a number"
            if value == "-1":
                cure = "write all"
            elif whole := re.fullmatch(r"(\d+)\.0*", value):
                cure = f"write {whole[1]}"
            elif any(map(str.isdigit, value)) and not re.fullmatch(r"\d*\.\d+", value):
                named = ",".join(part.rpartition(":")[2].strip() for part in value.split(","))
                cure = f"to name GPUs use --gpu-ids {named}"
            self.fail(
                f"{value!r} is neither a number of GPUs nor `all`: {cure}",
                param,
                ctx,
            )
        return Whole(0).convert(value, param, ctx)


class Numbers(click.ParamType[tuple[int, ...]]):
    """A list of different whole numbers from `low` to `high`, as in 1,2,4. Returned in order."""

    name = "N,N,..."

    def __init__(self, low: int, high: int = 2**53) -> None:
        self.low, self.high = low, high

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        texts = value.split(",")
        if not all(text.isascii() and text.isdigit() for text in texts):
            self.fail(
                f"{value!r} is not a list of whole numbers from {self.low}, such as "
                f"{self.low},{2 * self.low + 2}",
                param,
                ctx,
            )
        numbers = [Whole(self.low, self.high).convert(text, param, ctx) for text in texts]
        if len(set(numbers)) < len(numbers):
            self.fail(f"{value!r} repeats a number: give each number once", param, ctx)
        return tuple(sorted(numbers))


class NamedPath(click.Path):
    """A path, whose `name` is shown in the help."""

    def __init__(self, name: str, readable: bool = True, file_okay: bool = True) -> None:
        super().__init__(path_type=Path, readable=readable, file_okay=file_okay)
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        # A shell does not expand the `~` of `--runs-dir=~/runs`, nor does a file of settings.
        return super().convert(os.path.expanduser(value), param, ctx)  # noqa: PTH111 - never raises
