"""Define `Task`, the class that users write."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from trainbox.options.config import warmup_then_cosine
from trainbox.options.optimizers import make_optimizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

    from trainbox.pictures import Picture

# Shape suffixes: B examples of a batch, C channels, H height, W width, K classes.


@dataclass(frozen=True)
class Task:
    """A learning problem: its data, model, losses and metrics.

    Write a task as a frozen dataclass. Its fields are its hyperparameters (`--set width=64`).

    A batch is the collated examples of the dataset: a tuple, list or dict of tensors. The first
    dimension of each tensor is B, the number of examples in the batch. A method may get a part of
    the global batch, so it must not depend on B.

    Raise `trainbox.WrongUse` for data or fields that cannot be used. Trainbox then prints the
    message without a traceback, and exits with code 2.
    """

    # The defaults of --epochs, --batch-size (global), --lr and other options of the same names.
    # None: Trainbox's own.
    epochs: ClassVar[int | None] = None
    batch_size: ClassVar[int | None] = None
    learning_rate: ClassVar[float | None] = None
    warmup_epochs: ClassVar[float | None] = None
    optimizer: ClassVar[str | None] = None
    weight_decay: ClassVar[float | None] = None
    clip_norm: ClassVar[float | None] = None
    precision: ClassVar[str | None] = None
    # The metric that selects the best checkpoint: min:NAME or max:NAME.
    best_by: ClassVar[str] = "min:loss"
    # The names in the result of `losses` that are metrics of the training, not losses.
    train_metrics: ClassVar[tuple[str, ...]] = ()
    # The endings of the files that `trainbox predict` finds in a folder, in lower case, such as
    # (".png",). Without endings, it takes all files.
    example_endings: ClassVar[tuple[str, ...]] = ()

    def with_data(self, data_dir: Path) -> Self:
        """Return this task with the fields that depend on the data, such as its classes.

        This is called before every other method. A task is frozen, so return
        `dataclasses.replace(self, ...)`. `data_dir` is the folder of `--data-dir`.

        Raises:
            WrongUse: the data is missing or cannot be used.
        """
        return self

    def train_dataset(self, data_dir: Path) -> "Dataset[Any]":
        """Return the training examples. torch is seeded with the run's seed before the call.

        A `TensorDataset` is kept in memory and indexed in batches. It is moved to the device if it
        fits there. The examples of any other map-style dataset are read by loader workers.

        Raises:
            WrongUse: the data is missing or cannot be used.
        """
        raise NotImplementedError

    def validation_dataset(self, data_dir: Path) -> "Dataset[Any]":
        """Return the examples for validation, by which the best checkpoint is selected.

        Each example is counted once, on any number of processes. A random split that this method
        and `train_dataset` draw in the same way, and that is a `Subset` or a `TensorDataset`, is
        the same split.

        Raises:
            WrongUse: the data is missing or cannot be used.
        """
        raise NotImplementedError

    def test_dataset(self, data_dir: Path) -> "Dataset[Any]":
        """Return the examples that only `trainbox evaluate RUN --data test` reads.

        This method is optional. A random split in all three methods is the same split.

        Raises:
            WrongUse: the data is missing or cannot be used.
        """
        raise NotImplementedError

    def load_example(self, path: Path) -> Any:
        """Return the example of a file, in the form of the examples of `validation_dataset`.

        This method is optional. `trainbox predict` calls it for each file. Return any number of the
        same type, such as 0, for a part that a file does not have, such as the label.

        Raises:
            WrongUse: the file cannot be used.
        """
        raise NotImplementedError

    def prediction_dataset(self, files: "Sequence[Path]") -> "Dataset[Any]":
        """Return the examples of `files`, in the form of the examples of `validation_dataset`.

        This method is optional. Define it instead of `load_example` if a file has several examples,
        or if all files are checked before the first prediction. The dataset's attribute `ids` has
        the text of the column `file` for each example. Its attribute `skipped`, which it may lack,
        has the files without an example.

        Raises:
            WrongUse: a file cannot be used.
        """
        raise NotImplementedError

    def input_source(self) -> str:
        """Return Python code with a function `load(path)`, which returns a file as an input.

        This method is optional. `trainbox export` writes the code to `inputs.py` beside the model,
        and the docstring of the code to the card of the model. Without code, return "".
        """
        return ""

    def notes(self, train: "Dataset[Any]", validation: "Dataset[Any]") -> dict[str, str]:
        """Return facts about the data to print before training, such as class weights.

        The result is `{name: line}`.
        """
        return {}

    def build_model(self) -> "nn.Module":
        """Return a new model with its initial weights, on the CPU.

        torch is seeded with the run's seed before the call.
        """
        raise NotImplementedError

    def losses(self, model: "nn.Module", batch: Any) -> "dict[str, Tensor]":
        """Return per-example losses `{name: (B,)}`, which are differentiable floats.

        Training minimises their sum over the names, averaged over the global batch. The values that
        `train_metrics` names are not minimised. Their means are logged beside the loss.
        """
        raise NotImplementedError

    def collate(self, examples: list[Any]) -> Any:
        """Return the batch of some `examples` of a dataset, such as padded sequences.

        The result is a tuple, list or dict of tensors, whose first dimension is the number of
        examples. Loader workers call this method. A `TensorDataset` does not need it. The default
        stacks examples of equal shape.
        """
        from torch.utils.data import default_collate

        return default_collate(examples)

    def prepare(self, batch: Any, training: bool) -> Any:
        """Return the batch in the form that the model needs, on the same device.

        Override this to convert bytes to floats, to normalise, and to augment if `training`. Draw
        random numbers from torch, which is seeded so that the bits do not depend on the number of
        processes. The result is the `batch` of all other methods.
        """
        return batch

    def statistics(self, model: "nn.Module", batch: Any) -> "dict[str, Tensor]":
        """Return sums over the examples of the batch, `{name: tensor of any shape}`.

        Their sums over the validation set are the totals for `metrics`. Gradients are off, so a
        derivative, also one in `losses`, needs `with torch.enable_grad():`. The default is
        `{"loss": ()}`, the sum of all losses of the batch, and the sum of each of the
        `train_metrics`.
        """
        sums = {name: value_B.float().sum() for name, value_B in self.losses(model, batch).items()}
        metrics = {name: sums.pop(name) for name in self.train_metrics}
        total, *others = sums.values()
        return {"loss": sum(others, start=total), **metrics}

    def predictions(self, model: "nn.Module", batch: Any) -> "dict[str, Tensor]":
        """Return values of each example, `{name: tensor (B,) or (B, K)}`.

        This method is optional. `trainbox evaluate --predictions` and `trainbox predict` write the
        values as columns, floats with 9 digits. `predict` leaves out the name `truth`. Gradients
        are off. If the dataset has an attribute `ids`, a sequence with the name of each example, it
        is the first column, else the indices of the examples are.
        """
        raise NotImplementedError

    def metrics(self, totals: "Mapping[str, Tensor]") -> dict[str, float]:
        """Return the metrics `{name: value}` of a validation.

        `totals` are the sums of `statistics` over the validation set, as float64 tensors on the
        CPU. `totals["examples"]` is the number of examples. The default divides each total, which
        must have one element, by this number. This must be a pure function.
        """
        return {
            name: float(total / totals["examples"])
            for name, total in totals.items()
            if name != "examples"
        }

    def finished(self, metrics: "Mapping[str, float]") -> bool:
        """Return whether training may end after a validation with these metrics.

        This must be a pure function.
        """
        return False

    def figures(
        self, model: "nn.Module", batch: Any, totals: "Mapping[str, Tensor]"
    ) -> "Mapping[str, Picture]":
        """Return pictures `{name: (3, H, W) uint8}` for TensorBoard, or functions that draw them.

        A function without arguments is called in another thread, while the training continues. It
        must use copies on the CPU, not the model, and it must not draw random numbers.

        This is called after the last validation, and after each that is the best so far. `batch` is
        one prepared validation batch. For a `Classification`, it starts with wrongly classified
        examples of the whole validation set. `metrics` gets the same `totals`.
        """
        return {}

    def build_optimizer(
        self, model: "nn.Module", name: str, learning_rate: float, weight_decay: float | None
    ) -> "Optimizer | tuple[Optimizer, ...]":
        """Return the optimizer that `--optimizer` names.

        Override this for parameter groups, or for several optimizers. Each step updates the weights
        with all of them. The schedule scales the learning rate of each group. If
        `weight_decay` is None, the default of the optimizer applies.

        An optimizer with the methods `train` and `eval`, as schedule-free optimizers have, is
        refused: its weights differ between an evaluation and the training.

        Raises:
            WrongUse: the optimizer does not exist.
        """
        return make_optimizer(name, model.parameters(), learning_rate, weight_decay)

    def schedule(
        self,
        step: int,
        total_steps: int,
        warmup_steps: int,
        epoch: float,
        validations: "Sequence[Mapping[str, float]]",
    ) -> float:
        """Return the factor on the learning rate at `step`, which counts from 0.

        The factor is a finite number from 0. `epoch` is the number of epochs before this step, such
        as 1.5. `validations` has the metrics of each validation before this step, which checkpoints
        contain. `trainbox.scheduler_factor` returns the factor of a scheduler of torch.

        The default rises linearly over `warmup_steps` and then falls to 0 as half a cosine
        (Loshchilov and Hutter, 2017). This must be a pure function, because a resume does not
        restore a schedule.
        """
        return warmup_then_cosine(step, total_steps, warmup_steps)
