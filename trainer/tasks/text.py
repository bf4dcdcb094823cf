"""Train a language model on the bytes of a folder of text files."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from trainbox import Task, WrongUse
from trainer.tasks.language.corpus import Windows, split_texts, test_texts
from trainer.tasks.language.gpt import Gpt
from trainer.tasks.reading.fields import FROM_0_BELOW_1, FROM_1, SHARE, check_fields

# Shape suffixes: B windows of a batch, T bytes of a window, K values of a byte.


@dataclass(frozen=True)
class Text(Task):
    """A language model of bytes, with the shape of GPT-2, and a folder of text files.

    Without `folder`, the texts are modules of Python's standard library.
    """

    epochs: ClassVar[int] = 2
    batch_size: ClassVar[int] = 32
    learning_rate: ClassVar[float] = 1e-3

    folder: str = ""
    # The endings of text files, as in txt/md.
    endings: str = "txt/md/rst/py"
    validation_share: float = 0.1
    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 256
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, FROM_1, "layers", "heads", "width", "context")
        check_fields(self, SHARE, "validation_share")
        check_fields(self, FROM_0_BELOW_1, "dropout")
        if self.width % self.heads:
            lower = self.width // self.heads * self.heads
            near = f"{lower} or {lower + self.heads}" if lower else f"{self.heads}"
            raise WrongUse(
                f"--set width={self.width}: use a multiple of heads={self.heads}, such as {near}"
            )
        if not all(ending.strip(".") for ending in self.endings.split("/")):
            raise WrongUse(f"--set endings={self.endings}: use endings as in txt/md")

    def train_dataset(self, data_dir: Path) -> Dataset[Any]:
        return self._windows(data_dir)[0]

    def validation_dataset(self, data_dir: Path) -> Dataset[Any]:
        return self._windows(data_dir)[1]

    def test_dataset(self, data_dir: Path) -> Dataset[Any]:
        texts = test_texts(self._folder(data_dir), self._endings)
        return Windows(texts, self.context, shifted=False, purpose="the test")

    def notes(self, train: Dataset[Any], validation: Dataset[Any]) -> dict[str, str]:
        assert isinstance(train, Windows) and isinstance(validation, Windows)
        source = self.folder or "Python's standard library"
        return {
            "text": f"{source}, {train.bytes:,} bytes in {len(train.paths):,} file(s)",
            "validation": f"{validation.bytes:,} bytes in {len(validation.paths):,} file(s)",
        }

    def build_model(self) -> nn.Module:
        return Gpt(self.layers, self.heads, self.width, self.context, self.dropout)

    def prepare(self, batch: Any, training: bool) -> tuple[Tensor, Tensor]:
        """Return the bytes (B, T) and the bytes that follow each of them (B, T)."""
        bytes_BT = batch[0].long()
        return bytes_BT[:, :-1], bytes_BT[:, 1:]

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the mean cross-entropy of each window's bytes, in nats."""
        bytes_BT, next_BT = batch
        logits_BTK = model(bytes_BT).float()
        losses_BT = F.cross_entropy(
            logits_BTK.flatten(0, 1), next_BT.flatten(), reduction="none"
        ).view_as(next_BT)
        return {"cross_entropy": losses_BT.mean(1)}

    def metrics(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        loss = totals["loss"] / totals["examples"]
        return {
            "loss": float(loss),
            "bits_per_byte": float(loss / math.log(2)),
            "perplexity": float(loss.exp()),
        }

    def _windows(self, data_dir: Path) -> tuple[Windows, Windows]:
        """Return the training part and the validation part.

        Raises:
            WrongUse: the folder cannot be used, or a part is shorter than a window.
        """
        train, held_out = split_texts(self._folder(data_dir), self._endings, self.validation_share)
        return (
            Windows(train, self.context, shifted=True, purpose="training"),
            Windows(held_out, self.context, shifted=False, purpose="validation"),
        )

    def _folder(self, data_dir: Path) -> Path | None:
        return data_dir / self.folder if self.folder else None

    @property
    def _endings(self) -> tuple[str, ...]:
        return tuple(f".{ending.strip('.').lower()}" for ending in self.endings.split("/"))
