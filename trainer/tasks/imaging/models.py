"""Build the classification models of torchvision by name, with new or trained weights."""

import bisect
import difflib
import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torchvision import models
from torchvision.models import WeightsEnum

from trainbox import WrongUse
from trainbox.initial_weights import (
    Match,
    last_layer,
    load,
    match,
    read_weights,
)
from trainer.tasks.reading.download import answering, cause

# The argument of a model's builder for the size of its pictures. Others accept any size.
_SIZE_ARGUMENTS = {"vit_": "image_size", "maxvit_": "input_size"}
# Modules that only training uses, for additional losses.
_AUXILIARY = ("AuxLogits", "aux1", "aux2")
WEIGHTS_FILES = (".safetensors", ".pt", ".pth")
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Colour = tuple[float, float, float]


def check_model(name: str, weights: str) -> None:
    """Raise WrongUse if torchvision has no classification model or no weights of this name.

    `weights` is empty, a file or the name of weights of torchvision.
    """
    known = models.list_models(module=models)
    if name not in known:
        fix = _nearest(name, known)
        raise WrongUse(f"--set model={name}: torchvision has no classification model {name}: {fix}")
    if weights and not weights.endswith(WEIGHTS_FILES):
        _entry(name, weights)


def fetch_weights(name: str, weights: str) -> None:
    """Download the weights of torchvision that are not in its cache.

    Raises:
        WrongUse: the file does not exist, or cannot be downloaded.
    """
    if not weights:
        return
    if weights.endswith(WEIGHTS_FILES):
        if not Path(weights).is_file():
            raise WrongUse(f"--set weights={weights}: {weights} does not exist: check the path")
        return
    url = _entry(name, weights).url
    path = _cached(url)
    if path.is_file():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The name of a file of torchvision ends with the start of its SHA-256.
        digest = path.stem.rpartition("-")[2]
        with answering():
            torch.hub.download_url_to_file(url, str(path), hash_prefix=digest)
    # torch raises RuntimeError for a wrong digest.
    except (OSError, RuntimeError) as error:
        raise WrongUse(
            f"--set weights={weights}: {path.name} is not in {path.parent} and cannot be "
            f"downloaded ({cause(error)}): download {url} elsewhere and put the file there, or set "
            "torch's cache with TORCH_HOME"
        ) from error


def build_model(name: str, classes: int, size: int, weights: str = "") -> nn.Module:
    """Return the model `name`, which maps (B, 3, size, size) to (B, classes).

    The auxiliary outputs of GoogLeNet and Inception are left out. With `weights`, the last layer is
    new if they are for another number of classes.

    Raises:
        WrongUse: the pictures are too small for the model, or the weights cannot be read or are of
            another model.
    """
    _check_size(name, size)
    model = _without_auxiliary(_new(name, classes, size))
    if weights:
        tensors = _read(name, weights, model)
        load(model, tensors, _match(model, tensors, name, weights))
    return model


def describe_weights(name: str, classes: int, size: int, weights: str) -> str:
    """Return which tensors `build_model` takes from `weights`, and which are new."""
    model = _without_values(lambda: build_model(name, classes, size))
    tensors: Mapping[str, Tensor]
    removed = ""
    if weights.endswith(WEIGHTS_FILES):
        tensors, removed = read_weights(Path(weights), model)
    else:
        meta = _entry(name, weights).meta
        whole = (name, len(meta["categories"]), meta["min_size"][0])
        tensors = _without_values(lambda: _new(*whole)).state_dict()
    found = _match(model, tensors, name, weights)
    outputs = f"{classes} classes" if classes > 1 else "1 output"
    return f"{weights}: {found.line(last_layer(model), outputs, removed)}"


def normalization(name: str, weights: str) -> tuple[Colour, Colour]:
    """Return the mean and the deviation of the colours, from 0 to 1, that the weights expect.

    For new weights and for files, return ImageNet's mean and deviation.
    """
    if not weights or weights.endswith(WEIGHTS_FILES):
        return _IMAGENET_MEAN, _IMAGENET_STD
    preset = _entry(name, weights).transforms()
    return tuple(preset.mean), tuple(preset.std)


def _new(name: str, classes: int, size: int) -> nn.Module:
    arguments: dict[str, object] = {"num_classes": classes}
    for start, argument in _SIZE_ARGUMENTS.items():
        if name.startswith(start):
            arguments[argument] = size if argument == "image_size" else (size, size)
    if name in ("googlenet", "inception_v3"):
        arguments["init_weights"] = True  # torchvision warns without it
    try:
        model: nn.Module = models.get_model(name, weights=None, **arguments)
    except (AssertionError, ValueError) as error:
        raise WrongUse(
            f"--set size={size}: model {name} cannot be built for this size ({error}): use a "
            "multiple of its patches, such as 224"
        ) from error
    return model


def _without_auxiliary(model: nn.Module) -> nn.Module:
    if isinstance(model, models.GoogLeNet | models.Inception3):
        model.aux_logits = False
        for part in _AUXILIARY:
            if hasattr(model, part):
                setattr(model, part, None)
    return model


def _check_size(name: str, size: int) -> None:
    """Raise WrongUse if the layers of the model make pictures of `size` smaller than a pixel.

    torchvision lists the least size for its weights. Some models work with smaller pictures, so the
    model is tried without values.
    """
    listed = models.get_model_weights(name)["DEFAULT"].meta["min_size"][0]
    if size >= listed or name.startswith(tuple(_SIZE_ARGUMENTS)):
        return
    with torch.device("meta"):
        model = _without_auxiliary(_new(name, 2, size)).train()

        def works(size: int) -> bool:
            try:
                model(torch.zeros(2, 3, size, size))
            except (RuntimeError, ValueError):
                return False
            return True

        if not works(size):
            least = bisect.bisect_left(range(listed + 1), True, size + 1, key=works)
            raise WrongUse(
                f"--set size={size}: model {name} needs pictures of {least} pixels or more: use "
                f"--set size={least} or a larger one, or another model"
            )


def _without_values(build: Callable[[], nn.Module]) -> nn.Module:
    """Return a model of which only the shapes count, without memory for its values."""
    try:
        with torch.device("meta"):
            return build()
    except NotImplementedError:  # RegNet computes its widths with tensors
        with torch.random.fork_rng(devices=[]):
            return build()


def _read(name: str, weights: str, model: nn.Module) -> Mapping[str, Tensor]:
    """Return the tensors of a file for `model`, or of weights in torchvision's cache.

    torchvision renames tensors of old files, so it loads its own weights.
    """
    if weights.endswith(WEIGHTS_FILES):
        return read_weights(Path(weights), model)[0]
    entry = _entry(name, weights)
    try:
        whole: nn.Module = models.get_model(name, weights=entry)
    # torch raises many types for damaged files.
    except Exception as error:
        raise WrongUse(
            f"{_cached(entry.url)} is damaged ({(str(error).splitlines() or ['no text'])[0]}): "
            "delete the file, so that it is downloaded again"
        ) from error
    return whole.state_dict()


def _match(model: nn.Module, tensors: Mapping[str, Tensor], name: str, weights: str) -> Match:
    remedy = f"use weights of {name} for pictures of this size"
    return match(model, tensors, f"--set weights={weights}", remedy)


def _entry(name: str, weights: str) -> WeightsEnum:
    known = models.get_model_weights(name)
    if weights not in known.__members__:
        raise WrongUse(
            f"--set weights={weights}: torchvision has no such weights of {name}: "
            f"{_nearest(weights, known.__members__)} (a file ends with {', '.join(WEIGHTS_FILES)})"
        )
    return known[weights]


def _cached(url: str) -> Path:
    """Return the path at which torchvision keeps the weights of `url`."""
    return Path(torch.hub.get_dir(), "checkpoints", Path(urlsplit(url).path).name)


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"use one of {', '.join(known)}"


class Scaled(nn.Module):
    """A model of one output, as (B,) in the unit of the labels.

    The output 0 is `mean`, and 1 is one `deviation` above. Checkpoints contain both.
    """

    def __init__(self, model: nn.Module, mean: float, deviation: float) -> None:
        super().__init__()
        self.model = model
        self.mean: Tensor
        self.deviation: Tensor
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("deviation", torch.tensor(deviation))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        outputs_B: Tensor = self.model(images_BCHW).squeeze(1).float()
        return self.mean + self.deviation * outputs_B


class Averaged(nn.Module):
    """A model that trains, and its exponential moving average, which computes in evaluation mode.

    The average is a frozen copy of the model, so checkpoints contain it. Running statistics are
    averaged, too. `update` must be called after each optimizer step. The first one copies the
    weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.model, self._decay = model, decay
        self.averaged = AveragedModel(model, use_buffers=True)
        self.averaged.requires_grad_(False)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        output: Tensor = (self.model if self.training else self.averaged)(images_BCHW)
        return output

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights: decay x average + (1 - decay) x weights.

        The number of updates decides on the device whether to copy. `update_parameters` of torch
        would wait for the GPU to read it, twice in each step.
        """
        count = self.averaged.n_averaged
        share = torch.full((), 1 - self._decay, device=count.device).masked_fill(count == 0, 1)
        kept = torch.full((), self._decay, device=count.device).masked_fill(count == 0, 0)
        averages, values = (
            itertools.chain(model.parameters(), model.buffers())
            for model in (self.averaged.module, self.model)
        )
        for average, value in zip(averages, values, strict=True):
            if average.is_floating_point():
                average.lerp_(value, share)
            else:  # a count of batches
                average.copy_(average * kept + value * share)
        count += 1
