"""Define `Classification`, a task whose batches are (inputs, labels)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainbox import pictures
from trainbox.errors import WrongUse
from trainbox.task import Task
from trainbox.task_metrics import TaskMetrics

# Shape suffixes: B examples of a batch, C channels, H height, W width, K classes.

_SHEET_SIZE, _SHEET_BATCHES = 32, 8
# By default, torch ignores the label -100, whose loss of 0 would count in the mean.
_NO_LABEL = -(2**63)


@dataclass(frozen=True)
class Classification(Task):
    """A classification task with cross-entropy, accuracy, macro-F1 and a confusion matrix.

    Subclasses define the datasets, the model and `class_names`. A batch is (inputs, labels (B,)
    int64 from 0). The model maps inputs to logits (B, K), where K is the number of `class_names`.
    If the inputs are images (B, 1 or 3, H, W), TensorBoard also shows a sheet of examples.

    The metrics are `loss` (the mean cross-entropy in nats), `accuracy` and `macro_f1`. To log the
    accuracy of the training too, set `train_metrics = ("accuracy",)`.
    """

    class_names: ClassVar[tuple[str, ...]] = ()
    best_by: ClassVar[str] = "max:accuracy"

    def with_classes(self, names: tuple[str, ...]) -> Self:
        """Return this task with the classes of its training, if its classes are a field.

        `trainbox predict` calls this before `with_data`, which can then do without the data of the
        training.
        """
        return self

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs, labels_B = self._pair(batch)
        logits_BK = self._logits(model, inputs)
        losses = {"cross_entropy": self._cross_entropy(logits_BK, labels_B, "none")}
        if "accuracy" in self.train_metrics:
            losses["accuracy"] = logits_BK.argmax(1) == labels_B
        return losses

    def statistics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs, labels_B = self._pair(batch)
        return self.sums(self._logits(model, inputs).float(), labels_B)

    def sums(self, logits_BK: Tensor, labels_B: Tensor) -> dict[str, Tensor]:
        """Return the `statistics` of a batch with these logits. Extend this for other metrics."""
        return {
            "loss": self._cross_entropy(logits_BK, labels_B, "sum"),
            "confusion": TaskMetrics.confusion_matrix(
                labels_B, logits_BK.argmax(1), len(self.class_names)
            ),
        }

    def _pair(self, batch: Any) -> tuple[Any, Tensor]:
        """Return the inputs and the labels (B,) of a batch.

        Raises:
            WrongUse: The batch is not (inputs, labels), or the labels are not int64 of shape (B,).
        """
        name = type(self).__name__
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise WrongUse(
                f"task {name}: a batch is {_form(batch)} instead of (inputs, labels): return "
                "pairs from the dataset, or return a pair from prepare()"
            )
        inputs, labels_B = batch
        if not isinstance(labels_B, Tensor):
            raise WrongUse(
                f"task {name}: the labels are {_form(labels_B)} instead of numbers: use the index "
                "of each class in class_names, from 0"
            )
        if labels_B.dtype != torch.int64 or labels_B.ndim != 1:
            raise WrongUse(
                f"task {name}: the labels are {_form(labels_B)} instead of int64 of shape (B,): "
                f"{_remedy_of_labels(inputs, labels_B, len(self.class_names))}"
            )
        return inputs, labels_B

    def _logits(self, model: nn.Module, inputs: Any) -> Tensor:
        """Return the output (B, K) of the model.

        Raises:
            WrongUse: It has another shape.
        """
        logits_BK, classes = _output(model, inputs), len(self.class_names)
        if not isinstance(logits_BK, Tensor):
            raise WrongUse(
                f"task {type(self).__name__}: the model returns {_form(logits_BK)} instead of the "
                "logits (B, K): return the logits from forward()"
            )
        shape = tuple(logits_BK.shape)
        if logits_BK.ndim > 2 and shape[-1] == classes:
            raise WrongUse(
                f"task {type(self).__name__}: the model returns shape {shape} instead of "
                f"(B, {classes}): put nn.Flatten() before its last layer, which then gets all "
                "numbers of an example, or return the mean over the dimensions between"
            )
        if logits_BK.ndim != 2 or (counts_by_class(self) and logits_BK.shape[1] != classes):
            raise WrongUse(
                f"task {type(self).__name__}: the model returns shape {shape} "
                f"instead of (B, {classes or 'K'}), one output for each of class_names: change "
                "build_model() or class_names"
            )
        return logits_BK

    def _cross_entropy(self, logits_BK: Tensor, labels_B: Tensor, reduction: str) -> Tensor:
        """Return the cross-entropy. On a GPU, a label out of range ends all work there instead.

        Raises:
            WrongUse: A label is not the index of a class.
        """
        try:
            return F.cross_entropy(logits_BK, labels_B, reduction=reduction, ignore_index=_NO_LABEL)
        except IndexError as error:
            if int(labels_B.min()) >= 0 and int(labels_B.max()) < len(self.class_names):
                raise  # the model has fewer outputs
            raise WrongUse(
                f"task {type(self).__name__}: the labels are from {int(labels_B.min())} to "
                f"{int(labels_B.max())}, but class_names has {len(self.class_names)} names: number "
                f"the classes from 0 to {len(self.class_names) - 1}, or add the missing names"
            ) from error

    def predictions(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the `truth`, the `prediction` and the `probability` (B, K) of each class."""
        inputs, labels_B = batch
        logits_BK = model(inputs).float()
        return {
            "truth": labels_B,
            "prediction": logits_BK.argmax(1),  # as in `sums`: probabilities may be rounded to ties
            "probability": logits_BK.softmax(1),
        }

    def metrics(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        return {
            "loss": float(totals["loss"] / totals["examples"]),
            "accuracy": TaskMetrics.accuracy(totals["confusion"]),
            "macro_f1": TaskMetrics.macro_f1(totals["confusion"]),
        }

    def figures(
        self, model: nn.Module, batch: Any, totals: Mapping[str, Tensor]
    ) -> dict[str, pictures.Picture]:
        figures: dict[str, pictures.Picture] = {}
        if "confusion" in totals:  # a task may have other statistics
            figures["confusion_matrix"] = partial(
                pictures.confusion_matrix, totals["confusion"], self.class_names
            )
        inputs, labels_B = batch
        if isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.shape[1] in (1, 3):
            predictions_B = model(inputs).argmax(1)
            # Show the wrongly classified examples first.
            shown = (predictions_B == labels_B).int().argsort(stable=True)[:_SHEET_SIZE]
            figures["examples"] = partial(
                pictures.example_sheet,
                inputs[shown].cpu(),
                labels_B[shown].cpu(),
                predictions_B[shown].cpu(),
                self.class_names,
            )
        return figures


def _remedy_of_labels(inputs: Any, labels: Tensor, classes: int) -> str:
    """Return how to fix labels that are not int64 of shape (B,)."""
    if labels.ndim == 1:
        return "convert them with .long()"
    if isinstance(inputs, Tensor) and inputs.dtype == torch.int64 and inputs.ndim == 1:
        return "return (inputs, labels) from the dataset, because the pair may be swapped"
    if labels.shape[1:] == (classes,):
        return "convert one-hot labels with .argmax(1)"
    if labels.shape[1:] == (1,):
        return f"convert them with .squeeze(1){'' if labels.dtype == torch.int64 else '.long()'}"
    return "derive from Task, and return a loss for each example from losses()"


def _output(model: nn.Module, inputs: Any) -> Tensor:
    """Return `model(inputs)`. An error of the model gets a note with the form of the inputs."""
    try:
        output: Tensor = model(inputs)
    except Exception as error:
        error.add_note(f"the model got {_form(inputs)}")
        raise
    return output


def doubtful_outputs(model: nn.Module, batch: Any) -> str:
    """Return advice about the model's outputs for a batch, or an empty string.

    The model is called once. It must be in evaluation mode.
    """
    before = _random_states(batch[0])
    output = model(batch[0]).float()
    # A layer that begins with weights of 0 has outputs that are all 0.
    if bool((output >= 0).all() and (output == 0).any() and (output > 0).any()):
        return (
            "the model's outputs are never below 0: remove its last ReLU, because the "
            "cross-entropy needs numbers of any sign"
        )
    if before != _random_states(batch[0]):
        return (
            "the model draws random numbers in a validation: draw them only if self.training, as "
            "in F.dropout(x, training=self.training)"
        )
    return ""


def _random_states(inputs: Any) -> list[bytes]:
    """Return the states of torch's generators on the CPU and on the device of `inputs`."""
    states = [torch.get_rng_state()]
    if isinstance(inputs, Tensor) and inputs.is_cuda:
        states.append(torch.cuda.get_rng_state(inputs.device))
    return [state.numpy().tobytes() for state in states]


def _form(value: Any) -> str:
    """Return a description such as `a tuple of 3`, `a dict of image, label` or `text ('cat')`."""
    if isinstance(value, Tensor):
        form = f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
        if value.dtype == torch.int64 and value.numel() and value.device.type == "cpu":
            form += f" from {int(value.min())} to {int(value.max())}"
        return form
    if isinstance(value, dict):
        return f"a dict of {', '.join(map(str, value))}"
    if isinstance(value, tuple | list):
        is_text = bool(value) and isinstance(value[0], str)
        return f"text ({value[0]!r})" if is_text else f"a {type(value).__name__} of {len(value)}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def most_mistaken(confusion_NKK: Tensor) -> list[int]:
    """Return the indices of the batches with the most wrong examples, enough to fill a sheet.

    `confusion_NKK` has one confusion matrix per batch. At most 8 indices are returned.
    """
    wrong_N = (confusion_NKK.sum((1, 2)) - confusion_NKK.diagonal(dim1=1, dim2=2).sum(1)).tolist()
    found, numbers = 0.0, []
    for number in sorted(range(len(wrong_N)), key=lambda number: -wrong_N[number])[:_SHEET_BATCHES]:
        if found >= _SHEET_SIZE or not wrong_N[number]:
            break
        found += wrong_N[number]
        numbers.append(number)
    return numbers


def wrong(model: nn.Module, batch: Any) -> Tensor:
    """Return which examples of a batch the model classifies wrongly: (B,) bool."""
    inputs, labels_B = batch
    mistaken_B: Tensor = model(inputs).argmax(1) != labels_B
    return mistaken_B


def counts_by_class(task: Task) -> bool:
    """Return whether `task` is a Classification that does not override `statistics`."""
    return isinstance(task, Classification) and type(task).statistics is Classification.statistics


def check_classes(task: Task) -> None:
    """Raise WrongUse if the classes of a Classification have no names."""
    if not isinstance(task, Classification) or not counts_by_class(task):
        return
    names = task.class_names
    is_list = isinstance(names, tuple | list) and len(names) > 0
    if not is_list or not all(isinstance(name, str) for name in names):
        raise WrongUse(
            f"task {type(task).__name__}: class_names is {names!r}, not a tuple with the name "
            'of each class: write class_names: ClassVar[tuple[str, ...]] = ("cat", "dog"), or '
            "set a field of that name in with_data()"
        )
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise WrongUse(
            f"task {type(task).__name__}: class_names has {repeated!r} twice: give each class a "
            "name of its own"
        )
