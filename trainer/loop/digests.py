"""Entries of digests.jsonl: digests of the weights, of the optimizer's state and of the order."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trainbox.errors import WrongUse
from trainbox.folders.record_folder import DIGESTS
from trainer.data.schedule import epoch_order
from trainer.loop.out_of_memory import failed_allocations, failed_allocations_change_bits
from trainer.loop.state import Job
from trainer.records.digest import (
    digest_of_digests,
    saved_digests,
    tensor_digest,
    tensor_digests,
)


class DigestLog:
    """The digests of one training, and the step of the last entry."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._last: dict[str, Any] = {}
        # Failed allocations of GPU memory: on this rank before now, and on all ranks since then.
        self._failed_before, self._failed = failed_allocations(), 0

    def record(self, kind: str) -> None:
        """Record the digests of the current step; all ranks must call this.

        Raises:
            WrongUse: The digests differ between ranks.
        """
        job = self._job
        job.check_unchanged()
        self._count_failed_allocations()
        model, optimizer = common_digests(job)
        job.reduction.look_again()
        self._write(self._entry(kind, job.state.progress.step, model, optimizer))

    def _count_failed_allocations(self) -> None:
        """Count the failed allocations of all ranks, and log each increase."""
        job = self._job
        if not failed_allocations_change_bits(job.strategy):
            return
        failed = sum(job.world.from_each(failed_allocations() - self._failed_before))
        if failed > self._failed:
            job.run.report(
                f"step {job.state.progress.step}: {failed} allocation(s) of GPU memory have failed "
                "so far, so cuDNN may have taken other algorithms, with other bits than on a GPU "
                "with more free memory: raise --accumulation for such a run, or free the GPU"
            )
        self._failed = failed

    def of_checkpoint(self) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that records the digests of a saved state.

        The thread that saves calls the function. Each reader of a checkpoint compares the
        checkpoint with this entry of digests.jsonl.
        """
        step = self._job.state.progress.step
        # Read the names here, because during a forward fully_shard replaces the parameters.
        return functools.partial(self._record_saved, step, _names(self._job))

    def _record_saved(self, step: int, names: Mapping[int, str], saved: Mapping[str, Any]) -> None:
        last = self._last  # another thread may replace it
        if last.get("step") == step:  # the weights and the optimizer are recorded
            entry = last | {"kind": "checkpoint"}
        else:
            model = tensor_digests(saved["model"])
            optimizer = tensor_digests(_tensors(names, saved["optimizer"]))
            entry = self._entry("checkpoint", step, model, optimizer)
        self._write({**entry, "saved": saved_digests(saved)}, durable=True)

    def _write(self, entry: dict[str, Any], durable: bool = False) -> None:
        self._last = entry
        self._job.run.folder.append(DIGESTS, entry, durable)

    def _entry(
        self, kind: str, step: int, model: Mapping[str, str], optimizer: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return an entry; `model` and `optimizer` are digests of tensors by name."""
        schedule = self._job.schedule
        epoch = max(0, step - 1) // schedule.steps_per_epoch
        whole = {
            "model": digest_of_digests(model),
            "optimizer": digest_of_digests(optimizer),
            "order": tensor_digest(epoch_order(schedule.seed, epoch, schedule.examples)),
        }
        failed = {"failed_allocations": self._failed} if self._failed else {}
        tensors = {name: digest[:16] for name, digest in {**model, **optimizer}.items()}
        return {"kind": kind, "step": step, **whole, **failed, "tensors": tensors}


def common_digests(job: Job) -> tuple[dict[str, str], dict[str, str]]:
    """Return the digests of the model's and of the optimizer's tensors; all ranks must call this.

    The tensors of the optimizer are in the order of the model's parameters.

    Raises:
        WrongUse: A digest differs between ranks.
    """
    model, optimizer = map(job.digests, state_tensors(job))
    if (name := job.world.first_difference({**model, **optimizer})) is not None:
        raise WrongUse(
            f"task {type(job.task).__name__}: the processes differ at step "
            f"{job.state.progress.step}, first in {name}: draw random numbers only from the global "
            "generators of torch, NumPy and Python, and do the same on each process"
        )
    return model, optimizer


def state_tensors(job: Job) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the model's state and the optimizer's tensors, in the order of its parameters."""
    return job.state.model_state(), _tensors(_names(job), job.state.optimizer.state_dict())


def _names(job: Job) -> dict[int, str]:
    """Return the names of the optimizer's parameters by their index, in the model's order."""
    parameters = [p for group in job.state.optimizer.param_groups for p in group["params"]]
    indices = {parameter: index for index, parameter in enumerate(parameters)}
    named = job.state.model.named_parameters()
    return {indices[parameter]: name for name, parameter in named if parameter in indices}


def _tensors(names: Mapping[int, str], optimizer: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors in the state dict of an optimizer."""
    return {
        f"optimizer.{name}.{key}": value
        for index, name in names.items()
        for key, value in optimizer["state"].get(index, {}).items()
        if isinstance(value, Tensor)
    }
