"""Fit a student matrix to a low-rank teacher by gradient descent or by guess and check."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainbox import Task, WrongUse
from trainer.tasks.reading.fields import FROM_1, check_fields

# Shape suffixes: N examples, B examples of a batch, S rows and columns of a matrix, R inner
# dimensions, D draws.

_FRESH_EXAMPLES = 512
_NOT_YET = 1e9  # the error of a student that was never drawn


@dataclass(frozen=True)
class TeacherStudent(Task):
    """A student learns a low-rank matrix from noiseless measurements; gd or gnc (guess and check).

    The teacher is `U V` of rank `teacher_rank`. The student is `U V` with inner dimension
    `student_dim`. Each is drawn with shape `size` x `size` and entries of variance 1. An example is
    a matrix of normal numbers and its inner product with the teacher. The scale is such that a
    student of zeros has an error of 1. The teacher and the examples depend on --seed.

    `gnc` draws students until one has a training error of at most `epsilon`, or until `max_draws`
    (Chiang et al., ICLR 2023).
    """

    learning_rate: ClassVar[float] = 3e-2
    best_by: ClassVar[str] = "min:train_error"

    teacher_rank: int = 2
    student_dim: int = 8
    size: int = 8
    examples: int = 128
    method: str = "gd"
    epsilon: float = 1e-3
    max_draws: int = 1_000_000
    draws_per_step: int = 4096

    def __post_init__(self) -> None:
        if self.method not in ("gd", "gnc"):
            raise WrongUse(
                f"--set method={self.method}: use gd (gradient descent) or gnc (guess and check)"
            )
        whole = [name for name, value in vars(self).items() if isinstance(value, int)]
        check_fields(self, FROM_1, *whole)

    @property
    def epochs(self) -> int:  # type: ignore[override]
        """Enough epochs for all draws, because an epoch has at least one step."""
        return 100 if self.method == "gd" else -(-self.max_draws // self.draws_per_step)

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return min(32, self.examples)

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        matrices_NSS, targets_N = self._measured
        return TensorDataset(matrices_NSS[: self.examples], targets_N[: self.examples])

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        """Return the training examples for the training error, and then fresh examples.

        The third tensor is true for training examples.
        """
        matrices_NSS, targets_N = self._measured
        return TensorDataset(matrices_NSS, targets_N, torch.arange(len(targets_N)) < self.examples)

    def build_model(self) -> nn.Module:
        return Student(self.size, self.student_dim, 0.1 if self.method == "gd" else 1.0)

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        matrices_BSS, targets_B = batch
        return {"squared_error": (model(matrices_BSS) - targets_B).square()}

    def statistics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        matrices_BSS, targets_B, seen_B = batch
        errors_B = (model(matrices_BSS).float() - targets_B).square()
        return {
            "seen": seen_B.sum(),
            "train_error": (errors_B * seen_B).sum(),
            "generalisation_error": (errors_B * ~seen_B).sum(),
            "draws": model.get_buffer("draws") * len(targets_B),
        }

    def metrics(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        return {
            "train_error": float(totals["train_error"] / totals["seen"]),
            "generalisation_error": float(
                totals["generalisation_error"] / (totals["examples"] - totals["seen"])
            ),
            "draws": float(totals["draws"] / totals["examples"]),
        }

    def finished(self, metrics: Mapping[str, float]) -> bool:
        return metrics["train_error"] <= self.epsilon or metrics["draws"] >= self.max_draws

    def figures(
        self, model: nn.Module, batch: Any, totals: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        assert isinstance(model, Student)
        matrix_SS = (model.left_SR @ model.right_RS).detach().float().cpu()
        return {
            "student": _tiles(matrix_SS),
            "singular_values": _bars(torch.linalg.svdvals(matrix_SS)),
        }

    def build_optimizer(
        self, model: nn.Module, name: str, learning_rate: float, weight_decay: float | None
    ) -> torch.optim.Optimizer | tuple[torch.optim.Optimizer, ...]:
        if self.method == "gd":
            return super().build_optimizer(model, name, learning_rate, weight_decay)
        assert isinstance(model, Student)
        matrices_NSS, targets_N = (part[: self.examples] for part in self._measured)
        return GuessAndCheck(
            model, matrices_NSS, targets_N, self.epsilon, self.max_draws, self.draws_per_step
        )

    @cached_property
    def _measured(self) -> tuple[Tensor, Tensor]:
        """Return the training examples and then the fresh examples: ((N, S, S), (N,)).

        They are drawn in `train_dataset`, before which torch is seeded.
        """
        size, rank = self.size, self.teacher_rank
        teacher_SS = torch.randn(size, rank) @ torch.randn(rank, size) / rank**0.5
        matrices_NSS = torch.randn(self.examples + _FRESH_EXAMPLES, size, size)
        return matrices_NSS, (matrices_NSS * teacher_SS).sum((1, 2)) / size


class Student(nn.Module):
    """The product of two factors, drawn with `scale`.

    The model maps measurement matrices (B, S, S) to measurements (B,).
    """

    draws: Tensor
    seed: Tensor
    error: Tensor

    def __init__(self, size: int, dim: int, scale: float) -> None:
        super().__init__()
        self.left_SR = nn.Parameter(scale * torch.randn(size, dim) / dim**0.5)
        self.right_RS = nn.Parameter(scale * torch.randn(dim, size))
        # For guess and check: the number of draws, their seed, and the error of the best student.
        self.register_buffer("draws", torch.zeros((), dtype=torch.float64))
        self.register_buffer("seed", torch.randint(2**31, ()))
        self.register_buffer("error", torch.tensor(_NOT_YET, dtype=torch.float64))

    def forward(self, matrices_BSS: Tensor) -> Tensor:
        output_B: Tensor = (matrices_BSS * (self.left_SR @ self.right_RS)).sum((1, 2)) / len(
            self.left_SR
        )
        return output_B


class GuessAndCheck(torch.optim.Optimizer):
    """An optimizer that draws students, and keeps the first with an error of at most `epsilon`.

    Until then, it keeps the best student. It ignores gradients. The draws depend only on the
    model's seed and the number of draws so far. So all processes draw the same students, although
    they have different examples.
    """

    def __init__(
        self,
        model: Student,
        matrices_NSS: Tensor,
        targets_N: Tensor,
        epsilon: float,
        max_draws: int,
        draws_per_step: int,
    ) -> None:
        super().__init__(model.parameters(), {"lr": 0.0})
        device = model.left_SR.device
        self.model, self.matrices_NSS, self.targets_N = (
            model,
            matrices_NSS.to(device),
            targets_N.to(device),
        )
        self.epsilon, self.max_draws, self.draws_per_step = epsilon, max_draws, draws_per_step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Draw students, unless one was found or `max_draws` is reached."""
        model, left_SR, right_RS = self.model, self.model.left_SR, self.model.right_RS
        drawn = int(model.draws)
        count = min(self.draws_per_step, self.max_draws - drawn)
        if count <= 0 or model.error <= self.epsilon:
            return
        # Draw `count` students and compute their training errors.
        generator = torch.Generator(left_SR.device).manual_seed(int(model.seed) + drawn)
        left_DSR, right_DRS = (
            torch.randn((count, *factor.shape), generator=generator, device=factor.device)
            for factor in (left_SR, right_RS)
        )
        left_DSR /= left_SR.shape[1] ** 0.5
        predictions_DN = (
            (left_DSR @ right_DRS).flatten(1) @ self.matrices_NSS.flatten(1).T / len(left_SR)
        )
        errors_D = (predictions_DN - self.targets_N).square().mean(1)
        # Keep the first that fits, or else the best of all draws so far.
        fitting = (errors_D <= self.epsilon).nonzero()
        kept = int(fitting[0]) if len(fitting) else int(errors_D.argmin())
        model.draws += kept + 1 if len(fitting) else count
        if errors_D[kept] < model.error:
            model.error.copy_(errors_D[kept])
            left_SR.copy_(left_DSR[kept])
            right_RS.copy_(right_DRS[kept])


def _tiles(matrix_SS: Tensor) -> Tensor:
    """Draw a matrix with blue for values below 0, white for 0, and red for values above 0.

    This does not use matplotlib, whose import would take most of the time of a small trial.
    """
    share_SS = matrix_SS / matrix_SS.abs().max().clamp(min=1e-9)
    channels = (1 - (-share_SS).clamp(min=0), 1 - share_SS.abs(), 1 - share_SS.clamp(min=0))
    picture = (torch.stack(channels) * 255).byte()
    side = max(1, 256 // len(matrix_SS))
    return picture.repeat_interleave(side, 1).repeat_interleave(side, 2)


def _bars(values_S: Tensor) -> Tensor:
    """Draw a bar for each value. The largest value has the full height."""
    height, width = 160, max(2, 256 // len(values_S))
    heights_S = (values_S / values_S.max().clamp(min=1e-9) * (height - 10)).round()
    inside = torch.arange(height).flip(0)[:, None] < heights_S.repeat_interleave(width)[None]
    inside[:, ::width] = False  # a gap before each bar
    return torch.where(inside, 60, 255).byte().expand(3, -1, -1).clone()
