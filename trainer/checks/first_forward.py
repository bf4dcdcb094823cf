"""Look at the losses of the first step of a rehearsal for what is allowed but looks wrong."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

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
        notes.extend(filter(None, (_twice(name, loss_B) for name, loss_B in losses_B.items())))

    with (
        job.loss_module.register_forward_pre_hook(before),
        job.loss_module.register_forward_hook(after),
        new_layers(job.model) as created,
    ):
        yield
    if created:
        notes.append(
            f"a step creates the layer {created[0]}, which is neither trained nor saved: create it "
            "in __init__() of the model"
        )


@contextlib.contextmanager
def new_layers(model: nn.Module) -> Iterator[list[str]]:
    """Run the body, and yield the classes of the layers with parameters that the body creates."""
    created, known = list[str](), {*map(id, model.modules())}

    def created_in(module: nn.Module, _name: str, _parameter: Any) -> None:
        if id(module) not in known:
            created.append(type(module).__name__)

    with register_module_parameter_registration_hook(created_in):
        yield created


def _twice(name: str, loss_B: Tensor) -> str:
    """Return a note if a loss takes logits but gets the output of a sigmoid or a softmax."""
    seen, left = set[Any](), [loss_B.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        sources = [source for source, _ in node.next_functions]
        left += sources
        if (found := _OF_LOGITS.get(node.name())) and sources:
            source = sources[0]
            while source is not None and source.name().partition("Backward")[0] in _ARRANGING:
                source = source.next_functions[0][0]
            if source is not None and (first := _ACTIVATIONS.get(source.name())):
                applied, takes = found
                return (
                    f"the loss {name} applies a {applied} to the output of a {first}: remove the "
                    f"{first} of the model, because {takes} logits"
                )
    return ""
