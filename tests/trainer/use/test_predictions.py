"""The columns of predictions: none is lost, and no number is called another class."""

import pytest
import torch
from torch import Tensor

from trainbox.contract.errors import WrongUse
from trainer.tasks.digits import Digits
from trainer.use.predictions import prediction_columns

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
