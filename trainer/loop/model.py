"""The model of a task: build and check it, freeze weights, and keep RNNs out of autocast."""

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from trainbox.errors import WrongUse, text_of
from trainbox.options.config import Settings
from trainbox.task import Task
from trainer.loop.task_checks import checked
from trainer.parallel.strategy import Strategy
from trainer.records.digest import tensor_digests

_SHOWN = 5
_STATISTIC = "running_mean"
# A part of the error of a model's method, and the cure if the method is not the user's own.
_OF_METHODS = {
    r"Calling \w+\(\) is not supported yet": (
        "return the model itself from build_model(), without torch.export"
    ),
    r"unhashable type": "write @dataclass(eq=False) above the class of the model",
}


def build_model(
    task: Task, config: Settings, strategy: Strategy, autocast_dtype: torch.dtype | None
) -> tuple[nn.Module, str]:
    """Return the task's model with the settings of the run, and a line about frozen weights.

    Raises:
        WrongUse: The model cannot be trained, saved or restored, or it differs between ranks.
    """
    strategy.world.seed(config.seed, "model")
    with strategy.world.wait_for_all("the model"):  # its weights may be downloaded
        model: nn.Module = checked(task, "build_model", task.build_model())
        _check_methods(task, model)
        _check_tensors(task, model)
    frozen = freeze(model, config.freeze)
    name = strategy.differing_weight(lambda: tensor_digests(model.state_dict()))
    if name is not None:
        raise WrongUse(
            f"task {type(task).__name__}: build_model() returns different weights on each "
            f"process, first in {name}: draw random numbers only from the global generators of "
            "torch, NumPy and Python"
        )
    keep_rnns_out_of_autocast(model, strategy.world.device.type, autocast_dtype)
    return model, frozen


def _check_methods(task: Task, model: nn.Module) -> None:
    """Use the methods of the model as a training does.

    Raises:
        WrongUse: One of them fails, such as a `train` of the user's own that needs a loader.
    """

    def each(name: str, kind: type) -> None:
        for found in getattr(model, name)():
            if not isinstance(found, kind):
                raise TypeError(f"it has a {type(found).__name__} instead of a {kind.__name__}")

    def train() -> None:
        model.train()
        inspect.signature(model.train).bind(True)

    def load_state_dict() -> None:
        saves, loads = type(model).state_dict, type(model).load_state_dict
        if loads is not nn.Module.load_state_dict:  # it may change weights
            inspect.signature(model.load_state_dict).bind({})
        elif saves is not nn.Module.state_dict:
            model.load_state_dict(model.state_dict())

    uses: dict[str, Callable[[], Any]] = {
        "modules": lambda: each("modules", nn.Module),
        "parameters": lambda: each("parameters", Tensor),
        "train": train,
        # Only bound: a call may change weights, such as merge those of an adapter.
        "eval": lambda: inspect.signature(model.eval).bind(),
        "load_state_dict": load_state_dict,
    }
    for name, use in uses.items():
        try:
            use()
        except Exception as error:
            text = f"{type(error).__name__}: {text_of(error)}".splitlines()[0].rstrip(":. ")
            cures = (cure for sign, cure in _OF_METHODS.items() if re.search(sign, text))
            cure = next(cures, None) or _renamed(model, name)
            raise WrongUse(
                f"task {type(task).__name__}: model.{name}() fails with {text}: {cure}"
            ) from error


def _renamed(model: nn.Module, name: str) -> str:
    """Return the cure if `name`, or what it uses, is not the method of nn.Module."""
    uses = (name, f"named_{name}", name.removeprefix("load_"))
    own = (
        f"rename {type(module).__name__}.{used}, which takes the place of nn.Module.{used}"
        for module in nn.Module.modules(model)
        for used in uses
        if used in vars(module)
        or getattr(type(module), used, None) is not getattr(nn.Module, used, None)
    )
    return next(own, "correct the model")


def _check_tensors(task: Task, model: nn.Module) -> None:
    """Raise WrongUse if a tensor of the model cannot be trained, saved or restored."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            fault = (
                f"does not set the size of {name}: give its layer the input size, or run an "
                "example through the model in build_model()"
            )
        elif tensor.is_meta:
            fault = f"leaves {name} on the meta device, without values: build the model on the CPU"
        elif tensor.layout != torch.strided:
            fault = f"creates {name} as a sparse tensor: register it with to_dense()"
        elif tensor.is_quantized:
            fault = (
                f"creates {name} as a quantized tensor, which cannot be saved: register its "
                "int_repr(), and make the quantized tensor of it in forward()"
            )
        elif name == "__metadata__":
            fault = f"creates {name}, the name of the header in model.safetensors: rename it"
        elif any(
            step == 0 and n > 1 for step, n in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            fault = (
                f"creates {name} with expand(), so its values share memory and cannot be "
                "restored: add .clone()"
            )
        else:
            continue
        raise WrongUse(f"task {type(task).__name__}: build_model() {fault}")


def freeze(model: nn.Module, patterns: Sequence[str]) -> str:
    """Freeze the parameters that match a pattern, and return a line about them.

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
            parts = [part.strip() for part in pattern.split(",") if part.strip()]
            if len(parts) > 1:
                raise WrongUse(
                    f"--freeze {pattern} matches no trained tensor of the model: write one option "
                    f"for each, as in --freeze {' --freeze '.join(parts)}"
                )
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


class WithoutAutocast(nn.RNNBase):
    """An RNN that computes in the type of its weights.

    For RNNs, torch's wrapper of cuDNN casts to fp16 whatever type autocast has
    (aten/src/ATen/cudnn/AutocastRNN.cpp). Without the scaler of `--precision fp16`, small gradients
    would be lost. Cells such as `nn.LSTMCell` have wrappers that use the type of autocast.
    """

    def forward(self, *inputs: Any, **named: Any) -> Any:
        weight = self._flat_weights[0]
        assert weight is not None
        with torch.autocast(weight.device.type, enabled=False):
            return super().forward(
                *_cast(inputs, weight.dtype),
                **{name: _cast(value, weight.dtype) for name, value in named.items()},
            )


def keep_rnns_out_of_autocast(
    model: nn.Module, device_type: str, autocast_dtype: torch.dtype | None
) -> None:
    """Make the RNNs of `model` compute in the type of their weights, if autocast would use fp16."""
    if device_type != "cuda" or autocast_dtype != torch.bfloat16:
        return
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and not isinstance(module, WithoutAutocast):
            # Replace the class and not the method, because DataParallel copies the attributes of a
            # module, and a method would stay bound to the original. fully_shard does the same.
            module.__class__ = _without_autocast(type(module))  # type: ignore[arg-type]


@functools.cache
def _without_autocast(kind: type[nn.RNNBase]) -> type[WithoutAutocast]:
    """Return the class `kind` without autocast, under the same name."""
    return type(kind.__name__, (WithoutAutocast, kind), {"__module__": kind.__module__})


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with all tensors of floats in `dtype`."""
    if isinstance(value, PackedSequence):
        return value.to(dtype=dtype)
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_cast(part, dtype) for part in value)
    return value
