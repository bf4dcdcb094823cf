"""Build the classification models of torchvision by name."""

import difflib

from torch import nn
from torchvision import models

from trainbox import WrongUse

# The argument of a model's builder for the size of its pictures. Others accept any size.
_SIZE_ARGUMENTS = {"vit_": "image_size", "maxvit_": "input_size"}
# Modules that only training uses, for additional losses.
_AUXILIARY = ("AuxLogits", "aux1", "aux2")


def check_model(name: str) -> None:
    """Raise WrongUse if torchvision has no classification model of this name."""
    known = models.list_models(module=models)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3)
        fix = f"did you mean {' or '.join(close)}?" if close else f"use one of {', '.join(known)}"
        raise WrongUse(f"--set model={name}: torchvision has no classification model {name}: {fix}")


def build_model(name: str, classes: int, size: int) -> nn.Module:
    """Return the model `name` with new weights, which maps (B, 3, size, size) to (B, classes).

    The auxiliary outputs of GoogLeNet and Inception are left out.
    """
    arguments: dict[str, object] = {"num_classes": classes}
    for start, argument in _SIZE_ARGUMENTS.items():
        if name.startswith(start):
            arguments[argument] = size if argument == "image_size" else (size, size)
    if name in ("googlenet", "inception_v3"):
        arguments["init_weights"] = True  # torchvision warns without it
    model: nn.Module = models.get_model(name, weights=None, **arguments)
    if isinstance(model, models.GoogLeNet | models.Inception3):
        model.aux_logits = False
        for part in _AUXILIARY:
            if hasattr(model, part):
                setattr(model, part, None)
    return model
