"""What a mistyped command line was meant to be."""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

import click

from trainbox.commands import habits
from trainbox.disclosure.suggested_commands import command as command_line
from trainbox.disclosure.suggested_commands import nearest
from trainbox.options.table import KEYS_OF_SWEEP, options
from trainbox.task_names.task_spec import is_task

_A_GPU = re.compile(r"(?:(?:cuda|gpu):?)?(\d+)")
_SIMILAR = 0.75  # --epoch and --epochs; --width and --init are not


def unknown_option(option: str, words: Sequence[str], command: click.Command) -> tuple[str, bool]:
    """Return the problem of an option that the command does not have, and whether it has a cure.

    Args:
        option: the option as click names it, which is `-l` for `-lr`.
        words: the command line.
        command: the command that does not have the option; it proposes no hidden options.
    """
    # click reads `-lr` as the switches -l and -r, and `-help` as -h, -e, -l and -p.
    whole = next((word for word in words if word.startswith(option) and word[1] != "-"), option)
    whole = "-help" if "-help" in words else whole
    if cure := _cure(whole.partition("=")[0].strip("-").replace("_", "-"), command):
        return f"no such option {whole} ({cure})", True
    return f"no such option {whole}", False


def _cure(name: str, command: click.Command) -> str:
    """Return what an unknown option with this name may mean, or ""."""
    if any(param.name == name for param in command.params if isinstance(param, click.Argument)):
        return "write its value alone"
    name = name.rpartition(".")[2]  # --trainer.max_epochs
    of_verb = habits.OF_VERBS.get(command.name or "", {})
    if cure := of_verb.get(name, of_verb.get(name.lower(), "")):
        return cure
    import difflib

    names = dict(_names(command))
    here = habits.LETTERS.get(name, habits.OPTIONS.get(name.lower(), ""))
    if here and here.split()[0] in names.values():
        return f"here: {here}"
    near = difflib.get_close_matches(name, [*names, "help"], n=1, cutoff=_SIMILAR)
    return f"did you mean {names.get(near[0], '--help')}?" if near else ""


def option_of_torchrun(option: str) -> str:
    """Return the cure for an option of torchrun that `trainbox run` does not have, or ""."""
    name = option.strip("-").replace("_", "-")
    return f"leave out {option}: {cure}" if (cure := habits.OF_TORCHRUN.get(name, "")) else ""


def option_before_verb(option: str, words: Sequence[str], ctx: click.Context) -> str:
    """Return the problem of an option that is before the verb, with the whole command line.

    Args:
        option: the option, which `trainbox` itself does not have.
        words: the command line without the program.
        ctx: the context of `trainbox`.
    """
    problem, has_cure = unknown_option(option, words, ctx.command)
    if has_cure:
        return problem
    assert isinstance(ctx.command, click.Group)
    verbs = ctx.command.list_commands(ctx)
    at = next((place for place, word in enumerate(words) if word in verbs), None)
    verb = "train" if at is None else words[at]
    others = words if at is None else [*words[:at], *words[at + 1 :]]
    if not _is_known(option) and all(word.startswith("-") for word in words):
        return f"{problem}: `{command_line('--help')}` lists the verbs"
    return f"options come after the verb: `{_line(verb, others)}`"


def _is_known(option: str) -> bool:
    """Return whether an option is one of `train`, of `run` or of another program."""
    name = option.strip("-").replace("_", "-").lower()
    flags = {
        flag for verb in ("train", "run") for row in options(verb) for flag in row.flags.split()
    }
    return f"--{name}" in flags or name in habits.OPTIONS or name in habits.OF_TORCHRUN


def _line(verb: str, words: Sequence[str]) -> str:
    """Return the command line of a verb with these words; `train` with a script becomes `run`.

    What follows a script follows `--`.
    """
    at = next((place for place, word in enumerate(words) if word.endswith(".py")), len(words))
    if verb == "train" and at < len(words):
        verb = "run"
    end = at + 1 if verb == "run" else len(words)
    after = words[end:]
    dashes = ["--"] if after and after[0] != "--" else []
    return command_line(verb, shlex.join([*_translated(words[:end], verb), *dashes, *after]))


def _translated(words: Sequence[str], verb: str) -> list[str]:
    """Return the words, with the verb's options instead of options of other programs."""
    known = {name for row in options(verb) for name in row.flags.split()}
    left_out = habits.OF_TORCHRUN if verb == "run" else {}
    found: list[str] = []
    is_left_out = False
    for word in words:
        option, equals, value = word.partition("=")
        name = option.strip("-").replace("_", "-").lower()
        here = habits.OPTIONS.get(name, "").split()
        if not word.startswith("-"):
            found += [] if is_left_out and not word.endswith(".py") else [word]
            is_left_out = False
        elif not (is_left_out := name in left_out):
            found += [*here, *([value] if equals else [])] if {*here[:1]} & known else [word]
    return found


def as_a_field(option: str, words: Sequence[str]) -> str:
    """Return the `--set` of a field of a task that was written as an option."""
    value = next((word for word in words if word.startswith(f"{option}=")), "").partition("=")[2]
    if option in words[:-1]:
        value = words[words.index(option) + 1]
    shown = value if value and not value.startswith("-") else "VALUE"
    name = option.rpartition(".")[2].strip("-").replace("-", "_")
    return f"--set {name}={shown}"


def wrong_choice(value: str, choices: Sequence[str]) -> str:
    """Return a question with the choice that `value` may mean, or "" without one."""
    if (number := _A_GPU.fullmatch(value)) and "cuda" in choices:
        return f"to name a GPU use --gpu-ids {number[1]}"
    meant = habits.VALUES.get(value.lower(), value.lower())
    if meant in choices:
        return f"did you mean {meant}?"
    cure = nearest(value, choices, " ")
    return "" if cure == " " else cure


def unknown_verb(word: str, arguments: Sequence[str], verbs: Sequence[str]) -> str:
    """Return what a word that is neither a verb nor a program may mean.

    Args:
        word: the first word of the command line, and `arguments` the others.
        verbs: the verbs of Trainbox.
    """
    if sentence := habits.NO_VERBS.get(word):
        return sentence
    typed = [*arguments]
    if ".py:" in word or word.endswith(".py"):
        meant, typed = "train", [word, *typed]
    elif (meant := habits.VERBS.get(word, "")).startswith("--"):
        meant, typed = " ".join([*arguments[:1], meant]), []
    elif meant in ("runs", "clean"):  # these have no argument
        typed = []
    elif meant in ("evaluate", "predict", "export", "verify") and is_task("".join(typed[:1])):
        line = _line(meant, ["RUN", *typed[1:]])
        return f"did you mean `{line}`, with the folder of a run of {typed[0]}?"
    if not meant:
        return nearest(word, verbs, f"the verbs are {', '.join(verbs)}")
    line = _line(meant, typed) if meant in verbs else command_line(meant)
    return f"did you mean `{line}`?"


def extra_argument(extra: str, words: Sequence[str], command: click.Command) -> str:
    """Return the cure for one argument too many, or "" if it is not known."""
    extras = extra.split()
    if cure := _several(extras, words):
        return cure
    names = dict(_names(command))
    if extras[0].replace("_", "-") in names and len(extras) % 2 == 0:  # lr 0.1
        extras = [f"{name}={value}" for name, value in zip(extras[::2], extras[1::2], strict=True)]
    meant = [_meant(word, command, names) for word in extras]
    if all(meant):
        if meant[0].startswith("--set") and len(meant) == 1:
            return f"a field of the task is set by {meant[0]}"
        return f"did you mean {' '.join(meant)}?"
    if not has_fields(command):
        return _of_all_runs(extra, command) if "--runs-dir" in names.values() else ""
    if words.count(extra) > 1:
        return f"write {extra} once"
    return _of_task(extra, words[: words.index(extra)] if extra in words else words)


def _meant(word: str, command: click.Command, names: Mapping[str, str]) -> str:
    """Return the option that NAME=VALUE may mean, or ""."""
    name, equals, value = word.lstrip("+~").partition("=")
    name = name.rpartition(".")[2]  # optimizer.lr=0.1
    option = name.replace("_", "-")
    if not equals:
        return ""
    if "grid" in names and option not in {row.key for row in KEYS_OF_SWEEP}:
        return f"--grid {name}={value.strip('[]()')}"
    if option in names:
        return f"{names[option]} {value}"
    return f"--set {name}={value}" if has_fields(command) else ""


def _of_all_runs(extra: str, command: click.Command) -> str:
    """Return the cure for an argument of a command for all runs, or ""."""
    if command.name == "health" and re.fullmatch(r"(.*:)?\d+", extra):
        return f"did you mean --listen {extra if ':' in extra else f'127.0.0.1:{extra}'}?"
    # These never raise, also for a word that is no path.
    if os.path.isdir(extra) and not os.path.isfile(f"{extra}/config.json"):  # noqa: PTH112, PTH113
        return f"the folder of all runs is set by --runs-dir {extra}"
    return habits.OF_ONE_RUN.get(command.name or "", "")


def _of_task(extra: str, before: Sequence[str]) -> str:
    """Return the cure for a word after the task and other words `before`, or ""."""
    if ".py:" in extra:
        return f"one command is for one task: leave out {extra}"
    if before[-1].endswith(".py"):
        return f"did you mean {before[-1]}:{extra}?"
    if "/" in extra:
        folder = PurePath(extra)
        place = "" if str(folder.parent) == "data" else f"--data-dir {folder.parent} "
        listed = command_line("tasks", before[-1])
        return (
            f"a folder of data is set by {place}--set folder={folder.name} (`{listed}` lists the "
            "fields)"
        )
    if before[-2:-1] == ["--set"] and "=" not in before[-1]:
        return f"did you mean --set {before[-1]}={extra}?"
    return ""


def _several(extras: Sequence[str], words: Sequence[str]) -> str:
    """Return the cure for values of --grid or --set that are written with spaces, or ""."""
    at = words.index(extras[0]) if extras[0] in words else 0
    option, first = words[at - 2 : at] if at > 1 else ("", "")
    name, equals, value = first.partition("=")
    values = [text.strip(",[]()") for text in (value, *extras)]
    if option == "--grid" and not any("=" in text for text in extras):
        return f"write commas and no spaces, as in --grid {name}={','.join(filter(None, values))}"
    if option == "--set" and (extras[0] == "=" or (equals and not value)):
        return f"write no spaces, as in --set {name}={values[-1]}"
    return ""


def has_fields(command: click.Command) -> bool:
    """Return whether the command sets fields of a task."""
    return any("--set" in param.opts for param in command.params)


def _names(command: click.Command) -> Iterator[tuple[str, str]]:
    """Yield the names by which users may know an option, each with the option."""
    for param in command.params:
        if isinstance(param, click.Option) and not param.hidden:
            # `learning-rate` is the setting of --lr.
            yield (param.name or "").replace("_", "-"), param.opts[0]
            yield from ((option.strip("-"), option) for option in param.opts)
            yield from ((option.strip("-"), option) for option in param.secondary_opts)
