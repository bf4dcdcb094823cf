"""Define the settings of a run, and check them without torch."""

import dataclasses
import importlib.util
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainbox.errors import WrongUse
from trainbox.options.optimizers import check_optimizer
from trainbox.options.strategies import STRATEGY_RULES, StrategyRules

DEFAULT_EPOCHS = 10
DEFAULT_BATCH_SIZE = 128
DEFAULT_LEARNING_RATE = 1e-3
DEFAULT_OPTIMIZER = "adamw"
DEFAULT_WARMUP_EPOCHS = 0.0
# The settings that a task may have as class attributes, which are then the defaults of the options.
OF_THE_TASK = (
    *("epochs", "batch_size", "learning_rate", "warmup_epochs", "optimizer", "weight_decay"),
    *("clip_norm", "precision", "best_by"),
)
CONTIGUOUS, CHANNELS_LAST = "contiguous", "channels_last"
CAPTURE = ("auto", "off")  # the values of --capture

# A resume may change these settings. They affect neither the weights nor the best checkpoint.
FREE_AT_RESUME = frozenset(
    {
        *("workers", "checkpoint_steps", "checkpoint_minutes", "keep", "log_steps"),
        *("digest_steps", "capture"),
    }
)


@dataclass(frozen=True)
class Config:
    """The settings of a run as requested.

    None leaves the choice to the task, the hardware or the number of processes.

    `batch_size` is global. It counts the examples of one optimizer step over all processes and
    micro-batches. `accumulation` is the number of micro-batches per shard, and None chooses the
    smallest number that fits in memory.
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
    warmup_epochs: float | None = None
    weight_decay: float | None = None
    optimizer: str | None = None
    init: str | None = None  # a run's folder or a file, whose weights the run starts from
    freeze: list[str] = field(default_factory=list)  # patterns of names that do not train
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
    log_steps: int | None = None  # None: 50 steps, or more if entries take too much of the time
    digest_steps: int | None = None  # None: once per epoch
    workers: int | None = None
    seed: int = 0
    deterministic: bool = True
    compile: bool = False
    capture: str = "off"  # auto: CUDA graphs if the rehearsal shows that they have the same bits
    memory_format: str | None = None  # None: chosen by the first start, and the run keeps it
    # None chooses by the number of processes at the first start, and the run keeps the choice.
    # Under FSDP, the number of shards stays None and is the number of processes of each start.
    shards: int | None = None
    threads: int | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"

    def identity(self) -> dict[str, Any]:
        """Return the task, and the settings that affect the result and differ from their default.

        So a new setting changes neither the names of old runs nor the identity of old sweeps.
        """
        usual = {"optimizer": DEFAULT_OPTIMIZER, "warmup_epochs": DEFAULT_WARMUP_EPOCHS}
        default = vars(Config()) | {n: v for n, v in usual.items() if getattr(self, n) == v}
        return {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name == "task" or (name not in FREE_AT_RESUME and value != default[name])
        }


@dataclass(frozen=True)
class Settings(Config):
    """The settings of a run after every choice has been made.

    A run ends after `epochs` or after `max_steps`; the other one is None. `clip_norm`,
    `early_stopping`, `checkpoint_steps`, `log_steps`, `digest_steps` and `workers` are None where
    the loop's own rule applies. `memory_format` is None until the model is built.
    """

    batch_size: int = DEFAULT_BATCH_SIZE
    batch_size_per_gpu: None = None
    learning_rate: float = DEFAULT_LEARNING_RATE
    warmup_epochs: float = DEFAULT_WARMUP_EPOCHS
    optimizer: str = DEFAULT_OPTIMIZER
    accumulation: int = 1
    precision: str = "fp32"
    best_by: str = "loss"
    shards: int = 1
    threads: int = 1


def check(config: Config, device: str) -> None:
    """Check settings on `device` for contradictions that can be found without torch.

    Raises:
        WrongUse: two settings contradict each other.
    """
    if config.epochs is not None and config.max_steps is not None:
        raise WrongUse(
            f"--epochs {config.epochs} and --max-steps {config.max_steps} both set the length "
            "of the run: drop one"
        )
    if config.batch_size is not None and config.batch_size_per_gpu is not None:
        raise WrongUse(
            f"--batch-size {config.batch_size} (global) and --batch-size-per-gpu "
            f"{config.batch_size_per_gpu} both set the batch: drop one"
        )
    if device in ("cpu", "mps") and config.precision in ("tf32", "fp16"):
        raise WrongUse(
            f"--precision {config.precision} needs an NVIDIA GPU (the device is {device}): "
            "use fp32 or bf16"
        )
    if config.compile:
        _check_compiler(device)
    if config.optimizer is not None:
        check_optimizer(config.optimizer)
    for option, name in (
        ("--best-by", config.best_by),
        ("--early-stopping", config.early_stopping),
    ):
        if name is not None:
            split_metric(name, option)


def check_strategy(config: Config, strategy: str) -> None:
    """Raise WrongUse for requested settings that the launch strategy does not support."""
    rules = STRATEGY_RULES.get(strategy, StrategyRules())  # a trial of a sweep is one process
    if config.memory_format == CHANNELS_LAST and not rules.allows_channels_last:
        raise WrongUse(
            f"--memory-format channels_last is not kept by --strategy {strategy}: drop it, or use "
            "--strategy ddp"
        )
    if config.shards is not None and not rules.keeps_shards:
        raise WrongUse(
            f"--shards {config.shards} guarantees the same bits on 1 to {config.shards} "
            f"processes, but --strategy {strategy} adds in an order that depends on their number: "
            "drop --shards, or use --strategy ddp"
        )
    if config.precision == "fp16" and not rules.allows_fp16:
        raise WrongUse(
            f"--strategy {strategy} cannot scale gradients, as --precision fp16 needs: use bf16 or "
            "fp32"
        )
    if config.compile and not rules.allows_compile:
        raise WrongUse(
            f"--strategy {strategy} is not tested with --compile: drop one of the two options"
        )


def _check_compiler(device: str) -> None:
    """Check that `torch.compile` finds its compilers.

    Raises:
        WrongUse: the C compiler is missing, or triton on a GPU.
    """
    missing = ""
    import shutil

    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        missing = "a C compiler, but PATH does not have one"
    elif device == "cuda" and importlib.util.find_spec("triton") is None:
        missing = "the package triton on a GPU, but it is not installed"
    if missing:
        raise WrongUse(
            f"--compile needs {missing}: install it, build the image with `make build COMPILE=1`, "
            "or drop --compile"
        )


# The last words of the names of metrics of which a lower or a higher value is better.
_LOWER_ENDS = ("loss", "error", "perplexity", "mse", "mae", "mape", "nll")  # as in rmse
_LOWER_WORDS = ("wer", "cer", "fid")
_HIGHER_WORDS = ("accuracy", "acc", "f1", "auc", "auroc", "iou", "dice", "recall", "bleu")


def split_metric(text: str, option: str) -> tuple[str, str]:
    """Return (`min` or `max`, name) of a metric such as `max:accuracy`.

    Without a direction, lower is better for names that end like a loss or an error, such as
    `val_loss` and `rmse`. Higher is better for other names.

    Raises:
        WrongUse: the direction is unknown, or the name is missing.
    """
    direction, colon, name = text.rpartition(":")
    if not colon:
        direction = _direction_of(name) or "max"
    if direction not in ("min", "max") or not name:
        raise WrongUse(f"{option} {text}: write the name of a metric, or min:NAME or max:NAME")
    return direction, name


def contradicts_its_name(direction: str, name: str) -> bool:
    """Return whether `min` or `max` is the worse direction of a metric, by its name."""
    return _direction_of(name) not in ("", direction)


def _direction_of(name: str) -> str:
    """Return `min` or `max`, by the last word of the name of a metric, or "" if it is unknown."""
    words = re.findall(r"[a-z0-9]+", name.lower()) or [""]
    if words[-1].endswith(_LOWER_ENDS) or words[-1] in _LOWER_WORDS:
        return "max" if words[0] == "neg" else "min"  # as scikit-learn's neg_mean_squared_error
    return "max" if words[-1] in _HIGHER_WORDS else ""


def config_in(settings: Mapping[str, Any], path: Path) -> Config:
    """Return the configuration of `settings`, the content of a run's config.json at `path`.

    Raises:
        WrongUse: a setting is wrong, or the run is one of a script.
    """
    if settings.get("kind") == "script":
        raise WrongUse(f"{path.parent} is a run of a script, not of a task: use another --run")
    try:
        config = Config(**settings)
    except TypeError as error:
        raise WrongUse(
            f"{path} is not a configuration ({error}): restore it or use another --run"
        ) from error
    # All other settings are compared with the command's settings or with the manifest.
    if config.capture not in CAPTURE:
        raise WrongUse(
            f"{path} is damaged (capture is {config.capture!r}, not {' or '.join(CAPTURE)}): "
            "restore it"
        )
    for name in sorted(FREE_AT_RESUME - {"capture"}):
        number = getattr(config, name)
        whole = type(number) is int or (type(number) is float and name == "checkpoint_minutes")
        if not (whole and number >= 0) and not (number is None and getattr(Config, name) is None):
            raise WrongUse(
                f"{path} is damaged ({name} is {number!r}, not a number from 0): restore it"
            )
    return config


def differences(old: Config, new: Config) -> list[str]:
    """Return `name: old -> new` for each changed setting that a resume must not change."""
    before, after = dataclasses.asdict(old), dataclasses.asdict(new)
    return [
        f"{name}: {before[name]} -> {after[name]}"
        for name in before
        if name not in FREE_AT_RESUME and before[name] != after[name]
    ]


def scaled_learning_rate(
    learning_rate: float, scaling: str, batch_size: int, base_batch_size: int
) -> float:
    """Return the peak learning rate for `batch_size`.

    `learning_rate` is the peak for `base_batch_size`. `scaling` is none, linear (Goyal et al.,
    2017) or sqrt.
    """
    ratio = batch_size / base_batch_size
    return learning_rate * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[scaling]


def warmup_then_cosine(step: int, total_steps: int, warmup_steps: int) -> float:
    """Return the learning rate at `step` (from 0) as a fraction of the peak.

    It rises linearly during the warm-up. Then it falls to 0 along half a cosine.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (
        1 + math.cos(math.pi * (step - warmup_steps) / max(1, total_steps - warmup_steps))
    )
