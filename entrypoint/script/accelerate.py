"""The settings of Accelerate that only `accelerate launch` passes to a script."""

import contextlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from entrypoint.script.target import Target
from trainbox.disclosure.suggested_commands import command
from trainbox.errors import WrongUse
from trainbox.files.regular_files import read_bytes

_IMPORTS = re.compile(rb"^\s*(?:import|from)\s+(?:accelerate|transformers)\b", re.MULTILINE)
_MOST_BYTES = 2**20
# What `accelerate launch` itself sets for an option, or for the same key of its file.
_VARIABLES = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
    "use_cpu": "ACCELERATE_USE_CPU",
}
_QUOTES = "'\""
_OFF = ("", "no", "false")
# Frameworks with a section of their own, for whose keys a script has plugins.
_PLUGINS = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
# Options of `accelerate launch` about processes, which `trainbox run` decides itself.
_OF_THE_LAUNCH = (
    *("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"),
    *("multi_gpu", "gpu_ids", "num_cpu_threads_per_process", "quiet", "config_file"),
)


def ignored_settings(target: Target, env: Mapping[str, str]) -> str | None:
    """Return a message if the script uses Accelerate, and its configuration file has no effect.

    Neither `python` nor torchrun reads this file.
    """
    file = Path(target.name.replace(".", "/") + ".py") if target.is_module else Path(target.name)
    try:
        if target.python is None or not _IMPORTS.search(read_bytes(file, _MOST_BYTES)):
            return None
        path = _configuration(env)
        found = _settings(path)
    except (OSError, ValueError):
        return None
    variables = [
        f"{variable}={found[key]}"
        for key, variable in _VARIABLES.items()
        if key in found and variable not in env
    ]
    plugin = found.get("distributed_type", "").upper()
    cures = [f"set {' '.join(variables)}"] if variables else []
    cures += [f"give the settings of {plugin} to Accelerator()"] if plugin in _PLUGINS else []
    if not cures:
        return None
    return f"only `accelerate launch` reads {path}: to keep its settings, {', and '.join(cures)}"


def _settings(path: Path) -> dict[str, str]:
    """Return the entries of a configuration file that are set, in lower case."""
    text = read_bytes(path, _MOST_BYTES).decode(errors="replace")
    found = re.findall(r"^\s*([a-z_]+):[ \t]*(.*?)[ \t]*$", text, re.MULTILINE)
    values = {name: value.lower().strip(_QUOTES) for name, value in found}
    return {name: value for name, value in values.items() if value not in _OFF}


def _configuration(env: Mapping[str, str]) -> Path:
    cache = Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    home = Path(env.get("HF_HOME") or cache)
    return home.expanduser() / "accelerate/default_config.yaml"


def refuse_launcher(arguments: Sequence[str]) -> None:
    """Refuse `accelerate launch [OPTIONS] SCRIPT`, and name the command that keeps its options.

    Raises:
        WrongUse: these are the arguments.
    """
    if [*arguments[:2]] != ["accelerate", "launch"] or Path("accelerate").exists():
        return
    words = [*arguments[2:]]
    end = next((n for n, word in enumerate(words) if word.endswith(".py")), len(words))
    found = re.findall(r"--([\w-]+)(?:[= ]([^-\s]\S*))?", " ".join(words[:end]))
    given = {name.replace("-", "_"): value for name, value in found}
    if "cpu" in given:
        given["use_cpu"] = "true"
    if path := given.get("config_file"):
        known = {*_VARIABLES, "num_processes"}
        with contextlib.suppress(OSError, ValueError):
            given = {n: v for n, v in _settings(Path(path)).items() if n in known} | given
    variables = [f"{name}={given.pop(key)}" for key, name in _VARIABLES.items() if key in given]
    number = given.get("num_processes")
    on_cpu = given.pop("cpu", None) is not None or "ACCELERATE_USE_CPU=true" in variables
    count = ["--processes" if on_cpu else "--gpus", number]
    script, *rest = words[end:] or ["train.py"]
    line = shlex.join(
        [*(word for word in count if number and word), script, *["--"][: len(rest)], *rest]
    )
    others = [f"--{name}" for name in given if name not in _OF_THE_LAUNCH]
    left = f"; give {' '.join(others)} to Accelerator() in the script" if others else ""
    form = " ".join([*variables, command("run", line)])
    raise WrongUse(
        f"accelerate launch starts processes, and so does this command: use `{form}` instead{left}"
    )
