"""A user's own script as what a sweep trains: the template of its arguments. Pure."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from trainbox.errors import WrongUse
from trainbox.options.run_name import script_label

# A name in braces is a placeholder. In double braces, it stands for itself.
_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_][\w.-]*)\}\}|\{([A-Za-z_][\w.-]*)\}")
_AS_IN = r"write it as in 'accuracy: ([-+.\w]+)', or 'step (?P<step>\d+): loss ([-+.\w]+)'"


@dataclass(frozen=True)
class Script:
    """What to run, with the arguments of each trial as a template.

    Attributes:
        script: the path of the script, or the dotted name of a module.
        is_module: whether Python runs it with -m.
        template: the arguments, in which `{lr}` stands for a value of lr.
        seed: the seed of the first trials.
        torchrun: whether torchrun starts each trial.
        metric_regex: what finds the metric in the output; None if the script reports it.
        on_resume: arguments that the script gets too, once their files exist; also a template.
    """

    script: str
    is_module: bool
    template: tuple[str, ...]
    seed: int = 0
    torchrun: bool = False
    metric_regex: str | None = None
    on_resume: str | None = None

    @property
    def label(self) -> str:
        """Return the script's name for the name of a folder."""
        return script_label(self.script, self.is_module)

    def placeholders(self) -> set[str]:
        """Return the names that the template has in braces."""
        words = (*self.template, self.on_resume or "")
        found = (match for word in words for match in _PLACEHOLDER.finditer(word))
        return {match[2] for match in found if match[2]}

    def arguments(self, values: Mapping[str, object]) -> list[str]:
        """Return the arguments with `values`. `{run}` stays, as `trainbox run` replaces it."""
        return self._replaced(self.template, values)

    def options(self, values: Mapping[str, object]) -> list[str]:
        """Return the options of `trainbox run` for a trial with `values`."""
        torchrun = ["--torchrun"] if self.torchrun else []
        if self.on_resume is None:
            return torchrun
        return [*torchrun, "--on-resume", *self._replaced([self.on_resume], values)]

    def _replaced(self, words: Sequence[str], values: Mapping[str, object]) -> list[str]:
        replaced = {name: str(value) for name, value in values.items()} | {"run": "{run}"}

        def text(match: re.Match[str]) -> str:
            return f"{{{match[1]}}}" if match[1] else replaced[match[2]]

        return [_PLACEHOLDER.sub(text, word) for word in words]


def check_regex(pattern: str, goal: tuple[str, str] | None) -> None:
    """Check a --metric-regex for the metric `goal`.

    Raises:
        WrongUse: the pattern is not valid, or its number has no name.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise WrongUse(f"--metric-regex {pattern}: {error}: {_AS_IN}") from error
    if compiled.groups - len(compiled.groupindex.keys() & {"step"}) != 1:
        raise WrongUse(
            f"--metric-regex {pattern} must have one group, which is the number: write other "
            f"parentheses as (?:...), and {_AS_IN}"
        )
    if goal is None:
        raise WrongUse(
            f"--metric-regex {pattern}: the number has no name: add --metric, as in --metric "
            "max:accuracy"
        )


def check_template(
    script: Script, grid: Collection[str], ranges: Collection[str], seeds: int
) -> None:
    """Check that each placeholder has values, and that all values are used.

    Raises:
        WrongUse: a placeholder has no values, or the template does not use values.
    """
    used, swept = script.placeholders(), [*grid, *ranges]
    for name in ("seed", "run"):
        if name in swept:
            meaning = {"seed": "a seed of --seeds", "run": "the trial's folder"}[name]
            option = "--grid" if name in grid else "--range"
            raise WrongUse(f"{option} {name}=...: {{{name}}} is {meaning}: choose another name")
    for name in sorted(used - {"seed", "run", *swept}):
        raise WrongUse(
            f"{{{name}}} in the arguments after -- has no values: add --grid {name}=A,B,C, or "
            f"write {{{{{name}}}}} if the script gets the braces"
        )
    for option, names in (("--grid", grid), ("--range", ranges)):
        for name in names:
            if name not in used:
                raise WrongUse(
                    f"{option} {name}=...: {{{name}}} is missing in the arguments after --: add "
                    f"it, as in -- --{name} {{{name}}}"
                )
    if seeds > 1 and "seed" not in used:
        raise WrongUse(
            f"--seeds {seeds} would repeat the same command: add {{seed}} to the arguments after "
            "--, as in -- --seed {seed}"
        )


def not_reported(script: Script, goal: tuple[str, str] | None, metrics: Collection[str]) -> str:
    """Return why a trial has no result, and how its script can report the metric of `goal`.

    The script has reported `metrics`.
    """
    name = goal[1] if goal else "accuracy"
    report = f"print {json.dumps({'step': 100, name: 0.5})}, or write it for TensorBoard"
    if script.metric_regex is not None:
        return (
            f"no number in the output matches --metric-regex {script.metric_regex}: correct it, or "
            f"drop it and {report}"
        )
    others = f" (but {', '.join(sorted(metrics))})" if metrics else ""
    match = rf"{'' if goal else f'--metric {name} '}--metric-regex '{name}: ([-+.\w]+)'"
    none = "" if goal else "; if the trials have no metric, add --metric none"
    return (
        f"the script has reported no {name if goal else 'number'}{others}: {report}, or read it "
        f"from the output with {match}{none}"
    )
