"""Examples in both datasets of a training are found, and random splits are the same split."""

import random
import re
import shutil
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from tests.support.here import Here
from tests.support.pictures import FIELDS, make_pictures
from trainer.data.overlap import in_both


def _points() -> TensorDataset:
    x = torch.randn(150, 4, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x.sum(1))


def _numpy_split() -> list[Any]:
    order = numpy.random.permutation(150)
    return [Subset(_points(), order[:120].tolist()), Subset(_points(), order[120:].tolist())]


def _python_split() -> list[Any]:
    points, order = _points().tensors, list(range(150))
    random.shuffle(order)
    parts = order[:120], order[120:]
    return [TensorDataset(*(tensor[part] for tensor in points)) for part in parts]


class _Read(Dataset[Any]):
    """Examples of which Trainbox does not know anything before it reads them."""

    def __init__(self, indices: list[int]) -> None:
        self._indices, self._points = indices, _points()

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._points[self._indices[index]]


def _data_of(here: Here, train: Any, validation: Any) -> str:
    """Return the header's lines about the data."""
    here.plant(train_dataset=lambda *_: train(), validation_dataset=lambda *_: validation())
    out = here.train(max_steps=1, workers=0)
    return "\n".join(re.findall(r"^(?:data|warning|note) .*$", out, re.MULTILINE))


@pytest.mark.parametrize(
    "split", [lambda: random_split(_points(), [0.8, 0.2]), _numpy_split, _python_split]
)
def test_a_random_split_in_both_methods_is_the_same_split(
    here: Here, split: Callable[[], Any]
) -> None:
    line = _data_of(here, lambda: split()[0], lambda: split()[1])
    assert "120 training and 30 validation examples, 0 in both, " in line
    assert "warning" not in line


def test_a_random_split_of_a_dataset_that_is_not_compared_is_the_same_split(here: Here) -> None:
    found: list[list[int]] = []

    def part(which: int) -> Subset[Any]:
        split = random_split(_Read([*range(150)]), [120, 30])[which]  # type: ignore[arg-type]
        found.append(list(split.indices))
        return split

    line = _data_of(here, lambda: part(0), lambda: part(1))
    assert "not compared" in line and "note" not in line
    assert {*found[0]} & {*found[1]}  # the first attempt
    assert not {*found[0]} & {*found[2]}


def test_examples_that_are_drawn_are_not_the_same_examples(here: Here) -> None:
    def drawn(count: int) -> TensorDataset:
        return TensorDataset(torch.randn(count, 4), torch.zeros(count))

    line = _data_of(here, lambda: drawn(50), lambda: drawn(20))
    assert "50 training and 20 validation examples, 0 in both, " in line


@pytest.mark.parametrize("shape", [(4,), (1,)])
def test_examples_that_are_drawn_and_not_compared_are_not_the_same_examples(
    here: Here, shape: tuple[int, ...]
) -> None:
    class Drawn(_Read):
        def __init__(self, count: int) -> None:
            self._x = torch.randn(count, *shape)
            self._indices = [*range(count)]
            found.append(self._x)

        def __getitem__(self, index: int) -> Any:
            return self._x[index], self._x[index].sum()

    found: list[Tensor] = []
    here.plant(losses=lambda _t, m, b: {"e": (m(b[0].expand(-1, 4)) - b[1]).square()})
    line = _data_of(here, lambda: Drawn(50), lambda: Drawn(20))
    assert "20 validation examples, not compared, " in line
    assert "note       validation_dataset() draws random numbers, and its examples cannot" in line
    assert not (found[0][:20, None] == found[1][None]).all(2).any()


class _Drawing(Dataset[Any]):
    """Draws each example when it is read, and notes it."""

    seen: list[tuple[str, float]]

    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return 20

    def __getitem__(self, _index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(4)
        self.seen.append((self.name, float(x[0])))
        return x, x.sum()


def test_examples_that_are_drawn_when_they_are_read_are_not_those_of_the_first_epoch(
    here: Here,
) -> None:
    _Drawing.seen = []
    here.plant(
        train_dataset=lambda *_: _Drawing("train"),
        validation_dataset=lambda *_: _Drawing("validation"),
    )
    here.train(workers=0, epochs=1, batch_size=4)
    found = {
        name: {value for n, value in _Drawing.seen[-40:] if n == name}
        for name in ("train", "validation")
    }
    assert len(found["train"]) == len(found["validation"]) == 20
    assert not found["train"] & found["validation"]


@pytest.mark.parametrize(
    ("validation", "count"), [(_points, 150), (lambda: Subset(_points(), range(140, 150)), 10)]
)
def test_examples_in_both_are_a_warning(
    here: Here, validation: Callable[[], Any], count: int
) -> None:
    line = _data_of(here, _points, validation)
    assert f" {count} in both, " in line
    assert f"warning    {count} of {count} validation examples are also training examples" in line


def test_test_examples_that_are_training_examples(here: Here) -> None:
    here.plant(
        train_dataset=lambda *_: _points(), test_dataset=lambda *_: Subset(_points(), range(12))
    )
    here.train(max_steps=1, workers=0)
    _, _, err = here.command("evaluate", "runs/r", "--data", "test", "--device", "cpu")
    assert "warning: 12 of 12 test examples are also training or validation examples" in err


class _Files(_Read):
    def __init__(self, names: list[str]) -> None:
        super().__init__([*range(len(names))])
        self.samples = [(name, 0) for name in names]


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [
        (_Files(["a", "b", "c"]), _Files(["c", "d"]), 1),
        (Subset(_Files(["a", "b", "c"]), [0, 1]), _Files(["c", "a"]), 1),
        (_Read([1, 2]), _Read([1, 2]), None),
        (TensorDataset(torch.ones(2, 3)), TensorDataset(torch.ones(2, 4)), None),
        (TensorDataset(torch.ones(3)), TensorDataset(torch.ones(2)), 2),
    ],
)
def test_what_is_compared(first: Dataset[Any], second: Dataset[Any], count: int | None) -> None:
    assert in_both(first, second) == count


def test_parts_of_one_dataset_are_compared_by_their_indices() -> None:
    whole = _Read([*range(10)])
    nested = Subset(Subset(whole, [5, 6, 7, 8]), [0, 3])
    assert in_both(Subset(whole, [1, 5]), nested) == 1
    assert in_both(whole, nested) == 2


def test_large_datasets_are_compared_in_a_second_or_left_out() -> None:
    begin = time.monotonic()
    images = TensorDataset(torch.zeros(60_000, 784, dtype=torch.uint8))
    assert in_both(images, TensorDataset(images.tensors[0][:10_000])) == 10_000
    assert in_both(TensorDataset(torch.empty(2**26, dtype=torch.int64)), images) is None
    assert time.monotonic() - begin < 5


def test_equal_picture_files_are_named(here: Here) -> None:
    paths = make_pictures(here.folder / "data" / "shapes", ["a", "b"], 20, 1)
    fields = {**FIELDS, "validation_share": 0.3}
    out = here.train(task="images", fields=fields, max_steps=1, batch_size=4, workers=0)
    assert "\nequal " not in out
    for number in range(12):
        shutil.copy(paths[0], paths[0].with_name(f"copy-{number}.jpg"))
    out = here.train("again", task="images", fields=fields, max_steps=1, batch_size=4, workers=0)
    assert re.search(r"\nequal +\d+ validation picture\(s\) are equal to a training picture, ", out)
