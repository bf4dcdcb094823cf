"""Look at the losses of the first step of a rehearsal for what is allowed but looks wrong."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.swa_utils import AveragedModel

from trainer.loop.losses import check_running
from trainer.loop.out_of_memory import FIRST_STEPS
from trainer.loop.state import Job

# The operation of a loss that takes logits, what it applies to them, and its names in torch.
_OF_LOGITS = {
    "LogSoftmaxBackward0": ("softmax", "cross_entropy and log_softmax take"),
    "BinaryCrossEntropyWithLogitsBackward0": (
        "sigmoid",
        "binary_cross_entropy_with_logits takes",
    ),
}
_ACTIVATIONS = {"SigmoidBackward0": "sigmoid", "SoftmaxBackward0": "softmax"}
_OF_CHOICES = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_FEW = 0.01  # a share of the parameters, such as the pooler of a language model
# Operations between the logarithms of a loss that takes logits and the loss of an example.
_NLL = ("NllLoss", "NllLoss2D", "NllLossNd")
_REDUCING = (
    *("Mean", "Sum", "Neg", "Gather"),
    *("Mul", "Div", "Add"),  # a weight of the loss, and label smoothing
)
# Operations whose results are no log-probabilities.
_NOT_LOGARITHMS = {
    **_ACTIVATIONS,
    **dict.fromkeys(("AddmmBackward0", "MmBackward0"), "linear layer"),
    "ConvolutionBackward0": "convolution",
}
_MOST_OPERATIONS = 100  # of a loss are followed
# Operations that only arrange or convert numbers, without their ending Backward and a digit.
_ARRANGING = (
    *("View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Select", "Slice", "T"),
    *("Transpose", "Permute", "Clone", "ToCopy", "Index", "Alias"),
)


@contextlib.contextmanager
def first_forward(job: Job, notes: list[str]) -> Iterator[None]:
    """Run the body, and add `notes` about the first call of losses() in the body."""
    was_training = list[bool]()

    def before(_module: Any, _inputs: Any) -> None:
        was_training.append(job.model.training)

    def after(_module: Any, _inputs: Any, losses_B: Mapping[str, Tensor]) -> None:
        if len(was_training) > 1:
            return
        if was_training[0] and not job.model.training:
            notes.append(
                "losses() leaves the model in evaluation mode, so that nothing is dropped and "
                "batch norm learns no statistics: remove model.eval()"
            )
        for name, loss_B in losses_B.items():
            notes.extend(filter(None, (_twice(name, loss_B), _without_log(name, loss_B))))

    with (
        job.loss_module.register_forward_pre_hook(before),
        job.loss_module.register_forward_hook(after),
        new_layers(job.loss_module) as created,
    ):
        yield
    # The layer of a functional_call, whose weights are computed, has no gradient of its own.
    trained = [each for each in created if any(p.grad is not None for p in each.parameters())]
    if trained:
        notes.append(
            f"a step creates the layer {type(trained[0]).__name__}, which is neither trained nor "
            "saved: create it in __init__() of the model"
        )


@contextlib.contextmanager
def new_layers(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Run the body, and yield the layers with trained parameters that forwards of `module` create.

    `module` is the model, or the loss module, in whose forward losses() runs.
    """
    found, created, running = list[nn.Module](), list[nn.Module](), list[nn.Module]()
    known = {*map(id, module.modules())}
    if isinstance(module, torch.jit.ScriptModule):  # a compiled forward cannot create layers
        yield found
        return

    def created_in(layer: nn.Module, _name: str, _parameter: Any) -> None:
        if running and id(layer) not in known:
            created.append(layer)

    def ends(_module: Any, _inputs: Any, _output: Any) -> None:
        running.clear()
        found.extend(
            layer for layer in created if any(part.requires_grad for part in layer.parameters())
        )
        created.clear()

    with (
        register_module_parameter_registration_hook(created_in),
        module.register_forward_pre_hook(lambda each, _: running.append(each)),
        module.register_forward_hook(ends, always_call=True),
    ):
        yield found


def zero_losses(job: Job) -> list[str]:
    """Return a note if the losses of the first steps, and their first gradients, are all 0.

    All ranks must call this.

    Raises:
        Failure: A loss is infinite or NaN.
    """
    found = job.state.running.gather()
    check_running(job, found)
    losses = [sums for name, sums in found.items() if name not in job.task.train_metrics]
    steps = job.state.progress.step
    # A single loss of 0 may have a weight that grows with the step.
    if steps < FIRST_STEPS or not job.starts_at_zero or any(map(any, losses)):
        return []
    return [
        f"all losses of the first {steps} steps are 0, and so is the gradient: check the labels "
        "and the masks, such as labels that are the ignore_index of the loss"
    ]


def without_gradient(job: Job) -> list[str]:
    """Return a note if the first steps gave many parameters no gradient; all ranks must call this.

    There is none about the parameters of several optimizers, which may take turns.
    """
    found = set[str]().union(*job.world.from_each(list(job.with_gradient)))
    optimizer = job.state.optimizer
    if hasattr(optimizer, "parts"):
        return []
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = {
        name: parameter.numel()
        for name, parameter in job.model.named_parameters()
        if parameter.requires_grad and id(parameter) in ids
    }
    left_out = tuple(_left_out(job.model, found))
    missing = [
        name for name in trained if name not in found and not f"{name}.".startswith(left_out)
    ]
    count, whole = sum(trained[name] for name in missing), sum(trained.values())
    if count <= _FEW * whole:
        return []
    steps = min(FIRST_STEPS, job.state.progress.step)
    first = "the first step" if steps == 1 else f"the first {steps} steps"
    return [
        f"{count:,} of {whole:,} parameters got no gradient in {first}, first {missing[0]}: use "
        "them in forward() without a copy, detach(), no_grad() and use_reentrant=True, or, if no "
        "later step uses them, set requires_grad to False"
    ]


def _left_out(model: nn.Module, found: set[str]) -> Iterator[str]:
    """Yield what names of parameters begin with if other steps may give them a gradient, or none.

    Of the children of an nn.ModuleList or another container, a step may use only some, such as the
    experts that a router has chosen. An average of weights gets no gradient.
    """
    for path, module in model.named_modules():
        start = f"{path}." if path else ""
        if isinstance(module, AveragedModel):
            yield start
        if isinstance(module, _OF_CHOICES):
            children = {name.partition(".")[0] for name, _ in module.named_parameters()}
            inside = [name.removeprefix(start) for name in found if name.startswith(start)]
            used = {name.partition(".")[0] for name in inside}
            yield from (f"{start}{child}." for child in children - used if used)


def _twice(name: str, loss_B: Tensor) -> str:
    """Return a note if a loss takes logits but gets the output of a sigmoid or a softmax."""
    for node in _before(loss_B.grad_fn, (*_NLL, *_REDUCING, *_ARRANGING)):
        applied, takes = _OF_LOGITS.get(node.name(), ("", ""))
        if applied and (first := _source(node, _ACTIVATIONS)):
            return (
                f"the loss {name} applies a {applied} to the output of a {first}: remove the "
                f"{first} of the model, because {takes} logits"
            )
    return ""


def _without_log(name: str, loss_B: Tensor) -> str:
    """Return a note if an nll_loss gets probabilities or logits."""
    for node in _before(loss_B.grad_fn, (*_REDUCING, *_ARRANGING)):
        is_nll = node.name().partition("Backward")[0] in _NLL
        if is_nll and (source := _source(node, _NOT_LOGARITHMS)):
            return (
                f"the loss {name} gives nll_loss the output of a {source}, but it takes "
                "log-probabilities: use F.cross_entropy with logits"
            )
    return ""


def _source(node: Any, names: Mapping[str, str]) -> str:
    """Return what has computed the first input of `node`, if it is among `names`, or ""."""
    first = node.next_functions[0][0] if node.next_functions else None
    found = (names.get(source.name(), "") for source in _before(first, _ARRANGING))
    return next(filter(None, found), "")


def _before(node: Any, passed: Sequence[str]) -> Iterator[Any]:
    """Yield the first operations from `node` backwards that are not `passed`."""
    waiting, seen = [node], set[Any]()
    while waiting and len(seen) < _MOST_OPERATIONS:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().partition("Backward")[0] in passed:
            waiting += [each for each, _ in node.next_functions]
        else:
            yield node
