"""The public API, and the values that methods of a task return."""

from typing import Any

import pytest
import torch

from tests.support.tiny import Tiny
from trainbox.classification import Classification
from trainbox.errors import WrongUse
from trainbox.task import Task
from trainer.loop.losses import LossModule, check_losses

# fmt: off
_LOSSES = [
    ({"mse": torch.tensor(1.0)},
     r"loss 'mse' has shape \(\) instead of \(4,\), one value per example: use reduction='none'"),
    ({"mse": 0.5},
     r"loss 'mse' is a float: return a tensor of shape \(B,\), one value per example"),
    ({"a": torch.ones(4), "aux": 0.5}, r"loss 'aux' is a float: return a tensor"),
    ({"mse": torch.ones(4) * 1j}, "loss 'mse' is complex: return real numbers"),
    ({"mse": torch.ones(4)}, "no loss depends on a trained parameter: compute mse from"),
    ({"mse": torch.ones(3)}, r"loss 'mse' has shape \(3,\) instead of \(4,\)"),
    ({"ce": torch.ones(4), "map": torch.ones(4, 7)},
     r"loss 'map' has shape \(4, 7\) instead of \(4,\)"),
    ({"mse": (torch.ones(4, 1) - torch.ones(4)).square()}, r"loss 'mse' has shape \(4, 4\) "
     r"instead of \(4,\), one value per example: an output of shape \(4, 1\) met targets of "
     r"shape \(4,\), so squeeze the output with nn.Flatten\(0\)"),
    (torch.ones(4), "losses\\(\\) returned Tensor: return a dict"),
    ((torch.ones(4),), "losses\\(\\) returned tuple: return a dict"),
    (None, "losses\\(\\) returned None: return a dict"),
    ({}, "losses\\(\\) returned \\{\\}: return a dict"),
]
# fmt: on


@pytest.mark.parametrize(("losses", "found"), _LOSSES)
def test_losses_of_another_form_are_reported_by_task_loss_and_shape(
    losses: Any, found: str
) -> None:
    class Other(Tiny):
        def losses(self, *_: Any) -> Any:
            return losses

    task = Other()
    module = LossModule(task, task.build_model(), "cpu", None)
    with pytest.raises(WrongUse, match=f"^task Other: {found}"):
        check_losses(task, module((torch.ones(4, 4), torch.ones(4))), 4)


def test_right_losses_pass_and_are_float32() -> None:
    check_losses(Tiny(), {"a": torch.ones(4, requires_grad=True), "b": torch.ones(4)}, 4)
    task = Tiny()
    module = LossModule(task, task.build_model().bfloat16(), "cpu", None)
    losses = module((torch.ones(4, 4).bfloat16(), torch.ones(4).bfloat16()))
    assert losses["squared_error"].dtype == torch.float32


def test_default_statistics_add_up_in_full_precision() -> None:
    """Under bf16 a task's losses may be bf16: their sum over a validation batch of 500 must not be
    rounded to three digits.
    """

    class Half(Task):
        def losses(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
            return {"loss": torch.full((257,), 1.0, dtype=torch.bfloat16)}

    assert float(Half().statistics(torch.nn.Identity(), None)["loss"]) == 257.0


def test_predictions_and_metrics_name_the_same_class() -> None:
    # The probabilities of both classes are 0.5 in float32.
    outputs, labels = torch.tensor([[1e-9, 2e-9]]), torch.tensor([1])
    found = Classification().predictions(torch.nn.Identity(), (outputs, labels))
    assert found["prediction"].tolist() == outputs.argmax(1).tolist() == [1]
