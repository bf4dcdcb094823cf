"""Add the losses since the last log entry exactly.

The means then do not depend on which rank computed which example.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from trainbox.errors import WrongUse
from trainer.parallel.world import World

_FEWEST_ROWS = 64


class RunningLosses:
    """The sum of each loss of each micro-batch since the last log entry.

    Each step writes its sums into a table on the device. Only `gather` and `means` read the table,
    with one copy to the host.
    """

    def __init__(self, world: World, micro_counts: list[int]) -> None:
        """Start without losses. `micro_counts` has the micro-batches per step of each rank."""
        self._world, self._micro_counts = world, micro_counts
        self._names: list[str] | None = None
        self._sums_NK: Tensor | None = None  # K losses of up to N micro-batches
        self._cells: list[tuple[Tensor, ...]] = []  # views of the table's elements
        self._rows = 0
        self._carried: dict[str, list[float]] = {}
        self.steps = 0

    def add(self, losses_B: Mapping[str, Tensor]) -> None:
        """Add the losses of one micro-batch, `{name: (B,)}`.

        Raises:
            WrongUse: The names differ from the names in earlier micro-batches.
        """
        if self._names is None:
            self._names = list(losses_B)
        elif list(losses_B) != self._names:
            raise WrongUse(
                f"losses() returned {', '.join(self._names)} before and {', '.join(losses_B)} "
                "now: return each loss in each step, as 0 where it does not apply"
            )
        if self._rows == len(self._cells):
            self._grow(losses_B[self._names[0]])
        for cell, loss_B in zip(self._cells[self._rows], losses_B.values(), strict=True):
            torch.sum(loss_B.detach(), None, out=cell)
        self._rows += 1

    def _grow(self, like: Tensor) -> None:
        """Double the rows of the table, which is on the device of `like`."""
        assert self._names is not None
        rows = max(_FEWEST_ROWS, 2 * self._rows)
        new_NK = like.new_zeros((rows, len(self._names)), requires_grad=False)
        if self._sums_NK is not None:
            new_NK[: self._rows] = self._sums_NK[: self._rows]
        self._sums_NK = new_NK
        self._cells = [row_K.unbind() for row_K in new_NK.unbind()]

    def gather(self) -> dict[str, list[float]]:
        """Return for each loss the sums of all micro-batches of all ranks since `clear`.

        All ranks must call this.
        """
        if self._sums_NK is None or not self._rows or self._names is None:
            return self._carried
        steps = self._rows // self._micro_counts[self._world.rank]
        gathered_NK = self._world.gather_rows(
            self._sums_NK[: self._rows], [steps * count for count in self._micro_counts]
        )
        return {
            name: [*self._carried.get(name, []), *column]
            for name, column in zip(self._names, gathered_NK.T.tolist(), strict=True)
        }

    def means(self, batch_size: int) -> dict[str, float]:
        """Return the mean of each loss over the examples of the steps since `clear`.

        `batch_size` is the global batch size. All ranks must call this.
        """
        return {
            name: _exact_sum(sums) / (self.steps * batch_size)
            for name, sums in self.gather().items()
        }

    def drop_step(self) -> None:
        """Remove the newest step, which the training skips."""
        self._rows -= self._micro_counts[self._world.rank]
        self.steps -= 1

    def clear(self) -> None:
        """Remove all losses."""
        self._rows, self._carried, self.steps = 0, {}, 0

    def restore(self, gathered: Mapping[str, list[float]], steps: int) -> None:
        """Resume from the result of `gather`, on any number of ranks."""
        self._rows, self._carried, self.steps = 0, dict(gathered), steps
        self._names = list(gathered) or None


def _exact_sum(values: list[float]) -> float:
    """Return the correctly rounded sum in any order, or NaN if a value is not finite."""
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan
