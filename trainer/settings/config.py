"""What can be set for a run, and which values contradict each other: no torch here."""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import WrongUse
from trainer.settings.optimizers import check_optimizer
from trainer.system.files import parse_object

DEFAULT_EPOCHS = 10
DEFAULT_BATCH_SIZE = 128
DEFAULT_LEARNING_RATE = 1e-3

# A resumed run may differ in these: none of them changes a weight or the choice of the best.
FREE_AT_RESUME = frozenset(
    {"workers", "checkpoint_steps", "checkpoint_minutes", "keep", "log_steps", "digest_steps"}
)


@dataclass(frozen=True)
class Config:
    """One run's settings.

    None leaves the choice to the task, the hardware or the number of processes.

    `batch_size` is global: the examples of one optimizer step over all processes and accumulation.
    `accumulation`, the parts that a process's share is computed in, is left to the memory by None.
    """

    task: str = "digits"
    fields: dict[str, str | int | float | bool] = field(default_factory=dict)
    epochs: int | None = None
    max_steps: int | None = None
    batch_size: int | None = None
    batch_size_per_gpu: int | None = None
    learning_rate: float | None = None
    lr_scaling: str = "none"
    base_batch_size: int = 256
    warmup_epochs: float = 0.0
    weight_decay: float | None = None
    optimizer: str = "adamw"
    accumulation: int | None = None
    precision: str | None = None
    clip_norm: float | None = None
    skip_nonfinite: int = 0
    eval_every: int = 1
    early_stopping: str | None = None
    patience: int = 5
    best_by: str | None = None
    checkpoint_steps: int | None = None
    checkpoint_minutes: float = 5.0
    keep: int = 3
    log_steps: int = 50
    digest_steps: int | None = None  # an epoch
    workers: int | None = None
    seed: int = 0
    deterministic: bool = True
    compile: bool = False
    # Of a batch and of the CPU: by the number of processes at the run's first start, then for good.
    # None in a stored run: each start has one shard for each process (--strategy fsdp).
    shards: int | None = None
    threads: int | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"

    def fingerprint(self) -> str:
        """Eight hex digits that differ when anything that changes the result does: names a run
        directory.
        """
        # left out, so that a setting that is new tomorrow renames no run of today
        default = dataclasses.asdict(Config())
        settings = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name == "task" or (name not in FREE_AT_RESUME and value != default[name])
        }
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Settings(Config):
    """A configuration in which every choice is made, so that nothing but the length is optional.

    A run ends after `epochs` or after `max_steps`; the other one is None. `clip_norm`,
    `early_stopping`, `checkpoint_steps`, `digest_steps` and `workers` are None where the loop's own
    rule applies.
    """

    batch_size: int = DEFAULT_BATCH_SIZE
    batch_size_per_gpu: None = None
    learning_rate: float = DEFAULT_LEARNING_RATE
    accumulation: int = 1
    precision: str = "fp32"
    best_by: str = "loss"
    shards: int = 1
    threads: int = 1


def check(config: Config, device: str) -> None:
    """Raise WrongUse for values that contradict each other, as far as that can be known without
    torch.
    """
    if config.epochs is not None and config.max_steps is not None:
        raise WrongUse(
            f"--epochs {config.epochs} and --max-steps {config.max_steps} both say when to "
            "end: drop one"
        )
    if config.batch_size is not None and config.batch_size_per_gpu is not None:
        raise WrongUse(
            f"--batch-size {config.batch_size} (global) and --batch-size-per-gpu "
            f"{config.batch_size_per_gpu} "
            "both set the batch: drop one"
        )
    batch = config.batch_size or config.batch_size_per_gpu
    if batch is not None and (config.accumulation or 1) > batch:
        raise WrongUse(
            f"--accumulation {config.accumulation} cuts a batch of {batch} into empty "
            "parts: lower it"
        )
    if device in ("cpu", "mps") and config.precision in ("tf32", "fp16"):
        raise WrongUse(
            f"--precision {config.precision} needs an NVIDIA GPU, the device is {device}: "
            "use fp32 or bf16"
        )
    check_optimizer(config.optimizer)
    for option, name in (
        ("--best-by", config.best_by),
        ("--early-stopping", config.early_stopping),
    ):
        if name is not None:
            split_metric(name, option)


def split_metric(text: str, option: str) -> tuple[str, str]:
    """(`min` or `max`, name) of `max:accuracy`; without a direction, losses and errors count as
    lower is better.
    """
    direction, colon, name = text.rpartition(":")
    if not colon:
        direction = "min" if name.endswith(("loss", "error", "perplexity")) else "max"
    if direction not in ("min", "max") or not name:
        raise WrongUse(f"{option} {text}: write the name of a metric, or min:NAME or max:NAME")
    return direction, name


def load_config_file(path: Path) -> dict[str, Any]:
    """The settings in a JSON file such as a run's config.json, checked for unknown names.

    Raises:
        WrongUse: not there, not a JSON object, or a name that is no setting.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WrongUse(f"--config {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise WrongUse(f"--config {path} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise WrongUse(
            f"--config {path} holds no settings: it must be a JSON object, as a run's "
            "config.json is"
        )
    known = {f.name for f in dataclasses.fields(Config)}
    if unknown := sorted(settings.keys() - known):
        raise WrongUse(
            f"--config {path}: no setting {', '.join(unknown)}; known are "
            f"{', '.join(sorted(known))}"
        )
    if not isinstance(settings.get("fields", {}), dict):
        raise WrongUse(
            f"--config {path}: fields must be an object of the task's fields, as in a "
            "run's config.json"
        )
    return settings


def parse_config(text: str, path: Path) -> Config:
    """The configuration in `text`, a run's config.json at `path`.

    Raises:
        WrongUse: the file is damaged.
    """
    try:
        config = Config(**parse_object(text))
    except (ValueError, TypeError) as error:
        raise WrongUse(
            f"{path} is not a configuration ({error}): restore it or use another --run"
        ) from error
    # The others are compared with what is given, or with the manifest.
    for name, number in {name: getattr(config, name) for name in sorted(FREE_AT_RESUME)}.items():
        whole = type(number) is int or (type(number) is float and name == "checkpoint_minutes")
        if not (whole and number >= 0) and not (number is None and getattr(Config, name) is None):
            raise WrongUse(
                f"{path} is damaged ({name} is {number!r}, and not a number from 0): restore it"
            )
    return config


def differences(old: Config, new: Config) -> list[str]:
    """`name: old -> new` for each setting that may not change at a resume and did."""
    before, after = dataclasses.asdict(old), dataclasses.asdict(new)
    return [
        f"{name}: {before[name]} -> {after[name]}"
        for name in before
        if name not in FREE_AT_RESUME and before[name] != after[name]
    ]


def scaled_learning_rate(
    learning_rate: float, scaling: str, batch_size: int, base_batch_size: int
) -> float:
    """The peak learning rate for `batch_size`: linear (Goyal et al., 2017) or square-root scaling
    against the base.
    """
    ratio = batch_size / base_batch_size
    return learning_rate * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[scaling]


def warmup_then_cosine(step: int, total_steps: int, warmup_steps: int) -> float:
    """The share of the peak learning rate at `step` (from 0): linear warm-up, then half a cosine
    down to 0.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (
        1 + math.cos(math.pi * (step - warmup_steps) / max(1, total_steps - warmup_steps))
    )
