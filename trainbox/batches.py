"""The batches and the random numbers of a step, which depend only on the seed and the position."""

import operator
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Dataset

from trainbox import ranks
from trainbox.errors import WrongUse
from trainbox.order import derive_seed, epoch_order


def seed_step(seed: int, step: int) -> None:
    """Seed the generators of Python, NumPy and torch, on the CPU and the GPUs, for `step`.

    The seed depends on (seed, step, rank), so the ranks draw different numbers. A resumed training
    then draws the same numbers as an undisturbed one, and no state of a generator has to be saved.
    Call this before a step draws its first number. For a loop that saves once per epoch, call it at
    the start of the epoch, with the number of the epoch.
    """
    value = derive_seed(operator.index(seed), "step", operator.index(step), ranks.rank())
    seed_cpu(value)
    torch.manual_seed(value)  # also on the GPUs


def seed_cpu(value: int) -> None:
    """Seed the generators of this process on the CPU with `value`, a result of `derive_seed`."""
    import numpy

    random.seed(value)
    numpy.random.seed(value % 2**32)
    torch.default_generator.manual_seed(value)


class SeededDataset(Dataset[Any]):
    """A dataset that seeds the generators of Python, NumPy and torch before each example.

    Random augmentations then depend on (seed, epoch, index), and not on the rank, on the worker of
    the DataLoader or on a stop. Use it in the DataLoader and in `Batches`.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        """Seed each example of `dataset`, which has a length."""
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, position: tuple[int, int]) -> Any:
        """Return the example at `position`, which is (epoch, index).

        Raises:
            WrongUse: `position` is only an index.
        """
        if not isinstance(position, tuple):
            raise WrongUse(
                f"SeededDataset got the index {position} without an epoch: give the SeededDataset "
                "itself to trainbox.Batches, and use its dataset elsewhere"
            )
        epoch, index = position
        seed_cpu(derive_seed(self.seed, "example", epoch, index))
        try:
            return self.dataset[index]
        except StopIteration as error:
            # A loop over the loader would take StopIteration for the end of the dataset.
            raise RuntimeError(f"example {index} raised StopIteration") from error


class Batches:
    """The batches of this rank from a step to the end of its epoch, without a state to save.

    It is the `batch_sampler` of a DataLoader. The batch of a step depends only on the seed and the
    step. Its examples are shared by the ranks, so they are the same on each number of processes.
    Epochs have different orders. Each leaves out the examples that do not fill a batch.

    Attributes:
        steps_per_epoch: The number of batches in a whole epoch.
        step: The step of the first batch of the next iteration.
        rank: The rank of this process.
        world_size: The number of ranks.
    """

    def __init__(
        self,
        data: Sized,
        batch_size: int,
        seed: int,
        *,
        step: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Make batches of `data`.

        Args:
            data: The dataset of the DataLoader.
            batch_size: The number of examples in a batch of all ranks together.
            seed: The seed of the orders.
            step: The number of finished steps of the training.
            rank: By default, the rank in torch.distributed or torchrun.
            world_size: By default, the number of ranks there.

        Raises:
            WrongUse: An argument is out of range, or the ranks cannot share a batch equally.
        """
        self._data, self._batch_size = data, operator.index(batch_size)
        self._seed = operator.index(seed)
        self.rank = ranks.rank() if rank is None else rank
        self.world_size = ranks.world_size() if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise WrongUse(
                f"rank={self.rank} is not a rank of {self.world_size} processes: give 0 to "
                f"{self.world_size - 1}, or leave out rank and world_size"
            )
        if not 0 < self._batch_size <= len(data):
            raise WrongUse(
                f"batch_size={batch_size} is not possible with {len(data)} examples: give 1 to "
                f"{len(data)}"
            )
        if self._batch_size % self.world_size:
            raise WrongUse(
                f"batch_size={batch_size} is of all ranks together, and {self.world_size} ranks "
                f"cannot share it equally: use a multiple of {self.world_size}"
            )
        self.steps_per_epoch = len(data) // self._batch_size
        self.set_step(step)

    def set_step(self, step: int) -> None:
        """Let the next iteration begin with the batch of `step`.

        Call it before each loop over the DataLoader.

        Raises:
            WrongUse: `step` is negative.
        """
        if (step := operator.index(step)) < 0:
            raise WrongUse(f"step={step} is not a number of finished steps: give 0 or more")
        self.step = step

    def __len__(self) -> int:
        """Return the number of batches of the next iteration."""
        return self.steps_per_epoch - self.step % self.steps_per_epoch

    def __iter__(self) -> Iterator[list[Any]]:
        epoch, index = divmod(self.step, self.steps_per_epoch)
        order: list[Any] = epoch_order(self._seed, epoch, len(self._data))
        if isinstance(self._data, SeededDataset):
            order = [(epoch, example) for example in order]
        size = self._batch_size
        starts = range(index * size, self.steps_per_epoch * size, size)
        return (order[start + self.rank : start + size : self.world_size] for start in starts)

    @property
    def batch_size(self) -> int:
        """The number of examples in a batch. torch does not use it.

        Raises:
            WrongUse: There are several ranks. Only a library that splits the batches over the ranks
                once more asks for the size, and would then leave out most examples.
        """
        if self.world_size > 1:
            raise WrongUse(
                f"trainbox.Batches are already split over the {self.world_size} ranks, and a "
                "library is about to split them again: do not give the DataLoader to "
                "accelerator.prepare(), or use Trainer(use_distributed_sampler=False)"
            )
        return self._batch_size
