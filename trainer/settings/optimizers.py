"""The optimizers that `--optimizer` names: one table for the option, for the check of settings and
for the construction.
"""

from typing import TYPE_CHECKING, Any

from trainer.errors import WrongUse

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from torch.optim import Optimizer

# By name: the class in torch.optim, and what it is given beside the learning rate. Torch is not
# imported for the names.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "adam": ("Adam", {}),
    "sgd": ("SGD", {"momentum": 0.9}),
}


def check_optimizer(name: object) -> None:
    """Raise WrongUse unless `name` is in the table."""
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise WrongUse(f"--optimizer {name} does not exist: use {', '.join(OPTIMIZERS)}")


def make_optimizer(
    name: str,
    parameters: "Iterable[nn.Parameter]",
    learning_rate: float,
    weight_decay: float | None,
) -> "Optimizer":
    """Return the optimizer `name` of the table; a `weight_decay` of None is the optimizer's own.

    Raises:
        WrongUse: there is no such optimizer.
    """
    check_optimizer(name)
    import torch

    class_name, options = OPTIMIZERS[name]
    given = options if weight_decay is None else options | {"weight_decay": weight_decay}
    optimizer: Optimizer = getattr(torch.optim, class_name)(
        parameters, lr=learning_rate, fused=True, **given
    )
    return optimizer
