"""Advice about a training, before it begins and after it has ended; never a refusal."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

from trainbox.classification import counts_by_class
from trainbox.options.config import Config, Settings, contradicts_its_name, split_metric
from trainbox.task import Task
from trainer.data.schedule import Schedule
from trainer.load_task import defines, doubtful_names
from trainer.loop.task_checks import reads_argument

_MANY = 0.1  # a share of the training examples that each epoch leaves out
_FEW_ENTRIES, _GROWTH = 8, 1.1
_MOST_NAMED = 3
_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    nn.FeatureAlphaDropout,
)


def advice_before(
    schedule: Schedule,
    model: nn.Module,
    optimizer: Optimizer,
    task: Task,
    settings: Settings,
    train: Dataset[Any],
) -> list[str]:
    """Return advice about the steps of an epoch, the parts of the model, and the settings."""
    found = [
        *_of_left_out_examples(schedule),
        *_of_missing_classes(task, train),
        *_of_plain_attributes(model),
        *_of_other_parameters(model, optimizer),
        *_of_settings_without_effect(task, settings),
        *_of_doubtful_settings(schedule, task, settings),
        *_of_unread_names(task),
    ]
    return list(dict.fromkeys(found))  # the same class may be in a model many times


def _of_left_out_examples(schedule: Schedule) -> Iterator[str]:
    examples, steps = schedule.examples, schedule.steps_per_epoch
    left, smaller = examples - steps * schedule.batch_size, examples // (steps + 1)
    if left > _MANY * examples:
        yield (
            f"each epoch leaves out its last, incomplete batch of {left:,} of {examples:,} "
            f"training examples: --batch-size {smaller} leaves out {examples % smaller}"
        )


def _of_missing_classes(task: Task, train: Dataset[Any]) -> Iterator[str]:
    """Find classes of a Classification that no label of a TensorDataset has."""
    if not (counts_by_class(task) and isinstance(train, TensorDataset) and len(train.tensors) == 2):
        return
    labels_N, names = train.tensors[1], getattr(task, "class_names", ())
    if labels_N.ndim != 1 or labels_N.dtype != torch.int64:
        return
    present = set(labels_N.unique().tolist())
    missing = [name for label, name in enumerate(names) if label not in present]
    if missing and present < set(range(len(names))):
        more = ", ..." if len(missing) > _MOST_NAMED else ""
        yield (
            f"no training example has the label of {', '.join(missing[:_MOST_NAMED])}{more} "
            f"({len(missing)} of {len(names)} classes): check the labels, such as a split of "
            "sorted examples"
        )


def _of_plain_attributes(model: nn.Module) -> Iterator[str]:
    """Find weights, and modules in lists and dicts, that the model does not have."""
    # FSDP replaces the parameters by shares of them, so that a list has other objects.
    is_sharded = any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
    # By identity, because tensors are compared by value.
    registered = {*map(id, model.modules()), *map(id, model.parameters())}
    for module in model.modules():
        for name, value in vars(module).items():
            if name.startswith("_"):
                continue
            where = f"{type(module).__name__}.{name}"
            if _is_a_weight(value) and id(value) not in registered and not is_sharded:
                yield (
                    f"the tensor {where} is neither trained nor saved: use nn.Parameter if it "
                    "should be"
                )
            if not isinstance(value, list | tuple | dict):
                continue
            container = "Dict" if isinstance(value, dict) else "List"
            parts = [
                part
                for part in (value.values() if isinstance(value, dict) else value)
                if id(part) not in registered
                and (isinstance(part, nn.Module) or (_is_a_weight(part) and not is_sharded))
            ]
            lost = [part for part in parts if isinstance(part, Tensor) or _has_tensors(part)]
            if lost:
                is_module = isinstance(lost[0], nn.Module)
                yield (
                    f"the {'modules' if is_module else 'tensors'} in {where} are neither trained "
                    f"nor saved: use nn.{'Module' if is_module else 'Parameter'}{container} if "
                    "they should be"
                )
            elif any(_drops(part) for part in parts):
                yield (
                    f"the modules in {where} also drop activations in a validation: use "
                    f"nn.Module{container}"
                )


def _has_tensors(module: nn.Module) -> bool:
    return any(True for each in (module.parameters(), module.buffers()) for _ in each)


def _drops(module: nn.Module) -> bool:
    return any(isinstance(each, _DROPOUTS) for each in module.modules())


def _is_a_weight(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.is_leaf


def _of_other_parameters(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """Find parameters that would get a gradient and that no optimizer has."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    all_ = {name: p for name, p in model.named_parameters() if p.requires_grad}
    others = {name: p for name, p in all_.items() if id(p) not in trained}
    if others:
        count, whole = (sum(p.numel() for p in each.values()) for each in (others, all_))
        yield (
            f"{count:,} of {whole:,} parameters with requires_grad are in no optimizer, first "
            f"{next(iter(others))}: give them to an optimizer in build_optimizer(), or set "
            "requires_grad to False"
        )


def _of_unread_names(task: Task) -> Iterator[str]:
    kind = type(task)
    for name, cure in doubtful_names(kind).items():
        what = f"calls {name}()" if callable(getattr(kind, name)) else f"reads {name}"
        yield f"nothing {what} of {kind.__name__}: {cure}"


# A setting, the setting without which it has no effect, and an option for that one.
_NEEDS = {
    "patience": ("early_stopping", "--early-stopping METRIC"),
    "base_batch_size": ("lr_scaling", "--lr-scaling linear"),
}
# A setting, its option, and the method of a task that gets it, with its place there.
_GIVEN_TO = (
    ("learning_rate", "--lr", "build_optimizer", 3),
    ("weight_decay", "--weight-decay", "build_optimizer", 4),
    ("warmup_epochs", "--warmup-epochs", "schedule", 3),
)


def _of_settings_without_effect(task: Task, settings: Settings) -> Iterator[str]:
    """Find settings that nothing reads, such as the rate of an optimizer with a rate of its own."""
    for name, (other, needed) in _NEEDS.items():
        value = getattr(settings, name)
        if value != getattr(Config, name) and getattr(settings, other) == getattr(Config, other):
            yield f"--{name.replace('_', '-')} {value} has no effect without {needed}"
    for name, option, method, place in _GIVEN_TO:
        usual = getattr(task, name)
        value = getattr(settings, name)
        if value not in (usual, getattr(Settings, name, None)) and not reads_argument(
            getattr(type(task), method), place
        ):
            yield (
                f"{option} {value:g} has no effect: {method}() of {type(task).__name__} does not "
                f"read its argument {name.replace('epochs', 'steps')}"
            )
    code = getattr(type(task).losses, "__code__", None)
    called = code.co_names if code is not None else ()
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        if name in called and "backward" not in called:
            yield (
                f"{name}() in losses() of {type(task).__name__} has no effect, because there is no "
                "gradient yet: remove it, and use --clip-norm"
            )


def _of_doubtful_settings(schedule: Schedule, task: Task, settings: Settings) -> Iterator[str]:
    """Find a metric in its worse direction, and a warm-up that is longer than the training."""
    for option, spec in (
        ("--best-by", settings.best_by),
        ("--early-stopping", settings.early_stopping),
    ):
        direction, name = split_metric(spec, option) if spec else ("", "")
        if spec and contradicts_its_name(direction, name):
            worst, other = ("highest", "min") if direction == "max" else ("lowest", "max")
            yield f"{option} {spec} takes the {worst} {name} for the best one: use {other}:{name}"
    warmup = settings.warmup_epochs
    given = warmup not in (task.warmup_epochs, Settings.warmup_epochs)
    given &= not defines(task, "schedule")
    if given and warmup * schedule.steps_per_epoch >= schedule.total_steps:
        epochs = schedule.total_steps / schedule.steps_per_epoch
        yield (
            f"--warmup-epochs {warmup:g} is not below the {epochs:g} epoch(s) of the training, "
            "so the learning rate rises to the end: use less"
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
