"""What a mistyped command line was meant to be."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath

import click

from trainbox.disclosure.suggested_commands import command as command_line

# Options of other programs, and what they are here.
_ELSEWHERE = {
    **dict.fromkeys(
        ("num-train-epochs", "max-epochs", "n-epochs", "trainer.max-epochs"), "--epochs"
    ),
    **dict.fromkeys(("per-device-train-batch-size", "bs", "batch"), "--batch-size"),
    **dict.fromkeys(("gradient-accumulation-steps", "accumulate-grad-batches"), "--accumulation"),
    **dict.fromkeys(("bf16", "fp16", "amp", "mixed-precision"), "--precision"),
    **dict.fromkeys(("devices", "ngpus", "num-gpus"), "--gpus"),
    **dict.fromkeys(("nproc-per-node", "num-processes", "nproc"), "--processes"),
    **dict.fromkeys(("output-dir", "out-dir", "log-dir", "logdir"), "--runs-dir"),
    **dict.fromkeys(("name", "run-name", "exp-name"), "--run"),
    **dict.fromkeys(("data", "data-path", "dataset-dir"), "--data-dir"),
    **dict.fromkeys(("save-steps", "save-every"), "--checkpoint-steps"),
    **dict.fromkeys(("load", "pretrained", "checkpoint", "ckpt-path"), "--init"),
    **dict.fromkeys(("cpu", "no-cuda", "accelerator"), "--device"),
    "early-stopping-patience": "--patience",
    "gradient-clip-val": "--clip-norm",
    "max-grad-norm": "--clip-norm",
    "resume-from-checkpoint": "--resume",
    "format": "--to",
    "scheduler": "schedule() of the task",
    "momentum": "build_optimizer() of the task",
}
# The cures of options that one verb has in other programs.
_OF_VERBS: dict[str, dict[str, str]] = {
    "clean": {
        **dict.fromkeys(
            ("dry-run", "n"), "clean removes nothing until you answer yes or add --yes"
        ),
        **dict.fromkeys(("force", "f", "all"), "here: --yes"),
    },
    "export": {"onnx": "here: --to onnx"},
    "predict": dict.fromkeys(
        ("input", "inputs", "data", "source", "image", "images", "i"),
        "write the files after the run: predict RUN FILES",
    ),
    **dict.fromkeys(
        ("train", "run"),
        dict.fromkeys(("dry-run", "n"), "`trainbox plan` shows what would be launched"),
    ),
}
_SIMILAR = 0.75  # --epoch and --epochs; --width and --init are not


def unknown_option(option: str, words: Sequence[str], command: click.Command) -> tuple[str, bool]:
    """Return the problem of an option that the command does not have, and whether it has a cure.

    Args:
        option: the option as click names it, which is `-l` for `-lr`.
        words: the command line.
        command: the command that does not have the option; it proposes no hidden options.
    """
    # click reads `-lr` as the switches -l and -r.
    whole = next((word for word in words if word.startswith(option) and word[1] != "-"), option)
    name = whole.partition("=")[0].strip("-").replace("_", "-")
    if any(param.name == name for param in command.params if isinstance(param, click.Argument)):
        return f"no such option {whole} (write its value alone)", True
    if cure := _OF_VERBS.get(command.name or "", {}).get(name.lower()):
        return f"no such option {whole} ({cure})", True
    import difflib

    names = dict(_names(command))
    near = difflib.get_close_matches(name, names, n=1, cutoff=_SIMILAR)
    here = _ELSEWHERE.get(name.lower(), "")
    if here in names.values() or here.endswith("task"):
        return f"no such option {whole} (here: {here})", True
    if near:
        return f"no such option {whole} (did you mean {names[near[0]]}?)", True
    return f"no such option {whole}", False


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
    if at is None:
        is_script = any(word.endswith(".py") for word in words)
        verb, others = "run" if is_script else "train", words
    else:
        verb, others = words[at], [*words[:at], *words[at + 1 :]]
    return f"options come after the verb: `{command_line(verb, shlex.join(others))}`"


def as_a_field(option: str, words: Sequence[str]) -> str:
    """Return the `--set` of a field of a task that was written as an option."""
    value = next((word for word in words if word.startswith(f"{option}=")), "").partition("=")[2]
    if option in words[:-1]:
        value = words[words.index(option) + 1]
    shown = value if value and not value.startswith("-") else "VALUE"
    return f"--set {option.strip('-').replace('-', '_')}={shown}"


def extra_argument(extra: str, words: Sequence[str], command: click.Command) -> str:
    """Return the cure for one argument too many, or "" if it is not known."""
    name, equals, value = extra.partition("=")
    names = dict(_names(command))
    if equals and name.replace("_", "-") in names:
        return f"did you mean {names[name.replace('_', '-')]} {value}?"
    if equals and has_fields(command):
        return f"a field of the task is set by --set {extra}"
    if has_fields(command) and "/" in extra:
        folder = PurePath(extra)
        place = "" if str(folder.parent) == "data" else f"--data-dir {folder.parent} "
        listed = command_line("tasks", words[words.index(extra) - 1])
        return (
            f"a folder of data is set by {place}--set folder={folder.name} (`{listed}` lists the "
            "fields)"
        )
    before = words[words.index(extra) - 2 : words.index(extra)] if extra in words else []
    if before[:1] == ["--set"] and "=" not in before[1]:
        return f"did you mean --set {before[1]}={extra}?"
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
