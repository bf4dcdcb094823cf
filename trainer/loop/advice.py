"""Advice about a training, before it begins and after it has ended; never a refusal."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from trainer.data.schedule import Schedule

_MANY = 0.1  # a share of the training examples that each epoch leaves out
_FEW_ENTRIES, _GROWTH = 8, 1.1


def advice_before(schedule: Schedule, model: nn.Module) -> list[str]:
    """Return advice about the steps of an epoch, and about the parts of the model."""
    # The same class may be in a model many times.
    return list(dict.fromkeys([*_of_left_out_examples(schedule), *_of_plain_lists(model)]))


def _of_left_out_examples(schedule: Schedule) -> Iterator[str]:
    examples, steps = schedule.examples, schedule.steps_per_epoch
    left, smaller = examples - steps * schedule.batch_size, examples // (steps + 1)
    if left > _MANY * examples:
        yield (
            f"each epoch leaves out its last, incomplete batch of {left:,} of {examples:,} "
            f"training examples: --batch-size {smaller} leaves out {examples % smaller}"
        )


def _of_plain_lists(model: nn.Module) -> Iterator[str]:
    """Find modules in plain lists and dicts, which are not modules of the model."""
    registered = {*model.modules()}
    for module in model.modules():
        for name, value in vars(module).items():
            if name.startswith("_") or not isinstance(value, list | tuple | dict):
                continue
            values = value.values() if isinstance(value, dict) else value
            if any(isinstance(part, nn.Module) and part not in registered for part in values):
                kind = "nn.ModuleDict" if isinstance(value, dict) else "nn.ModuleList"
                yield (
                    f"the modules in {type(module).__name__}.{name} are neither trained nor saved: "
                    f"use {kind} if they should be"
                )


def advice_after(
    entries: Sequence[Mapping[str, Any]], steps_per_epoch: int, class_names: Sequence[str]
) -> list[str]:
    """Return advice from the entries of metrics.jsonl, whose newest entry is the last one.

    Args:
        entries: The log entries and the validations of the whole training.
        steps_per_epoch: The number of steps of an epoch.
        class_names: The names of the classes of a `Classification`, or none.
    """
    training = [entry for entry in entries if entry["kind"] == "train"]
    validations = [entry for entry in entries if entry["kind"] == "validation"]
    found = _of_growth(training)
    if validations and class_names and validations[-1]["step"] >= steps_per_epoch:
        found += _of_chance(validations[-1], class_names)
    return found


def _of_growth(training: Sequence[Mapping[str, Any]]) -> list[str]:
    """Compare the losses of the first and the last quarter of a training with a single loss."""
    losses = [entry["loss"] for entry in training]
    quarter = len(losses) // 4
    if len(losses) < _FEW_ENTRIES or any(name.startswith("loss_") for name in training[-1]):
        return []
    first, last = (statistics.median(part) for part in (losses[:quarter], losses[-quarter:]))
    if not last > _GROWTH * first > 0:
        return []
    return [f"the training loss grew from {first:.4g} to {last:.4g}: use a lower --lr"]


def _of_chance(validation: Mapping[str, Any], class_names: Sequence[str]) -> list[str]:
    """Compare the accuracy with the accuracy of always the most frequent class."""
    accuracy, confusion_KK = validation.get("accuracy"), validation.get("confusion")
    if not isinstance(accuracy, float) or not isinstance(confusion_KK, list):
        return []
    counts_K = [sum(row) for row in confusion_KK]
    share = max(counts_K) / max(1, sum(counts_K))
    if len(counts_K) != len(class_names) or accuracy > share:
        return []
    return [
        f"the accuracy {accuracy:.4f} is no better than the accuracy {share:.4f} of the answer "
        f"{class_names[counts_K.index(max(counts_K))]!r} for all examples: check the labels and "
        "the inputs, or use another --lr"
    ]
