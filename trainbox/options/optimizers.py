"""The table of optimizers for the option `--optimizer`, its check and the construction."""

from typing import TYPE_CHECKING, Any

from trainbox.errors import WrongUse

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from torch.optim import Optimizer

# The class in torch.optim and its options for each name. The table does not import torch, because
# the command line reads it.
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
    """Return the optimizer `name` of the table.

    If `weight_decay` is None, the default of the optimizer's class is used.

    Raises:
        WrongUse: the optimizer does not exist.
    """
    check_optimizer(name)
    import torch

    class_name, options = OPTIMIZERS[name]
    given = options if weight_decay is None else options | {"weight_decay": weight_decay}
    parameters = list(parameters)
    fused = not any(torch.is_tensor(each) and each.is_complex() for each in parameters)
    optimizer: Optimizer = getattr(torch.optim, class_name)(
        parameters, lr=learning_rate, fused=fused or None, **given
    )
    return optimizer
