"""Add the losses since the last log entry exactly.

The means then do not depend on which rank computed which example.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.errors import WrongUse
from trainer.parallel.world import World


class RunningLosses:
    """The losses of each micro-batch since the last log entry.

    They are added only by `gather` and `means`, so that a step costs only an append.
    """

    def __init__(self, world: World, micro_counts: list[int]) -> None:
        """Start without losses. `micro_counts` has the micro-batches per step of each rank."""
        self._world, self._micro_counts = world, micro_counts
        self._names: list[str] | None = None
        self._own: list[list[Tensor]] = []
        self._carried: dict[str, list[float]] = {}
        self.steps = 0

    def add(self, losses_B: Mapping[str, Tensor]) -> None:
        """Add the losses of one micro-batch, `{name: (B,)}`.

        Raises:
            WrongUse: The names differ from those of the previous micro-batches.
        """
        if self._names is None:
            self._names = list(losses_B)
        elif list(losses_B) != self._names:
            raise WrongUse(
                f"losses() returned {', '.join(self._names)} before and {', '.join(losses_B)} "
                "now: return each loss in each step, as 0 where it does not apply"
            )
        self._own.append([_compact(loss_B.detach()) for loss_B in losses_B.values()])

    def gather(self) -> dict[str, list[float]]:
        """Return for each loss the sums of all micro-batches of all ranks since `clear`.

        All ranks must call this.
        """
        if not self._own or self._names is None:
            return self._carried
        sums_NK = torch.stack(
            [torch.stack([loss_B.sum() for loss_B in losses]) for losses in self._own]
        )
        steps = len(self._own) // self._micro_counts[self._world.rank]
        gathered_NK = self._world.gather_rows(
            sums_NK, [steps * count for count in self._micro_counts]
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
        del self._own[-self._micro_counts[self._world.rank] :]
        self.steps -= 1

    def clear(self) -> None:
        """Remove all losses."""
        self._own, self._carried, self.steps = [], {}, 0

    def restore(self, gathered: Mapping[str, list[float]], steps: int) -> None:
        """Resume from the result of `gather`, on any number of ranks."""
        self._own, self._carried, self.steps = [], dict(gathered), steps
        self._names = list(gathered) or None


def _compact(loss_B: Tensor) -> Tensor:
    """Return a copy if `loss_B` is a view, so that the rest of its storage can be freed."""
    return loss_B.clone() if loss_B.untyped_storage().nbytes() > loss_B.nbytes else loss_B


def _exact_sum(values: list[float]) -> float:
    """Return the correctly rounded sum in any order, or NaN if a value is not finite."""
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan
