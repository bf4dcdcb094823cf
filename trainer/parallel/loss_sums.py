"""The losses since the last log entry: added exactly, so that their mean does not depend on who
computed what.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.errors import WrongUse
from trainer.parallel.world import World


class RunningLosses:
    """Keeps each micro-batch's losses as they come, and adds them when asked: a step then pays for
    an append alone.
    """

    def __init__(self, world: World, micro_counts: list[int]) -> None:
        """`micro_counts`: how many micro-batches of a step each process has, the first's first."""
        self._world, self._micro_counts = world, micro_counts
        self._names: list[str] | None = None
        self._own: list[list[Tensor]] = []
        self._carried: dict[str, list[float]] = {}
        self.steps = 0

    def add(self, losses_B: Mapping[str, Tensor]) -> None:
        """One micro-batch's losses, per example.

        Raises:
            WrongUse: they have other names than before.
        """
        if self._names is None:
            self._names = list(losses_B)
        elif list(losses_B) != self._names:
            raise WrongUse(
                f"losses() gave {', '.join(self._names)} before and {', '.join(losses_B)} "
                "now: give each loss in each step, "
                "as 0 where it does not apply"
            )
        self._own.append([_compact(loss_B.detach()) for loss_B in losses_B.values()])

    def gather(self) -> dict[str, list[float]]:
        """For each loss every micro-batch's sum since `clear`, of all processes; each process must
        call it.
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
        """The mean of each loss over the examples of the steps since `clear`; each process must
        call it.
        """
        return {
            name: _exact_sum(sums) / (self.steps * batch_size)
            for name, sums in self.gather().items()
        }

    def drop_step(self) -> None:
        """Forget the newest step, which is left out of the training."""
        del self._own[-self._micro_counts[self._world.rank] :]
        self.steps -= 1

    def clear(self) -> None:
        self._own, self._carried, self.steps = [], {}, 0

    def restore(self, gathered: Mapping[str, list[float]], steps: int) -> None:
        """Continue from what `gather` gave, on any number of processes."""
        self._own, self._carried, self.steps = [], dict(gathered), steps
        self._names = list(gathered) or None


def _compact(loss_B: Tensor) -> Tensor:
    """Without the rest of a table that it may be a view of, which would be kept with it."""
    return loss_B.clone() if loss_B.untyped_storage().nbytes() > loss_B.nbytes else loss_B


def _exact_sum(values: list[float]) -> float:
    """The correctly rounded sum, whatever their order; NaN where some are not finite."""
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan
