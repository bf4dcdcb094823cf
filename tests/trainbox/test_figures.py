"""A Classification's pictures show the examples that the model mistakes, wherever in the
validation set they are.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

from tests.support.here import Here
from tests.support.ranks import Ranks
from trainbox import pictures
from trainbox.classification import Classification, most_mistaken

_TASK = "tests.trainbox.test_figures:Mistaken"


class _Positive(nn.Module):
    """Takes an image for class 1 if its first pixel is above zero."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, images: Tensor) -> Tensor:
        return images[:, 0, 0, :1] * torch.tensor([-1.0, 1.0]) * self.scale


@dataclass(frozen=True)
class Mistaken(Classification):
    """30 validation examples in batches of 8, each with its number as first pixel; 9, 25 and 26
    have the wrong label.
    """

    class_names: ClassVar[tuple[str, ...]] = ("negative", "positive")
    read: bool = False

    def _images(self, count: int, mistaken: tuple[int, ...]) -> Dataset[Any]:
        images = torch.arange(1, count + 1).float().reshape(-1, 1, 1, 1).expand(-1, 1, 2, 2).clone()
        labels = torch.ones(count, dtype=torch.int64)
        labels[list(mistaken)] = 0
        held = TensorDataset(images, labels)
        return Subset(held, range(count)) if self.read else held

    def train_dataset(self, data_dir: Path) -> Any:
        return self._images(16, ())

    def validation_dataset(self, data_dir: Path) -> Any:
        return self._images(30, (9, 25, 26))

    def build_model(self) -> nn.Module:
        return _Positive()

    def figures(
        self, model: nn.Module, batch: Any, totals: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        Path("shown.json").write_text(json.dumps((batch[0][:, 0, 0, 0] - 1).int().tolist()))
        return super().figures(model, batch, totals)


_ONE_STEP = (
    *("train", _TASK, "--device", "cpu", "--max-steps", "1", "--lr", "1e-9"),
    *("--batch-size", "8"),
)
_SHOWN = [25, 26, 9, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("read", ["true", "false"])
def test_mistakes_of_all_batches_come_first(here: Here, read: str) -> None:
    here.succeeds(*_ONE_STEP, "--set", f"read={read}", "--workers", "0")
    assert json.loads((here.folder / "shown.json").read_text()) == _SHOWN


def test_several_processes_show_the_same(ranks: Ranks) -> None:
    """The third mistake is in a batch of the other process."""
    ended = ranks(2, *_ONE_STEP, "--shards", "2")
    assert ended.codes == [0, 0], ended
    assert json.loads((ranks.folder / "shown.json").read_text()) == [25, 26, 9, 0], (
        "25 examples, because a process computes 25 at once"
    )


def test_batches_are_chosen_until_the_sheet_is_full() -> None:
    right, one_wrong, many_wrong = ([[8, 0], [0, 0]], [[7, 1], [0, 0]], [[0, 20], [20, 0]])
    assert most_mistaken(torch.tensor([right, one_wrong, right, one_wrong])) == [1, 3]
    assert most_mistaken(torch.tensor([one_wrong, many_wrong, one_wrong])) == [1]
    assert most_mistaken(torch.tensor([right])) == []
    assert len(most_mistaken(torch.tensor([one_wrong] * 20))) == 8


def test_a_sheet_draws_mistakes_in_red() -> None:
    images, labels = torch.rand(3, 1, 8, 8), torch.tensor([0, 1, 1])
    sheet = pictures.example_sheet(images, labels, torch.tensor([1, 1, 1]), ("cat", "dog"))
    red = torch.tensor([190, 20, 20], dtype=torch.uint8)[:, None]
    columns = (sheet.flatten(1) == red).all(0).reshape(sheet.shape[1:]).any(0).nonzero()
    assert columns.numel() and int(columns.max()) < 16 + 168 + 16, "under the first image alone"


def _ink(counts: list[list[int]]) -> torch.Tensor:
    """Return where the first cell of a confusion matrix is not its own shade: (H, W)."""
    picture = pictures.confusion_matrix(torch.tensor(counts), ("a", "b"))
    margin = picture.shape[1] - 28 - 2 * 88
    cell = picture[:, margin + 1 : margin + 85, margin + 1 : margin + 85].float()
    return (cell - cell[:, :1, :1]).abs().sum(0) > 0


def test_letters_beyond_ascii_are_drawn() -> None:
    # A letter that a font does not have is drawn as a box, so all such names look the same.
    drawn = [pictures.confusion_matrix(torch.eye(1), (name,)) for name in ("\u00f6", "\u0444")]
    assert drawn[0].shape != drawn[1].shape or not torch.equal(*drawn)
    images, label = torch.zeros(1, 3, 8, 8), torch.zeros(1, dtype=torch.int64)
    sheets = [
        pictures.example_sheet(images, label, label, (name,)) for name in ("\u00f6", "\u00fc")
    ]
    assert not torch.equal(*sheets)


@pytest.mark.parametrize("count", [7, 12345, 999999, 123456789])
def test_a_count_does_not_touch_the_edge_of_its_cell(count: int) -> None:
    ink = _ink([[count, 0], [0, 1]])
    assert ink.any()
    columns = ink.any(0).nonzero()
    assert int(columns.min()) >= 3 and int(columns.max()) < ink.shape[1] - 3


def test_many_classes_have_small_cells() -> None:
    names = [f"{number}" for number in range(41)]
    sizes = [
        pictures.confusion_matrix(torch.zeros(count, count), names[:count]).shape[1]
        for count in (40, 41)
    ]
    assert sizes[1] < sizes[0] / 1.9
