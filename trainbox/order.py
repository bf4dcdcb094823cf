"""The order of the examples in an epoch: a pure function of the seed and the epoch."""

import operator
from collections.abc import Iterator, Sized

from trainbox import ranks
from trainbox.contract.errors import WrongUse
from trainbox.contract.seeding import derive_seed


def epoch_order(seed: int, epoch: int, n: int) -> list[int]:
    """Return the order of `n` examples in `epoch`: the numbers 0 to n - 1, shuffled.

    The order depends only on the arguments. It is the same on each machine and with each version of
    Python, torch and NumPy, because NumPy does not change the numbers of `RandomState`. It is not
    the order of `trainbox train`, which is torch's.

    Raises:
        WrongUse: `n` is negative.
    """
    if (n := operator.index(n)) < 0:
        raise WrongUse(f"n={n} is not a number of examples: give 0 or more")
    from numpy.random import RandomState

    value = derive_seed(operator.index(seed), "order", operator.index(epoch))
    order: list[int] = RandomState([value % 2**32, value >> 32]).permutation(n).tolist()
    return order


class Sampler:
    """A sampler for a DataLoader, which starts at any position and has no state to save.

    All ranks together yield the examples of `epoch_order`, from the position `start` on: rank 0 has
    the first one, rank 1 the second one, and so on. Each rank has the same number of examples, so
    an epoch leaves out the last `n % world_size`. Epochs have different orders, so each epoch
    leaves out different ones.

    The global batch of a step has the same examples on each number of processes, if the size of the
    global batch is the same.

    It is a `sampler` of a DataLoader. For a `batch_sampler`, wrap it in
    `torch.utils.data.BatchSampler`.

    Attributes:
        n: The number of examples in the dataset.
        seed: The seed of the run.
        epoch: The epoch of the next iteration.
        start: The number of examples of this epoch that all ranks together have used before.
        rank: The rank of this process.
        world_size: The number of ranks.
    """

    def __init__(
        self,
        data: Sized | int,
        seed: int,
        *,
        epoch: int = 0,
        start: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Sample from the dataset `data`, or from that many examples.

        By default, the rank and the number of ranks are those of torch.distributed or torchrun.

        Raises:
            WrongUse: An argument is out of range.
        """
        self.n = operator.index(data) if not isinstance(data, Sized) else len(data)
        if self.n < 0:
            raise WrongUse(f"n={self.n} is not a number of examples: give 0 or more")
        self.seed = seed
        self.rank = ranks.rank() if rank is None else rank
        self.world_size = ranks.world_size() if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise WrongUse(
                f"rank={self.rank} is not a rank of {self.world_size} processes: give 0 to "
                f"{self.world_size - 1}, or leave out rank and world_size"
            )
        self.set_epoch(epoch, start)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Set the epoch of the next iteration, and the position at which it starts.

        Raises:
            WrongUse: `start` is outside the epoch.
        """
        if not 0 <= start <= self.n:
            raise WrongUse(
                f"start={start} is not a position in an epoch of {self.n} examples: give 0 to "
                f"{self.n}, such as step % steps_per_epoch * batch_size"
            )
        self.epoch, self.start = operator.index(epoch), operator.index(start)

    def __len__(self) -> int:
        """Return the number of examples that this rank yields."""
        return (self.n - self.start) // self.world_size

    def __iter__(self) -> Iterator[int]:
        order = epoch_order(self.seed, self.epoch, self.n)
        stop = self.start + len(self) * self.world_size
        return iter(order[self.start + self.rank : stop : self.world_size])
