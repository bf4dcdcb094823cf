"""From what was asked for to what `fit` works on: every open choice made, then data, model and
optimizer.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from trainer.classification import check_classes
from trainer.data import batches
from trainer.data.batches import EvaluationBatches, Schedule
from trainer.errors import WrongUse
from trainer.loop import compiler
from trainer.loop.attributes import Attributes
from trainer.loop.losses import LossModule
from trainer.loop.out_of_memory import examples_at_once
from trainer.loop.state import Job, Stopwatch
from trainer.loop.task_checks import (
    check_task,
    checked_dataset,
    checked_model,
    checked_optimizer,
    checked_task,
)
from trainer.parallel.exchange import Reduction
from trainer.parallel.loss_sums import RunningLosses
from trainer.parallel.world import Process
from trainer.records.checkpoint import Checkpoints
from trainer.records.digest import tensor_digests
from trainer.records.run_log import RunLog
from trainer.settings.config import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_EPOCHS,
    DEFAULT_LEARNING_RATE,
    Config,
    Settings,
    check_sharded,
    differences,
    parse_config,
    scaled_learning_rate,
)
from trainer.task import Task

_MOST_LOADER_WORKERS = 8


def settle(config: Config, task: Task, process: Process, run: RunLog) -> Settings:
    """`config` with every open choice made: as the run was started, else by the task, the hardware,
    the processes.

    Raises:
        WrongUse: the run was started with other settings.
    """
    check_task(task)
    stored_text = process.from_first(run.folder.read_config_text())
    stored = (
        parse_config(stored_text, run.path / "config.json") if stored_text is not None else None
    )
    if process.is_sharded:
        check_sharded(config)
    # each start has as many as processes
    if stored is not None and (process.is_sharded or stored.shards is None):
        stored = dataclasses.replace(stored, shards=process.world_size)
    given = dataclasses.asdict(config) | {"batch_size_per_gpu": None}
    if config.batch_size_per_gpu is not None:
        given["batch_size"] = config.batch_size_per_gpu * process.world_size
    if stored is not None and config.max_steps is None and config.epochs is None:
        given |= {"epochs": stored.epochs, "max_steps": stored.max_steps}
    elif config.max_steps is None and config.epochs is None:
        given["epochs"] = task.epochs or DEFAULT_EPOCHS
    # machines may have other CPUs, and bits depend on it
    threads = process.from_first(_default_threads(config))
    fallback = stored or Config(
        batch_size=task.batch_size or DEFAULT_BATCH_SIZE,
        learning_rate=task.learning_rate or DEFAULT_LEARNING_RATE,
        precision=_default_precision(process),
        best_by=task.best_by,
        accumulation=1,
        shards=process.world_size,
        threads=threads,
    )
    for name in (
        "batch_size",
        "accumulation",
        "learning_rate",
        "precision",
        "best_by",
        "shards",
        "threads",
    ):
        if given[name] is None:
            given[name] = getattr(fallback, name)
    settled = Settings(**given)
    if stored is not None and (changed := differences(stored, settled)):
        longer = any(name in line for line in changed for name in ("epochs: ", "max_steps: ")) and (
            "; a run keeps its length, which its learning rates follow from"
        )
        raise WrongUse(
            f"{run.path} was started with other settings ({'; '.join(changed)}): give those again, "
            f"or train anew under another --run name{longer or ''}"
        )
    return settled


def _default_precision(process: Process) -> str:
    if process.device.type != "cuda":
        return "fp32"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    return "fp32" if process.is_sharded else "fp16"


def _default_threads(config: Config) -> int:
    """The process's share of the CPUs; with --shards a shard's, so that it is the same on any
    number of processes.
    """
    if config.shards is None:
        return torch.get_num_threads()
    return max(1, _cpus() // config.shards)


def _cpus() -> int:
    return int(os.environ.get("TRAINBOX_CPUS") or os.cpu_count() or 1)


def build(config: Settings, task: Task, process: Process, run: RunLog, data_dir: Path) -> Job:
    """Data, model and optimizer; raises WrongUse where the sizes cannot be."""
    _set_arithmetic(config)
    process.seed(config.seed, "data")
    with process.first_goes_first():
        task = checked_task(task, task.with_data(data_dir))
        check_classes(task)
        train = checked_dataset(task, "train_dataset", task.train_dataset(data_dir))
        train = batches.place_tensors(train, process.device)
        validation = checked_dataset(task, "validation_dataset", task.validation_dataset(data_dir))
        validation = batches.place_tensors(validation, process.device)
    schedule = _schedule(config, process, batches.length(train))
    if batches.length(validation) == 0:
        raise WrongUse(
            f"task {config.task}: the validation set is empty: nothing to choose the best model by"
        )
    # As large as a training part, which fits, and the same on each process, which must agree on who
    # has what.
    size = examples_at_once(config)
    workers = _workers(config, train)
    ranks = range(process.world_size)
    own = _validated(process, batches.evaluation_batch_count(batches.length(validation), size))
    process.seed(config.seed, "model")
    model = checked_model(task, task.build_model())
    if process.is_sharded:
        _refuse_other_weights(task, model, process)
    if config.compile:
        model.compile()
    else:
        compiler.postpone()
    autocast_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)
    peak = scaled_learning_rate(
        config.learning_rate, config.lr_scaling, config.batch_size, config.base_batch_size
    )
    loss_module = process.wrap(
        LossModule(task, model, process.device.type, autocast_dtype), autocast_dtype
    )
    optimizer = _build_optimizer(task, config, model, peak)
    read_here = {} if workers else {"train_dataset": train, "validation_dataset": validation}
    return Job(
        task=task,
        config=config,
        process=process,
        run=run,
        checkpoints=Checkpoints(
            run.path / "checkpoints", config.keep, run.writes, run.say, process.is_sharded
        ),
        model=model,
        loss_module=loss_module,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(process.device.type, enabled=config.precision == "fp16"),
        autocast_dtype=autocast_dtype,
        train=train,
        evaluation=EvaluationBatches(validation, size, own, process.device, workers),
        schedule=schedule,
        workers=workers,
        watch=Stopwatch(),
        running=RunningLosses(
            process, [len(process.owned_by(r, config.shards)) * config.accumulation for r in ranks]
        ),
        reduction=Reduction(process, config.shards, config.accumulation, model),
        attributes=Attributes(task, model, optimizer, read_here),
    )


def _refuse_other_weights(task: Task, model: nn.Module, process: Process) -> None:
    """Each process keeps a share of its own weights: they must be one model's."""
    digests = tensor_digests(model.state_dict())
    if (
        place := process.first_difference([digest[:16] for digest in digests.values()])
    ) is not None:
        raise WrongUse(
            f"task {type(task).__name__}: build_model gives other weights on each process, "
            f"first in {list(digests)[place]}: "
            "it draws random numbers of its own; torch's generators are seeded for it"
        )


def _validated(process: Process, batch_count: int) -> Sequence[int]:
    """The numbers of the validation batches that this process computes.

    Under --strategy fsdp all compute as many, since each forward asks all for their shares: the
    last one again, uncounted.
    """
    own = process.owned(batch_count)
    most = len(process.owned_by(0, batch_count))
    return [*own, *[batch_count - 1] * (most - len(own))] if process.is_sharded else own


def _build_optimizer(
    task: Task, config: Settings, model: nn.Module, peak_learning_rate: float
) -> torch.optim.Optimizer:
    """The task's optimizer with the run's settings; each group keeps its peak rate as
    `initial_lr`.
    """
    built = task.build_optimizer(model, config.optimizer, peak_learning_rate, config.weight_decay)
    optimizer = checked_optimizer(task, built, model)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def _schedule(config: Settings, process: Process, examples: int) -> Schedule:
    if examples == 0:
        raise WrongUse(
            f"task {config.task}: the training set is empty: look into --data-dir, or at "
            "the task's train_dataset"
        )
    if config.batch_size > examples:
        raise WrongUse(
            f"--batch-size {config.batch_size} is more than the training set's {examples} "
            f"examples: lower it to {examples}"
        )
    if process.world_size > config.shards:
        raise WrongUse(
            f"this run cuts a batch into {config.shards} shard(s), and "
            f"{process.world_size} processes are given: "
            f"use at most {config.shards}, or train anew under another --run name with "
            f"--shards {process.world_size}"
        )
    if config.batch_size < config.shards * config.accumulation:
        raise WrongUse(
            f"--batch-size {config.batch_size} is less than {config.shards} shards x "
            f"{config.accumulation} accumulation: "
            "each must get an example; raise the batch size"
        )
    micros = batches.micro_batches(
        config.batch_size, config.shards, config.accumulation, process.owned(config.shards)
    )
    steps_per_epoch = examples // config.batch_size
    total_steps = config.max_steps or (config.epochs or 0) * steps_per_epoch
    return Schedule(config.seed, examples, config.batch_size, total_steps, micros)


def _workers(config: Settings, dataset: Dataset[Any]) -> int:
    if isinstance(dataset, TensorDataset):
        return 0
    if config.workers is not None:
        return config.workers
    return min(
        _MOST_LOADER_WORKERS, max(1, _cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    )


def _set_arithmetic(config: Settings) -> None:
    """The switches that change bits: what `--deterministic` and `--precision` mean to torch."""
    torch.set_num_threads(config.threads)
    multiply = "tf32" if config.precision == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = multiply
    torch.backends.cudnn.conv.fp32_precision = multiply  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = multiply  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not config.deterministic
    if config.deterministic:
        # read when CUDA's matrix library starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Not use_deterministic_algorithms, which says the same and imports the compiler for it.
        torch.set_deterministic_debug_mode("error")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
