"""Compare the digests and manifests of two runs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainbox.disclosure.recorded_values import changes, flat, listed_changes, short
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
        tensors = list(changes(a["tensors"], b["tensors"]))
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
            return f"{name} ({short(old)} -> {short(new)})"
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
        for name, change in changes(before, after).items()
        if name not in loaded_by_one and (name in of_the_run or not name.startswith(_OF_THE_START))
    }


def changes_bits(name: str) -> bool:
    """Return whether a change of the manifest entry `name` may change the bits."""
    return name in _CHANGE_BITS or name.startswith(_CHANGE_BITS_PREFIXES)


def cannot_resume(run: Path, changed: Mapping[str, tuple[Any, Any]]) -> Changed:
    """Return the error for a run whose manifest differs from this start in `changed`."""
    return Changed(
        f"{run} cannot be resumed with the same bits ({listed_changes(changed)}): restore the old "
        "values, or accept different bits with --resume anyway"
    )
