"""A small model with the structure of large ones: an embedding, a list of blocks and a head.

The task is named on the command line by this file's path.
"""

import json
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from trainbox import Task, stop

_WORDS, _WIDTH, _LENGTH = 41, 10, 6  # nothing here is a multiple of two processes and of four
_built: dict[str, Any] = {}


class _Block(nn.Module):
    def __init__(self, normed: bool) -> None:
        super().__init__()
        # the bias of a key would learn from noise
        self.attention = nn.MultiheadAttention(_WIDTH, 2, bias=False, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(_WIDTH, 23), nn.GELU(), nn.Linear(23, _WIDTH))
        self.norm = nn.BatchNorm1d(_LENGTH) if normed else nn.LayerNorm(_WIDTH)

    def forward(self, x_BTE: Tensor) -> Tensor:
        attended_BTE, _ = self.attention(x_BTE, x_BTE, x_BTE, need_weights=False)
        output: Tensor = self.norm(x_BTE + self.inner(attended_BTE))
        return output


class _Net(nn.Module):
    def __init__(self, normed: bool, moves: bool) -> None:
        super().__init__()
        self.moves = moves
        self.embedding = nn.Embedding(_WORDS, _WIDTH)
        self.blocks = nn.ModuleList(_Block(normed) for _ in range(2))
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(_WIDTH, _WIDTH).requires_grad_(False)

    def forward(self, words_BT: Tensor) -> Tensor:
        if self.moves:
            self.frozen.bias.data.add_(1)
        self.gathered = self.frozen.weight.dtype
        # float32 next to gathered bf16, which autocast converts
        positions_T1 = torch.linspace(0, 1, _LENGTH)[:, None]
        x_BTE = self.frozen(self.embedding(words_BT)) + positions_T1
        for block in self.blocks:
            x_BTE = block(x_BTE)
        logits_BK: Tensor = self.head(x_BTE.mean(1))
        return logits_BK


class OneARow(torch.optim.SGD):
    """Keeps one number for each row, as optimizers that save memory do."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["rows"] = torch.ones(len(parameter))


@dataclass(frozen=True)
class Sharded(Task):
    """A task whose processes write the number of values that they hold.

    Rank 1 kills itself at the step KILL_AT of the environment. At the step STOP_AT, each rank
    touches the file `waits-RANK` and waits for a signal.
    """

    batch_size: ClassVar[int] = 24

    normed: bool = False
    keeps: str = "moments"  # the kind of optimizer: moments, rows or factors
    seeded: bool = True
    moves: bool = False  # a parameter that is not trained changes, as in a mean teacher

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        return _texts(130, 1)

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        return _texts(53, 2)  # 9 batches of 6 or 5 of 12: not equally many for each process

    def build_model(self) -> nn.Module:
        if not self.seeded:
            torch.manual_seed(os.getpid())
        return _Net(self.normed, self.moves)

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        words_BT, next_B = batch
        losses_B = F.cross_entropy(model(words_BT), next_B, reduction="none")
        return {"error": losses_B}

    def statistics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        words_BT, next_B = batch
        return {
            "loss": self.losses(model, batch)["error"].sum(),
            "words": words_BT.sum() + next_B.sum(),
        }

    def metrics(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        return {"loss": float(totals["loss"] / totals["examples"]), "words": float(totals["words"])}

    def figures(
        self, model: nn.Module, batch: Any, totals: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        return {
            "logits": model(batch[0])[:1].float().sigmoid().mul(255).byte().expand(3, 4, _WORDS)
        }

    def build_optimizer(
        self, model: nn.Module, name: str, learning_rate: float, weight_decay: float | None
    ) -> torch.optim.Optimizer:
        own = {"rows": OneARow, "factors": torch.optim.Adafactor}.get(self.keeps)
        default = super().build_optimizer(model, name, learning_rate, weight_decay)
        _built["optimizer"] = own(model.parameters(), learning_rate) if own else default
        _built["model"] = model
        return _built["optimizer"]

    def schedule(self, step: int, *others: Any) -> float:
        rank = os.environ.get("RANK", "0")
        if rank == "1" and os.environ.get("KILL_AT") == str(step):
            os.kill(os.getpid(), signal.SIGKILL)
        if "STOP_AT" in os.environ:
            stop.VOTE_EVERY_S = 0.0  # the ranks vote after each step
        if os.environ.get("STOP_AT") == str(step):
            _wait_for_a_signal(Path(f"waits-{rank}"))
        if _built["optimizer"].state:
            moments = [
                s[n]
                for s in _built["optimizer"].state.values()
                for n in ("exp_avg", "exp_avg_sq")
                if n in s
            ]
            held = {"model": _held(_built["model"].parameters()), "optimizer": _held(moments)}
            held_by = (
                f"held-{os.environ.get('WORLD_SIZE', '1')}-{rank}{'-normed' * self.normed}.json"
            )
            gathered = getattr(_built["model"], "gathered", None)
            Path(held_by).write_text(json.dumps({**held, "gathered": str(gathered)}))
        return super().schedule(step, *others)


def _held(tensors: Iterable[Any]) -> int:
    return sum(
        (tensor.to_local() if hasattr(tensor, "to_local") else tensor).numel() for tensor in tensors
    )


def _wait_for_a_signal(waits: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    waits.touch()
    os.read(reader, 1)


def _texts(count: int, seed: int) -> TensorDataset:
    words = torch.randint(
        _WORDS, (count, _LENGTH + 1), generator=torch.Generator().manual_seed(seed)
    )
    return TensorDataset(words[:, :-1], words[:, 0])
