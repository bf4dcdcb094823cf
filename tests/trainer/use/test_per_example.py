"""The columns of predictions: none is lost, and no number is called another class."""

import csv
import io
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from trainbox.errors import WrongUse
from trainer.parallel.world import World
from trainer.tasks.digits import Digits
from trainer.use.per_example import PerExample, csv_rows, json_lines, prediction_columns

A, B = Digits().class_names[:2]
WIDE = torch.zeros(2, 2)


def test_only_indices_of_classes_become_names() -> None:
    for values, names in (
        (torch.tensor([1, 0]), [B, A]),
        (torch.tensor([1, -1]), [1, -1]),
        (torch.tensor([1, 99]), [1, 99]),
        (torch.tensor([1.0, 0.5]), [1.0, 0.5]),
    ):
        columns = prediction_columns(Digits(), "id", ["x", "y"], {"prediction": values})
        assert columns == {"id": ["x", "y"], "prediction": names}


def test_numbers_have_the_digits_of_a_float32() -> None:
    values = {"x": torch.tensor([1 / 3, math.nan]).double(), "n": torch.tensor([1, 2])}
    columns = prediction_columns(Digits(), "file", ["a,b", "c"], values)
    assert csv_rows(columns) == 'file,x,n\n"a,b",0.333333343,1\nc,nan,2\n'
    assert json_lines(columns).splitlines() == [
        '{"file": "a,b", "x": 0.333333343, "n": 1}',
        '{"file": "c", "x": null, "n": 2}',
    ]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"id": WIDE[:, 0]}, "id"),
        ({"a": WIDE, "a_1": WIDE[:, 0]}, "a_1"),
        ({"a_0": WIDE[:, 0], "a": WIDE}, "a_0"),
    ],
)
def test_two_columns_of_one_name_are_refused(values: dict[str, Tensor], name: str) -> None:
    with pytest.raises(WrongUse, match=f" gives two columns the name '{name}': rename"):
        prediction_columns(Digits(), "id", ["x", "y"], values)


def test_whole_numbers_keep_all_their_digits() -> None:
    batches = SimpleNamespace(size=2, batch_size=2)
    job = SimpleNamespace(task=Digits(), world=World(0, 1, torch.device("cpu")), evaluation=batches)
    large_B = torch.tensor([2**62 + 1, -(2**53) - 1])
    observer = PerExample(job, lambda batch: {"n": batch, "x": batch / 3})  # type: ignore[arg-type]
    observer(large_B)
    found = observer.gathered()
    assert torch.equal(found["n"], large_B) and found["x"].dtype == torch.float64


@pytest.mark.parametrize("name", ["a\rb", "a\nb", 'a"b,c', "ä"])
def test_names_with_ends_of_lines_stay_in_one_row(name: str) -> None:
    text = csv_rows({"id": [name, "plain"], f"probability_{name}": [0.5, 0.25]})
    rows = [*csv.reader(io.StringIO(text, newline=""))]
    assert rows == [["id", f"probability_{name}"], [name, "0.5"], ["plain", "0.25"]]
    assert text.endswith("plain,0.25\n")
    if "\r" in name:
        assert f'"{name}",0.5\n' in text
