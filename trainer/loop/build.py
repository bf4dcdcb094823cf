"""Build the data, the model and the optimizer of a training or of an evaluation."""

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, TensorDataset

from trainbox.classification import check_classes
from trainbox.errors import WrongUse
from trainbox.options.config import CHANNELS_LAST, Settings
from trainbox.processes.environment import launch_facts
from trainbox.processes.streams import message
from trainbox.task import Task
from trainer.data.batches import EvaluationBatches, evaluation_batch_count, place_tensors
from trainer.data.examples import FileExamples, length
from trainer.data.overlap import RandomState, in_both, is_split
from trainer.data.schedule import Schedule, micro_batches
from trainer.loop.arithmetic import set_arithmetic
from trainer.loop.losses import LossModule
from trainer.loop.memory_format import memory_format, put_channels_last
from trainer.loop.model import build_model
from trainer.loop.optimizer import build_optimizer
from trainer.loop.out_of_memory import examples_at_once
from trainer.loop.state import Inference, Job, JobState
from trainer.loop.task_checks import checked, checked_dataset, collate_of
from trainer.parallel.exchange import Reduction
from trainer.parallel.loss_sums import RunningLosses
from trainer.parallel.strategy import Strategy
from trainer.parallel.world import World
from trainer.records.checkpoint import RunCheckpoints
from trainer.records.run_gpus import RunGpus
from trainer.records.run_log import RunLog

_MOST_LOADER_WORKERS = 16
# A note for a validation set that is drawn at random and cannot be compared with the training set.
MAY_SHARE = (
    "validation_dataset() draws random numbers, and its examples cannot be compared with the "
    "examples of train_dataset(): if both draw a random split, return Subsets, or seed a generator "
    "of their own"
)


class Data(NamedTuple):
    """A task and its datasets.

    Attributes:
        task: The task that `with_data` returned, for example with the number of classes.
        train: The training set.
        evaluated: The validation set, or the test set.
        seconds: How long the datasets took.
        in_both: The number of examples of `evaluated` that an earlier dataset has too, such as the
            training set; None if the datasets cannot be compared.
        may_share: Whether `in_both` is None and `evaluated` was drawn at random.
    """

    task: Task
    train: Dataset[Any]
    evaluated: Dataset[Any]
    seconds: float
    in_both: int | None = None
    may_share: bool = False


def build(
    config: Settings,
    data: Data,
    strategy: Strategy,
    run: RunLog,
    gpus: RunGpus,
    checkpoints: RunCheckpoints,
) -> Job:
    """Build the model, the optimizer and the rest of the job.

    Raises:
        WrongUse: Two sizes do not match, or a method of the task returns something invalid.
    """
    world = strategy.world
    set_arithmetic(config)
    schedule = _schedule(config, world, length(data.train))
    ranks = range(world.world_size)
    # Build the model and the optimizer.
    parts = _inference(config, data, strategy)
    model = parts.model
    optimizer = build_optimizer(data.task, config, model)
    chosen = memory_format(config, strategy, model)
    config = dataclasses.replace(config, memory_format=chosen)
    if chosen == CHANNELS_LAST:
        put_channels_last(model)
    numbers = {n: b for n, b in model.named_buffers() if b.is_floating_point() and b.itemsize > 1}
    checkpoints.may_be_nan = [name for name, buffer in numbers.items() if buffer.isnan().any()]
    return Job(
        **{**vars(parts), "config": config},
        run=run,
        gpus=gpus,
        checkpoints=checkpoints,
        state=JobState(
            model=model,
            optimizer=optimizer,
            scaler=torch.amp.GradScaler(world.device.type, enabled=config.precision == "fp16"),
            running=RunningLosses(
                world, [len(world.owned_by(r, config.shards)) * config.accumulation for r in ranks]
            ),
        ),
        train=data.train,
        in_both=data.in_both,
        notes=[MAY_SHARE] if data.may_share else [],
        schedule=schedule,
        reduction=Reduction(
            world, config.shards, config.accumulation, model, strategy.summed_parameters(model)
        ),
    )


def build_inference(
    config: Settings, task: Task, strategy: Strategy, data_dir: Path, test: bool
) -> Inference:
    """Build the data and the model to evaluate a run, without an optimizer and a schedule.

    The evaluated dataset comes from `validation_dataset`, or from `test_dataset` if `test`.

    Raises:
        WrongUse: A method of the task is missing or returns something invalid.
    """
    set_arithmetic(config)
    data = build_data(config, task, strategy.world, data_dir, test)
    if data.in_both and strategy.world.is_first:
        kind = "test" if test else "validation"
        message(f"warning: {shared_examples(data.in_both, length(data.evaluated), kind)}")
    return _inference(config, data, strategy)


def shared_examples(count: int, size: int, kind: str) -> str:
    """Return the warning that examples of a `kind` are also in an earlier dataset."""
    earlier = "training" if kind == "validation" else "training or validation"
    return (
        f"{count:,} of {size:,} {kind} examples are also {earlier} examples, so the metrics are "
        "better than on new data: leave these examples out of one dataset"
    )


def build_prediction(
    config: Settings, task: Task, strategy: Strategy, data_dir: Path, files: Sequence[Path]
) -> Inference:
    """Build the model and the examples of `files`, without the task's own datasets.

    Raises:
        WrongUse: A file cannot be used, or a method of the task returns something invalid.
    """
    set_arithmetic(config)
    strategy.world.seed(config.seed, "data")
    # Rank 0 goes first, because it may download or decode files.
    with strategy.world.first_goes_first():
        task = _with_data(task, data_dir)
        if type(task).prediction_dataset is Task.prediction_dataset:
            dataset: Dataset[Any] = FileExamples(files, task.load_example, type(task).__name__)
        else:
            dataset = _dataset(task, "prediction_dataset", files)
            dataset = place_tensors(dataset, strategy.world.device)
    if length(dataset) == 0:
        raise WrongUse(f"none of the {len(files)} file(s) has an example: name other files")
    return _inference(config, Data(task, dataset, dataset, 0.0), strategy)


def _inference(config: Settings, data: Data, strategy: Strategy) -> Inference:
    """Build the model, and the batches of the dataset `evaluated`."""
    # A validation batch is as large as a training micro-batch, which fits in memory. All ranks must
    # use the same size, because the examples are divided over the ranks by whole batches.
    task, train, evaluated = data[:3]
    world, size = strategy.world, examples_at_once(config)
    own = strategy.validation_batches(evaluation_batch_count(length(evaluated), size))
    workers = _workers(config, train)
    autocast_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)
    model, frozen = build_model(task, config, strategy, autocast_dtype)
    if config.compile:
        model.compile()
    loss_module = strategy.wrap(
        LossModule(task, model, world.device.type, autocast_dtype), autocast_dtype
    )
    if config.memory_format == CHANNELS_LAST:
        put_channels_last(model)
    evaluation = EvaluationBatches(evaluated, size, own, world.device, workers, collate_of(task))
    return Inference(
        task, config, strategy, model, loss_module, autocast_dtype, evaluation, workers, frozen
    )


def build_data(
    config: Settings, task: Task, world: World, data_dir: Path, test: bool = False
) -> Data:
    """Build the training set, and the validation set or the `test` set.

    Rank 0 goes first, because it may download files.

    A task may split its data at random in `train_dataset` and again in `validation_dataset`. Two
    different splits would put most validation examples into the training set. So the validation set
    is built again, with the random numbers that the training set had, if it draws random numbers
    and shares examples with the training set, or is a Subset that cannot be compared. Of the two
    validation sets, the one that shares fewer examples is used. The test set is treated alike.
    """
    begin = time.monotonic()
    world.seed(config.seed, "data")
    names = ("validation", "test") if test else ("validation",)
    with world.first_goes_first():
        task = _with_data(task, data_dir)
        of_train = RandomState.now()
        train = evaluated = _dataset(task, "train_dataset", data_dir)
        earlier, shared, draws = [train], None, False
        for name in names:
            before = RandomState.now()
            evaluated = _dataset(task, f"{name}_dataset", data_dir)
            shared, after = _in_any(earlier, evaluated), RandomState.now()
            draws = after != before
            if draws and (shared or (shared is None and is_split(evaluated))):
                of_train.restore()
                other = _dataset(task, f"{name}_dataset", data_dir)
                found = _in_any(earlier, other)
                if shared is None or (found is not None and found < shared):
                    evaluated, shared, draws = other, found, False
                else:
                    after.restore()
            earlier.append(evaluated)
    if length(evaluated) == 0:
        raise WrongUse(
            f"task {config.task}: the {name} set is empty: check --data-dir and the task's "
            f"{name}_dataset()"
        )
    train, evaluated = (place_tensors(dataset, world.device) for dataset in (train, evaluated))
    unknown = draws and shared is None
    return Data(task, train, evaluated, time.monotonic() - begin, shared, unknown)


def _dataset(task: Task, method: str, source: Path | Sequence[Path]) -> Dataset[Any]:
    return checked_dataset(task, method, getattr(task, method)(source))


def _in_any(earlier: Sequence[Dataset[Any]], dataset: Dataset[Any]) -> int | None:
    """Return how many examples of the dataset are in an earlier one, or None if it is not known."""
    counts = [in_both(one, dataset) for one in earlier]
    known = [count for count in counts if count is not None]
    return max(known) if known else None


def _with_data(task: Task, data_dir: Path) -> Task:
    task = checked(task, "with_data", task.with_data(data_dir))
    check_classes(task)
    return task


def _schedule(config: Settings, world: World, examples: int) -> Schedule:
    """Return the schedule of this rank.

    Raises:
        WrongUse: The training set is empty or smaller than a batch, a micro-batch would be empty,
            or there are more ranks than shards.
    """
    if examples == 0:
        raise WrongUse(
            f"task {config.task}: the training set is empty: check --data-dir and the task's "
            "train_dataset()"
        )
    if config.batch_size > examples:
        raise WrongUse(
            f"--batch-size {config.batch_size} is larger than the training set ({examples} "
            f"examples): use at most {examples}"
        )
    if world.world_size > config.shards:
        raise WrongUse(
            f"this run has {config.shards} shard(s), fewer than {world.world_size} processes: use "
            f"at most {config.shards} process(es), or start a new run with --run NAME --shards "
            f"{world.world_size}"
        )
    if config.batch_size < config.shards * config.accumulation:
        raise WrongUse(
            f"--batch-size {config.batch_size} is smaller than {config.shards} shards x "
            f"{config.accumulation} accumulation, so a micro-batch would be empty: raise the "
            "batch size"
        )
    micros = micro_batches(
        config.batch_size, config.shards, config.accumulation, world.owned(config.shards)
    )
    steps_per_epoch = examples // config.batch_size
    total_steps = config.max_steps or (config.epochs or 0) * steps_per_epoch
    return Schedule(config.seed, examples, config.batch_size, total_steps, micros)


def _workers(config: Settings, dataset: Dataset[Any]) -> int:
    """Return the number of loader workers per rank: 0 for a dataset of tensors."""
    if isinstance(dataset, TensorDataset):
        return 0
    if config.workers is not None:
        return config.workers
    return min(
        _MOST_LOADER_WORKERS, max(1, cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    )


def cpu_count() -> int:
    """Return the number of CPUs that the job may use on this machine."""
    return launch_facts(os.environ).cpus or os.cpu_count() or 1
