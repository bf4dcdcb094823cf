"""Compare a run's best weights and checkpoints with the digests in digests.jsonl."""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainbox.contract.errors import ExitCode, Failure, WrongUse
from trainbox.contract.files import open_regular
from trainbox.contract.sidecar import checkpoint_path
from trainer.records.compare import listed_changes, manifest_differences
from trainer.records.digest import digest_of_digests, tensor_digests
from trainer.records.evidence import Evidence, verdict

_OPTIMIZER = "optimizer."  # the prefix of the optimizer's tensors in digests.jsonl
_EXTRA_STATE = "_extra_state"  # a module's extra state, which a .safetensors file cannot hold


def check_files(run: Evidence) -> Evidence:
    """Check the digests of model.safetensors and of each checkpoint.

    Return `run` with the step of its best weights.

    Raises:
        Failure: A file differs from what the run saved at its step, or a file is missing.
        WrongUse: A file cannot be read.
    """
    best_step, weights = None, run.folder / "model.safetensors"
    newest: Mapping[str, Any] = {}
    for step in run.checkpoints:
        path = checkpoint_path(run.folder / "checkpoints", step, ".pt")
        newest = _check_checkpoint(run, path, step)
    if weights.exists() or weights.is_symlink():
        best_step = _check_weights(run, weights)
    _check_progress(run, newest, best_step)
    return dataclasses.replace(run, best_step=best_step)


def _check_weights(run: Evidence, path: Path) -> int:
    """Check the best weights, and return their step."""
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
        raise Failure(
            f"{path} was not saved by a run (its step is {text!r}): restore it",
            exit_code=ExitCode.DIFFERENT,
        )
    _compare(run, path, int(text), digests, whole=False)
    return int(text)


def _check_checkpoint(run: Evidence, path: Path, step: int) -> Mapping[str, Any]:
    """Check the checkpoint of `step`, and return its progress."""
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
        raise Failure(
            f"{path} is missing, but its .json exists: restore it", exit_code=ExitCode.DIFFERENT
        ) from error
    except Exception as error:  # torch raises many types for a file with unexpected content
        raise _unreadable(path, error) from error
    entry = _compare(run, path, step, digests, whole=True)
    recorded = Counter(digest for name, digest in entry["tensors"].items() if name not in digests)
    if recorded - Counter(digest[:16] for digest in moments) or found != step:
        raise Failure(
            f"the optimizer's state in {path} differs from the entry of step {step} in "
            "digests.jsonl: restore it",
            exit_code=ExitCode.DIFFERENT,
        )
    return progress


def _compare(
    run: Evidence, path: Path, step: int, digests: Mapping[str, str], whole: bool
) -> dict[str, Any]:
    """Return the entry of `step` after comparing its tensors with `digests`.

    If `whole` is false, `digests` may lack the extra state of modules.

    Raises:
        Failure: A tensor differs.
        WrongUse: The entry's digest of all weights does not match its digests of tensors.
    """
    entry = next((entry for entry in run.digests if entry["step"] == step), None)
    if entry is None:
        raise Failure(
            f"{path} is of step {step}, which has no entry in digests.jsonl: restore both, "
            "or remove the file",
            exit_code=ExitCode.DIFFERENT,
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
        raise Failure(
            f"DIFFERENT BITS: {path} against the entry of step {step} in "
            f"{run.folder}/digests.jsonl (first tensor {different[0]}, {len(different)} in "
            "all): restore the file that the run saved",
            exit_code=ExitCode.DIFFERENT,
        )
    if not left_out and digest_of_digests(digests) != entry["model"]:
        raise WrongUse(
            f"the entry of step {step} in {run.folder}/digests.jsonl is damaged (model, the "
            f"digest of all weights, does not match its tensors, but {path.name} does): "
            "restore it"
        )
    return entry


def _check_progress(run: Evidence, newest: Mapping[str, Any], best_step: int | None) -> None:
    """Compare the newest checkpoint's progress with metrics.jsonl and the best weights.

    Raises:
        Failure: A validation or the best weights are missing or of another step.
    """
    validated = [
        step for step in (newest.get("evaluated_step"), newest.get("best_step"), best_step) if step
    ]
    for step in sorted(set(validated) - run.validations.keys()):
        raise Failure(
            f"{run.folder}/metrics.jsonl has no validation at step {step}, but a saved file "
            "refers to one: restore it",
            exit_code=ExitCode.DIFFERENT,
        )
    expected = newest.get("best_step") if newest else next(iter(run.validations), None)
    if best_step is None and expected is not None:
        raise Failure(
            f"{run.folder}/model.safetensors is missing, but the run has validations (the best "
            f"step is {expected} or later): restore it",
            exit_code=ExitCode.DIFFERENT,
        )
    # A save that was interrupted may have replaced the weights but not written its checkpoint. The
    # weights are then of a later step than the checkpoint.
    if newest and best_step is not None and best_step <= newest["step"] and best_step != expected:
        raise Failure(
            f"{run.folder}/model.safetensors is of step {best_step}, but the best step of the "
            f"newest checkpoint is {expected}: restore it",
            exit_code=ExitCode.DIFFERENT,
        )


def _tensors_in(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _unreadable(path: Path, error: Exception) -> WrongUse:
    reason = (
        getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
    )
    return WrongUse(f"{path} cannot be read ({reason}): restore it")


def compare_runs(one: Path, other: Path) -> str:
    """Return that two runs have the same bits, with their differences in settings.

    Raises:
        WrongUse: A folder is not a run, or both are the same folder.
        Differs: The digests differ, or a run's files contradict each other.
    """
    for run in (one, other):
        for name in ("digests.jsonl", "manifest.json"):
            if not (run / name).is_file():
                raise WrongUse(f"verify {run}: {name} is missing: give the folders of two runs")
    if one.samefile(other):
        raise WrongUse(
            f"verify {one} {other}: both are the same folder: give the folders of two runs"
        )
    runs = [Evidence.of(run) for run in (one, other)]
    a, b = (check_files(run) for run in runs)
    same = verdict(a, b, listed_changes(manifest_differences(a.manifest, b.manifest)))
    # Entries have a time: equal files are copies, not two trainings.
    copied = bool(a.metrics) and a.metrics == b.metrics
    note = f"; {other} is a copy of {one}: this is one training, compared with itself"
    return same + (note if copied else "")
