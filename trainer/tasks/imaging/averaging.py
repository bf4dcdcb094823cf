"""Keep the moving average of a model's weights, and use it for evaluation."""

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Averaged(nn.Module):
    """A model that trains, and its exponential moving average, which computes in evaluation mode.

    The average is a frozen copy of the model, so checkpoints contain it. Running statistics are
    averaged, too. `update` must be called after each optimizer step. The first one copies the
    weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.model = model
        self.averaged = AveragedModel(
            model,
            multi_avg_fn=get_ema_multi_avg_fn(decay),
            use_buffers=True,
        )
        self.averaged.requires_grad_(False)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        output: Tensor = (self.model if self.training else self.averaged)(images_BCHW)
        return output

    def update(self) -> None:
        """Move the average towards the weights: decay x average + (1 - decay) x weights."""
        self.averaged.update_parameters(self.model)
