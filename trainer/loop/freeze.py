"""Leave out weights of the training, as `--freeze` requests."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from trainbox.contract.errors import WrongUse

_SHOWN = 5
_STATISTIC = "running_mean"


def freeze(model: nn.Module, patterns: Sequence[str]) -> str:
    """Let the parameters that match a pattern not train, and return a line about them.

    A pattern matches the whole name of a tensor, as `layer1.0.conv1.weight`, or the name of a
    module that has it, as `layer1`. If it matches the `running_mean` of a batch norm, this batch
    norm computes in evaluation mode, so its statistics do not change.

    Raises:
        WrongUse: A pattern matches nothing, or no parameter is left to train.
    """
    if not patterns:
        return ""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    norms = dict(_norms(model))
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in (*trained, *norms)):
            raise WrongUse(
                f"--freeze {pattern} matches no trained tensor of the model: use the name of one "
                f"({_some(list(trained))}), or of its module, with * for any characters"
            )
    frozen = [name for name in trained if any(_matches(name, p) for p in patterns)]
    still = [norm for name, norm in norms.items() if any(_matches(name, p) for p in patterns)]
    if len(frozen) == len(trained):
        raise WrongUse(
            f"--freeze {' --freeze '.join(patterns)} matches all {len(trained)} trained tensors, "
            "so nothing would train: leave out a layer, such as the last one"
        )
    for name in frozen:
        trained[name].requires_grad_(False)
    for norm in still:
        # A hook, because model.train() sets the mode of all modules.
        norm.register_forward_pre_hook(_evaluate)
    line = f"{len(frozen)} of {len(trained)} tensors"
    if frozen:
        count, whole = (sum(trained[n].numel() for n in names) for names in (frozen, trained))
        line += f" ({count:,} of {whole:,} parameters)"
    if still:
        line += f", and the statistics of {len(still)} batch norm{'s' if len(still) > 1 else ''}"
    return line


def _evaluate(module: nn.Module, _inputs: Any) -> None:
    module.training = False


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return each batch norm with statistics, by the full name of its running mean."""
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            yield f"{name}.{_STATISTIC}".lstrip("."), module


def _matches(name: str, pattern: str) -> bool:
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
