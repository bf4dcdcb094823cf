"""Choose the memory format of a model's pictures, which a run keeps because it changes bits.

The reasons are in docs/decisions/0013-speed.md.
"""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from trainbox.contract.config import CHANNELS_LAST, CONTIGUOUS
from trainbox.task import Task
from trainer.data.batches import training_batches
from trainer.data.schedule import Schedule
from trainer.loop.losses import LossModule
from trainer.loop.out_of_memory import memory_used_up
from trainer.loop.state import Inference
from trainer.loop.task_checks import collate_of

# The types of devices and the precisions in which convolutions of pictures are faster with the
# channels last.
_FASTER = {("cpu", "bf16"), ("cuda", "bf16"), ("cuda", "fp16")}
_EXAMPLES = 2  # for the trial; batch norm needs two


def memory_format(job: Inference, train: Dataset[Any], schedule: Schedule) -> str:
    """Return the run's memory format, or choose it; all ranks must call this.

    The choice depends only on the model, the device and the precision, so each start of a command
    has the same bits. Convolutions in bf16, and on a GPU in fp16, are faster with the channels
    last. If a trial fails, for example at `view`, the format stays contiguous. The trial is on the
    CPU, because an error in a kernel, such as that of a wrong label, ends all work on a GPU.
    """
    config, strategy, world = job.config, job.strategy, job.world
    if config.memory_format is not None:
        return config.memory_format
    if (
        (world.device.type, config.precision) not in _FASTER
        or not strategy.rules.allows_channels_last
        or not any(isinstance(module, nn.Conv2d) for module in job.model.modules())
    ):
        return CONTIGUOUS
    world.seed(config.seed, "memory format")
    # Read the first examples of this rank.
    micro = schedule.micros[0]
    micro = dataclasses.replace(micro, stop=min(micro.stop, micro.start + _EXAMPLES))
    schedule = dataclasses.replace(schedule, micros=(micro,), total_steps=1)
    cpu, workers, collate = torch.device("cpu"), min(job.workers, 1), collate_of(job.task)
    batches = training_batches(train, schedule, 0, cpu, workers, collate)
    passed = world.from_each(_trains(job.task, job.model, batches))
    return CHANNELS_LAST if all(passed) else CONTIGUOUS


def put_channels_last(model: nn.Module) -> None:
    """Store the weights of convolutions of pictures with the channels last."""
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def _trains(task: Task, model: nn.Module, batches: Iterator[Any]) -> bool:
    """Return whether a copy of `model` computes a forward and a backward of the first batch.

    A model with parametrized weights may have no copy. The rehearsal reports a mistake of the
    task, which fails in both formats.
    """
    try:
        loss_module = LossModule(task, copy.deepcopy(model).cpu(), "cpu", torch.bfloat16)
        put_channels_last(loss_module.model)
        for batch in batches:
            losses_B = loss_module(batch)
            sum(loss_B.sum() for loss_B in losses_B.values() if loss_B.requires_grad).backward()
    except Exception as error:
        if memory_used_up(error) is not None:
            raise
        return False
    return True
