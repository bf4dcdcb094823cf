"""Choose the settings and the name of a training that its command leaves open."""

import dataclasses

import torch

from trainbox.errors import WrongUse
from trainbox.options.config import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_EPOCHS,
    DEFAULT_LEARNING_RATE,
    DEFAULT_OPTIMIZER,
    DEFAULT_WARMUP_EPOCHS,
    OF_THE_TASK,
    Config,
    Settings,
    check_strategy,
    config_in,
    differences,
)
from trainbox.task import Task
from trainer.load_task import defaults_of
from trainer.loop.build import cpu_count
from trainer.loop.task_checks import check_task
from trainer.parallel.strategy import Strategy
from trainer.records.run_log import RunLog


def settle(config: Config, task: Task, strategy: Strategy, run: RunLog) -> Settings:
    """Return `config` with every open choice made.

    A run that was started before keeps its choices. The choices of a new run come from the task,
    the hardware and the number of ranks. All ranks must call this, and they get the same settings.

    Raises:
        WrongUse: The run was started with other settings.
    """
    # Read the settings with which this run was started. Without a stored number of shards, and for
    # a strategy that does not use shards, there is one shard per rank.
    world = strategy.world
    check_task(task)
    read, stored = world.from_first(run.folder.read_config()), None
    if read is not None:
        stored = config_in(read, run.path / "config.json")
        if not strategy.rules.keeps_shards:
            stored = dataclasses.replace(stored, shards=None)
        stored = completed(stored, world.world_size)
    check_strategy(config, strategy.name)
    # Convert options that have two forms, such as --batch-size-per-gpu.
    given = dataclasses.asdict(config) | {"batch_size_per_gpu": None}
    if config.batch_size_per_gpu is not None:
        given["batch_size"] = config.batch_size_per_gpu * world.world_size
    if config.max_steps is None and config.epochs is None:
        given["epochs"] = stored.epochs if stored else task.epochs or DEFAULT_EPOCHS
        given["max_steps"] = stored and stored.max_steps
    # Choose what is not given. Rank 0 chooses the number of threads, because bits depend on it and
    # machines may have different CPUs. With --shards, this is the number for one shard, so that it
    # is the same on any number of ranks.
    threads = torch.get_num_threads()
    if config.shards is not None:
        threads = max(1, cpu_count() // config.shards)
    usual = {
        "batch_size": DEFAULT_BATCH_SIZE,
        "learning_rate": DEFAULT_LEARNING_RATE,
        "warmup_epochs": DEFAULT_WARMUP_EPOCHS,
        "optimizer": DEFAULT_OPTIMIZER,
        "precision": _default_precision(strategy),
    }
    of_the_task = defaults_of(task)
    chosen = {
        **{
            name: of_the_task.get(name, usual.get(name)) for name in OF_THE_TASK if name != "epochs"
        },
        "accumulation": 1,
        "shards": world.world_size,
        "threads": world.from_first(threads),
    }
    if stored is not None:
        chosen = {name: getattr(stored, name) for name in (*chosen, "memory_format")}
    for name, value in chosen.items():
        if given[name] is None:
            given[name] = value
        optional = getattr(Settings, name, None) is None
        if given[name] is None and not optional:  # a stored config.json never has null here
            raise WrongUse(f"{run.path / 'config.json'} is damaged ({name} is null): restore it")
    # Compare with the stored settings.
    settled = Settings(**given)
    if stored is not None and (changed := differences(stored, settled)):
        longer = any(name in line for line in changed for name in ("epochs: ", "max_steps: ")) and (
            "; the length of a run cannot change, because its learning rates depend on it"
        )
        raise WrongUse(
            f"{run.path} was started with other settings ({'; '.join(changed)}): use the old "
            f"values, or start a new run with --run NAME{longer or ''}"
        )
    return settled


def completed(stored: Config, shards: int) -> Config:
    """Return the settings `stored` in config.json, with `shards` if they have no number of them."""
    return dataclasses.replace(stored, shards=stored.shards or shards)


def _default_precision(strategy: Strategy) -> str:
    """Return bf16 if the GPU supports it natively, else fp16 if allowed, else fp32."""
    if strategy.world.device.type != "cuda":
        return "fp32"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    return "fp16" if strategy.rules.allows_fp16 else "fp32"
