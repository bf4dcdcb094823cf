"""The files that a run ships, its best weights and its checkpoints, compared with what
digests.jsonl says of their steps.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.errors import Differs, WrongUse
from trainer.records.digest import digest_of_digests, tensor_digests
from trainer.records.evidence import Evidence
from trainer.system.files import open_regular

_OPTIMIZER = "optimizer."  # before the names of its tensors in digests.jsonl
_EXTRA_STATE = "_extra_state"  # of a module, in no .safetensors


def check_files(run: Evidence) -> Evidence:
    """Return `run` with the step of its best weights, if model.safetensors and each checkpoint have
    the recorded digests.

    Raises:
        Differs: a file's content is not what was saved at its step, or a file is missing.
        WrongUse: a file cannot be read.
    """
    best_step, weights = None, run.folder / "model.safetensors"
    newest: Mapping[str, Any] = {}
    for step in run.checkpoints:
        newest = _check_checkpoint(run, run.folder / "checkpoints" / f"step-{step:08d}.pt", step)
    if weights.exists() or weights.is_symlink():
        best_step = _check_weights(run, weights)
    _check_progress(run, newest, best_step)
    return dataclasses.replace(run, best_step=best_step)


def _check_weights(run: Evidence, path: Path) -> int:
    """Return the step of the best weights."""
    try:
        open_regular(path).close()
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get("step", "")
            digests = {
                name: tensor_digests({name: file.get_tensor(name)})[name]
                for name in file.keys()  # noqa: SIM118
            }
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    if not re.fullmatch(r"\d{1,18}", text):
        raise Differs(
            f"{path} does not say of which step it is: it is not the file that the run "
            "saved: restore it"
        )
    _compare(run, path, int(text), digests, whole=False)
    return int(text)


def _check_checkpoint(run: Evidence, path: Path, step: int) -> Mapping[str, Any]:
    """Return the progress that the checkpoint holds."""
    try:
        open_regular(path).close()
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        model, optimizer, progress = (
            state["model"],
            state["optimizer"]["state"].values(),
            dict(state["progress"]),
        )
        digests = tensor_digests(model)
        moments = [
            digest
            for values in optimizer
            for digest in tensor_digests(_tensors_in(values)).values()
        ]
        found, _, _ = progress["step"], progress["evaluated_step"], progress["best_step"]
    except FileNotFoundError as error:
        raise Differs(f"{path} is missing, and its .json is there: restore it") from error
    except Exception as error:  # a file of anybody's; torch raises all kinds
        raise _unreadable(path, error) from error
    entry = _compare(run, path, step, digests, whole=True)
    recorded = Counter(digest for name, digest in entry["tensors"].items() if name not in digests)
    if recorded - Counter(digest[:16] for digest in moments) or found != step:
        raise Differs(
            f"{path} differs from the entry of step {step} in digests.jsonl in the "
            "optimizer's state: restore it"
        )
    return progress


def _compare(
    run: Evidence, path: Path, step: int, digests: Mapping[str, str], whole: bool
) -> dict[str, Any]:
    """Return the entry of `step`, whose tensors have `digests`; not `whole`: but for the modules'
    extra state.

    Raises:
        Differs: a tensor differs.
        WrongUse: the entry contradicts itself.
    """
    entry = next((entry for entry in run.digests if entry["step"] == step), None)
    if entry is None:
        raise Differs(
            f"{path} is of step {step}, which has no entry in digests.jsonl: restore both, "
            "or remove the file"
        )
    recorded: dict[str, str] = entry["tensors"]
    left_out = (
        {}
        if whole
        else {name for name in recorded.keys() - digests.keys() if name.endswith(_EXTRA_STATE)}
    )
    names = [
        name
        for name in recorded
        if name in digests or not (name.startswith(_OPTIMIZER) or name in left_out)
    ]
    different = [name for name in names if digests.get(name, "")[:16] != recorded[name]]
    different += [name for name in digests if name not in recorded]
    if different:
        raise Differs(
            f"DIFFERENT BITS: {path} against the entry of step {step} in "
            f"{run.folder}/digests.jsonl: first tensor "
            f"{different[0]}, {len(different)} in all: the file is not the one that the "
            "run saved: restore it"
        )
    if not left_out and digest_of_digests(digests) != entry["model"]:
        raise WrongUse(
            f"the entry of step {step} in {run.folder}/digests.jsonl is damaged (model, "
            "the digest of the weights, is not that "
            f"of its tensors, which are those of {path.name}): restore it"
        )
    return entry


def _check_progress(run: Evidence, newest: Mapping[str, Any], best_step: int | None) -> None:
    """Hold what the newest checkpoint says of the run against metrics.jsonl and the best
    weights.
    """
    validated = [
        step for step in (newest.get("evaluated_step"), newest.get("best_step"), best_step) if step
    ]
    for step in sorted(set(validated) - run.validations.keys()):
        raise Differs(
            f"{run.folder}/metrics.jsonl has no validation at step {step}, and a saved "
            "file says that there was one: restore it"
        )
    expected = newest.get("best_step") if newest else next(iter(run.validations), None)
    if best_step is None and expected is not None:
        raise Differs(
            f"{run.folder}/model.safetensors is missing, and the run has validations: "
            "restore it (the "
            f"best weights are those of step {expected} or later)"
        )
    # A save that was cut short has replaced the weights, and not written the checkpoint that says
    # so.
    if newest and best_step is not None and best_step <= newest["step"] and best_step != expected:
        raise Differs(
            f"{run.folder}/model.safetensors is of step {best_step}, and the newest "
            "checkpoint says that the best is step "
            f"{expected}: restore it"
        )


def _tensors_in(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _unreadable(path: Path, error: Exception) -> WrongUse:
    reason = (
        getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
    )
    return WrongUse(f"{path} cannot be read ({reason}): restore it")
