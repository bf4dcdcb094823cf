"""Start a model from the weights of another training: match tensors by name, load and report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from trainbox.errors import WrongUse
from trainbox.tensor_files import read_tensor_file

# The entries of a checkpoint that may contain the weights.
_OF_CHECKPOINTS = ("model", "state_dict", "model_state_dict")
_SHOWN = 3
# The names of a moving average, see trainer/tasks/imaging/models.py.
_AVERAGE = "averaged.module."
# How DistributedDataParallel and torch.compile start the names of all tensors.
_WRAPPERS = ("module.", "_orig_mod.")
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Match:
    """Which tensors of a model are in a file.

    `loaded`, `new` and `left_out` are names of tensors: in both, only in the model, and only in the
    file. A tensor of the last layer is also `new` if the file has it in another shape.
    """

    loaded: tuple[str, ...]
    new: tuple[str, ...]
    left_out: tuple[str, ...]

    def line(self, last: str, outputs: str, removed: str = "") -> str:
        """Return a line such as `120 of 122 tensors; fc is new (3 classes)`.

        `last` is the name of the last layer, and `outputs` describes what it returns. `removed` is
        the start of the names that `unwrapped` removed.
        """
        text = f"{len(self.loaded)} of {len(self.loaded) + len(self.new)} tensors"
        if layers := list(dict.fromkeys(name.rpartition(".")[0] or name for name in self.new)):
            text += f"; {_some(layers)} {'is' if len(layers) == 1 else 'are'} new"
            text += f" ({outputs})" if last in layers else ""
        if others := [name for name in self.left_out if name not in self.new]:
            text += f"; {len(others)} of the file are left out ({_some(others)})"
        if removed:
            text += f"; names of the file without {removed}"
        return text


def match(model: nn.Module, tensors: Mapping[str, Tensor], source: str, remedy: str) -> Match:
    """Return which of `tensors` can be loaded into `model`, without loading them.

    Only names and shapes count, so the model and the tensors can be on the device `meta`. `source`
    names the tensors in messages, and `remedy` ends these.

    Raises:
        WrongUse: no tensor is one of the model, or only tensors of the last layer are, a tensor
            outside the last layer has another shape, or a tensor has complex numbers and the
            model's tensor does not.
    """
    state, head = tensors_of(model), last_layer(model)
    loaded, new = [], []
    for name, value in state.items():
        given = tensors.get(name)
        if given is not None and given.is_complex() and not value.is_complex():
            raise WrongUse(f"{source}: {name} has complex numbers instead of real ones: {remedy}")
        if given is not None and given.shape == value.shape:
            loaded.append(name)
        elif given is None or name.rpartition(".")[0] == head:
            new.append(name)
        else:
            raise WrongUse(
                f"{source}: {name} has shape {tuple(given.shape)} instead of "
                f"{tuple(value.shape)}: {remedy}"
            )
    # Models of other kinds often share the name of the last layer, such as fc.
    body = [name for name in state if name.rpartition(".")[0] != head]
    if not loaded or (body and not set(body) & set(loaded)):
        outside = f" outside its last layer {head}" if loaded else ""
        raise WrongUse(
            f"{source} has no tensor of the model{outside}: it has {_some(list(tensors))}, and the "
            f"model has {_some(list(state))}: {remedy}"
        )
    return Match(tuple(loaded), tuple(new), tuple(name for name in tensors if name not in loaded))


def load(model: nn.Module, tensors: Mapping[str, Tensor], found: Match) -> None:
    """Copy the tensors that `found`, the result of `match`, lists as loaded into `model`."""
    model.load_state_dict({name: tensors[name] for name in found.loaded}, strict=False)


def unwrapped(tensors: Mapping[str, Tensor], model: nn.Module) -> tuple[dict[str, Tensor], str]:
    """Return the tensors without the start that a wrapper gave to all names, and this start.

    The wrappers are DistributedDataParallel and torch.compile, also one around the other. Names
    that `model` has are kept.
    """
    known, removed, result = tensors_of(model).keys(), "", dict(tensors)
    while result and known.isdisjoint(result):
        start = next((s for s in _WRAPPERS if all(name.startswith(s) for name in result)), None)
        if start is None:
            break
        result = {name.removeprefix(start): value for name, value in result.items()}
        removed += start
    return result, removed


def trained_part(model: nn.Module) -> nn.Module:
    """Return `model`, or its part that trains if the rest is a moving average of that part.

    The first update of the average copies the weights.
    """
    part = getattr(model, "model", None)
    is_averaged = isinstance(getattr(model, "averaged", None), AveragedModel)
    return part if is_averaged and isinstance(part, nn.Module) else model


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of `model` without extra state, which is not a tensor."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def last_layer(model: nn.Module) -> str:
    """Return the name of the layer that computes the outputs: the last linear or convolution."""
    layers = [name for name, part in model.named_modules() if isinstance(part, _LAYERS)]
    return layers[-1] if layers else ""


def read_weights(path: Path, model: nn.Module) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a file for `model`, and the start that was removed from their names.

    If the file has a moving average of the weights, the averaged tensors are returned.

    Raises:
        WrongUse: as for `read_tensors`.
    """
    tensors, removed = unwrapped(read_tensors(path), model)
    averaged = [name for name in tensors if name.startswith(_AVERAGE)]
    return {name.removeprefix(_AVERAGE): tensors[name] for name in averaged or tensors}, removed


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors file, or of a file that torch.save wrote.

    torch loads weights only. The file has a state dict, or a dict with one as `model`,
    `state_dict` or `model_state_dict`.

    Raises:
        WrongUse: the file does not exist, is damaged, or has something else.
    """
    try:
        saved = read_tensor_file(path)
    except FileNotFoundError as error:
        raise WrongUse(f"{path} does not exist: check the path of the weights") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WrongUse(
            f"{path} has no weights that can be loaded ({reason}): use a .safetensors file, or the "
            "state dict of a model, written by torch.save"
        ) from error
    for name in _OF_CHECKPOINTS:
        if isinstance(saved, Mapping) and isinstance(saved.get(name), Mapping):
            saved = saved[name]
    if not isinstance(saved, Mapping) or not saved or not all(map(_is_plain, saved.values())):
        names = list(map(str, saved)) if isinstance(saved, Mapping) else []
        raise WrongUse(
            f"{path} does not contain tensors by name (it has {_some(names) or 'no names'}): use a "
            ".safetensors file, or the state dict of a model, written by torch.save"
        )
    return {str(name): value for name, value in saved.items()}


def _is_plain(value: object) -> bool:
    """Return whether `value` is a tensor that can be copied into a parameter."""
    return isinstance(value, Tensor) and not (value.is_meta or value.is_quantized)


def _some(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
