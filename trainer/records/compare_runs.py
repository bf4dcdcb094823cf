"""Compare the digests and manifests of two runs."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainbox.disclosure.secret_rule import (
    LONGEST,
    NOT_SHOWN,
    arguments_without_secrets,
    is_secret,
    without_secrets,
)
from trainbox.errors import Changed
from trainbox.options.strategies import bits_depend_on_processes

_ENVIRONMENT = "environment."  # before the names of variables
# A change of one of these entries may change the bits, so a resume is refused. Changes of other
# entries are logged and allowed.
_CHANGE_BITS = {
    "plan.strategy",
    "threads",
    "packages.torch",
    "cuda",
    "cudnn",
    "device.type",
    "device.names",
    "device.multiprocessors",
    "device.cublas",
    "machine.cpu_model",
    "machine.cpu_capability",
}
# Prefixes of the environment variables whose change may change the bits.
VARIABLES_OF_BITS = (
    "ATEN_",
    "ONEDNN_",
    "DNNL_",
    "MKL_",
    "CUBLAS_",
    "CUBLASLT_",
    "CUDNN_",
    "NVIDIA_TF32",
    "TORCH_DISABLE_NATIVE_JIT",
)
_CHANGE_BITS_PREFIXES = ("data.", "sources.", *(_ENVIRONMENT + name for name in VARIABLES_OF_BITS))
# These entries belong to one start and do not affect the bits.
_OF_THE_START = (
    "argv",
    "changed_later",
    "classes",  # compared by itself where it matters
    "config_file",
    "end",
    "plan.",
    "environment.OMP_",
    # torchrun and Trainbox set these for several processes.
    "environment.TORCH_CPP_LOG_LEVEL",
    "environment.TORCH_DISABLE_SHARE_RDZV_TCP_STORE",  # by earlier versions
    "environment.TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "did_not_fit",
    "init.",
    "energy_kwh",
    "rehearsal.",
    "resumes",
    "run_id",
    "steps",
)


_PARTS = {
    "model": "the weights",
    "optimizer": "the optimizer's state",
    "order": "the order of the batches",
}


def first_difference(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> str | None:
    """Describe the first common step at which two runs' digests differ, or return None.

    The tensors are in the order of the model, then of the optimizer.
    """
    of_one, of_other = ({entry["step"]: entry for entry in entries} for entries in (one, other))
    since = "no earlier step was compared"
    for step in sorted(of_one.keys() & of_other.keys()):
        a, b = of_one[step], of_other[step]
        tensors = list(_changes(a["tensors"], b["tensors"]))
        parts = [label for name, label in _PARTS.items() if a[name] != b[name]]
        if tensors or parts:
            what = (
                f"first tensor {tensors[0]}, {len(tensors)} in all"
                if tensors
                else " and ".join(parts)
            )
            ran_out = "failed_allocations" in {**a, **b}
            why = "; GPU memory had run out by then, which changes bits" if ran_out else ""
            return f"first difference at step {step} ({since}): {what}{why}"
        since = f"step {step} is the same"
    return None


def first_figure_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return the first figure that differs as JSON, as in `loss (1 -> 2)`, or None.

    NaN, which is null, is equal to NaN. A missing figure differs from it. Times are not compared.
    """
    for name in {**one, **other}:
        old, new = (
            json.dumps(figures[name], sort_keys=True) if name in figures else "missing"
            for figures in (one, other)
        )
        if old != new and name != "time_unix_s":
            return f"{name} ({_short(old)} -> {_short(new)})"
    return None


def manifest_differences(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the entries that differ between two manifests, as {dotted name: (old, new)}.

    Entries that belong to a single start are left out, such as the arguments. The strategy and the
    number of processes are left out too, except under FSDP, where the bits depend on them.

    A source file that only one manifest lists is not a difference, because a start may end before
    it loads that file. Of a variable whose value may not be shown, only whether it is set counts.
    """
    before, after = flat(old), flat(new)
    plan_matters = any(
        bits_depend_on_processes(entries.get("plan.strategy")) for entries in (before, after)
    )
    loaded_by_one = {name for name in before.keys() ^ after.keys() if name.startswith("sources.")}
    of_the_run = ("plan.strategy", "plan.world_size") if plan_matters else ()
    return {
        name: change
        for name, change in _changes(before, after).items()
        if name not in loaded_by_one and (name in of_the_run or not name.startswith(_OF_THE_START))
    }


def shown_value(name: str, value: Any) -> Any:
    """Return `value` as the manifest records it: strings are cut and have no secrets."""
    if not isinstance(value, str):
        return value
    return NOT_SHOWN if is_secret(name, value) else without_secrets(value[:LONGEST])


def shown_arguments(argv: Sequence[str]) -> list[str]:
    """Return the arguments of a command as the manifest records them, without secrets."""
    return arguments_without_secrets(argument[:LONGEST] for argument in argv)


def shown_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as the manifest records them, without secrets in the task's fields."""
    fields = settings.get("fields")
    if not isinstance(fields, dict):
        return dict(settings)
    return {
        **settings,
        "fields": {name: shown_value(name, value) for name, value in fields.items()},
    }


def edited_settings(
    manifest: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between a run's manifest and its config.json.

    The result is {dotted name: (manifest, config)}. Secrets are removed before the comparison, so a
    changed secret in a task's field is not an edit.
    """
    settings = manifest.get("settings", {})
    before = flat(settings, "settings.")
    now = flat(shown_settings({name: config.get(name) for name in settings}), "settings.")
    return _changes(before, now)


def changes_bits(name: str) -> bool:
    """Return whether a change of the manifest entry `name` may change the bits."""
    return name in _CHANGE_BITS or name.startswith(_CHANGE_BITS_PREFIXES)


def cannot_resume(run: Path, changed: Mapping[str, tuple[Any, Any]]) -> Changed:
    """Return the error for a run whose manifest differs from this start in `changed`."""
    return Changed(
        f"{run} cannot be resumed with the same bits ({listed_changes(changed)}): restore the old "
        "values, or accept different bits with --resume anyway"
    )


def listed_changes(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Return the changes as in `threads: 1 -> 2; cudnn: 9 -> 10`, with long values cut."""
    return "; ".join(
        f"{name}: {_short(old)} -> {_short(new)}" for name, (old, new) in changed.items()
    )


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (before.get(name), after.get(name))
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    }


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested object by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= (
            flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        )
    return found


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return f"{text[:12]}..." if re.fullmatch("[0-9a-f]{40,}", text) else text[:200]
