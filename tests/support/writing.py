"""Models whose forwards write what they should only read: inputs, weights, buffers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.tiny import StepCounter, Tiny


class _Written(StepCounter):
    """A model that writes as its `kind` names. Its teacher is frozen."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.merged = kind, False
        self.teacher = nn.Linear(4, 1).requires_grad_(False)
        self.rows = nn.Embedding(5, 1, max_norm=1e-3 if kind == "max_norm" else None)
        self.register_buffer("least", torch.full((4,), torch.inf))
        self.register_buffer("seen", torch.zeros(()))

    def train(self, mode: bool = True) -> "_Written":
        if self.kind == "merge" and mode == self.merged:
            self.linear.weight.data += 0.1 if self.merged else -0.1
            self.merged = not mode
        return super().train(mode)

    @torch.no_grad()
    def _write(self, inputs_B4: Tensor) -> None:
        step, weight = int(self.forwards), self.linear.weight
        follows = {"late": step >= 5, "often": step % 4 == 3, "rare": step % 6 == 5}
        match self.kind:
            case "late":
                self.teacher.weight.lerp_(weight, 0.3 * follows["late"])
            case "often" if follows["often"]:
                self.teacher.load_state_dict(self.linear.state_dict())
            case "rare" if follows["rare"]:
                self.teacher.weight.data = weight.detach().clone()
            case "decay":
                weight.mul_(0.99)
            case "data":
                weight.data.mul_(0.99)
            case "normal":
                weight.data = weight.data / weight.data.norm()
            case "clamp":
                weight.clamp_(-1e3, 1e3)
            case "least":
                self.get_buffer("least").copy_(
                    torch.minimum(self.get_buffer("least"), inputs_B4.amin(0))
                )

    @torch.no_grad()
    def _write_late_or_rarely(self, inputs_B4: Tensor) -> None:
        step, weight = int(self.forwards), self.linear.weight
        match self.kind:
            case "unseen" if step >= 8:
                self.teacher.weight.data.mul_(0.9)
            case "unseen_trained" if step >= 8:
                weight.data.mul_(0.9)
            case "prototype" if float(inputs_B4.max()) > 2.4:  # in some of the shards
                self.teacher.weight.lerp_(inputs_B4.mean(0, keepdim=True), 0.5)
            case "shared" if step >= 3 and float(inputs_B4.min()) < -2.4:
                self.teacher.weight.data = inputs_B4[:1].clone()

    @torch.no_grad()
    def _write_in_evaluation(self) -> None:
        weight = self.linear.weight
        match self.kind:
            case "clamp_eval":
                weight.clamp_(-1e-3, 1e-3)
            case "new_eval":
                self.linear.weight = nn.Parameter(weight * 2)
            case "count_eval":
                self.get_buffer("seen").add_(1)

    def forward(self, inputs_B4: Tensor) -> Tensor:
        if self.training:
            self._write(inputs_B4)
            self._write_late_or_rarely(inputs_B4)
        else:
            self._write_in_evaluation()
        if self.kind == "inputs":
            inputs_B4 = inputs_B4.sub_(0.5).mul_(2)
        elif self.kind == "copies":
            inputs_B4 = inputs_B4.sub(0.5).mul(2)
        rows_B = self.rows(torch.zeros(len(inputs_B4), dtype=torch.int64))[:, 0]
        taught_B = self.teacher(inputs_B4).squeeze(1)
        return super().forward(inputs_B4) + rows_B + 0.1 * taught_B + self.get_buffer("seen")


@dataclass(frozen=True)
class Writing(Tiny):
    """Trains a model that writes as `kind` names."""

    kind: str = ""

    def build_model(self) -> nn.Module:
        return _Written(self.kind)

    def prepare(self, batch: Any, training: bool) -> Any:
        if self.kind == "prepare":
            batch[0].sub_(0.5).mul_(2)
        elif self.kind == "prepare_copies":
            return batch[0].sub(0.5).mul(2), batch[1]
        return batch

    def statistics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        sums = super().statistics(model, batch)
        if self.kind == "statistics":
            batch[1].zero_()
        return sums
