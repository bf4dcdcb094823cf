"""Recognize human activities from the motion sensors of a phone (UCI HAR)."""

import itertools
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainbox import Classification, WrongUse, pictures
from trainer.tasks.reading.download import answering, cause
from trainer.tasks.reading.fields import FROM_0_BELOW_1, FROM_1, check_fields

# Shape suffixes: N windows, B windows of a batch, C channels, T readings of a window, P pieces of
# a window, F features, E width.

_URL = (
    "https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip"
)
# UCI does not publish a digest. Several unrelated projects publish this one for the same file.
_SHA256 = "c00b803081a5c797cd5e4b83700a9810b38d53d9d84e01917e090e1fdbc81031"
_FOLDER = "UCI HAR Dataset"
_CHANNELS = tuple(
    f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
)
_READINGS = 128
_FEATURES = 561
_HEADS = 4
_PIECE = 4
_SHOWN = 8

_Numbers = NDArray[numpy.float32]


@dataclass(frozen=True)
class Har(Classification):
    """Six activities from a phone's sensors: 7,352 windows to train, 2,947 to validate.

    The people in the validation part are not in the training part. With `mode=sequence`, the inputs
    are the signals, 9 channels x 128 readings at 50 Hz, and `model` is `cnn`, `lstm` or
    `transformer`. With `mode=flatten`, the inputs are the dataset's 561 features for an MLP.
    """

    epochs: ClassVar[int] = 30
    batch_size: ClassVar[int] = 64
    learning_rate: ClassVar[float] = 1e-3
    class_names: ClassVar[tuple[str, ...]] = (
        "walking",
        "upstairs",
        "downstairs",
        "sitting",
        "standing",
        "laying",
    )

    mode: str = "sequence"
    model: str = "cnn"
    width: int = 64
    layers: int = 2
    dropout: float = 0.2

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("mode", self.mode, ("flatten", "sequence")),
            ("model", self.model, tuple(_BODIES)),
        ):
            if value not in choices:
                raise WrongUse(f"--set {name}={value}: task har has {', '.join(choices)}")
        if self.mode == "flatten" and self.model != "cnn":
            raise WrongUse(
                f"--set mode=flatten trains an MLP, not model={self.model}: drop one, or "
                "use sequence"
            )
        check_fields(self, FROM_1, "width", "layers")
        check_fields(self, FROM_0_BELOW_1, "dropout")
        if self.mode == "sequence" and self.model == "transformer" and self.width % _HEADS:
            raise WrongUse(
                f"--set width={self.width}: use a multiple of {_HEADS}, the number of the "
                "transformer's heads"
            )

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        return TensorDataset(*self._load(data_dir, "train"))

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        inputs, labels_N = self._load(data_dir, "test")
        # The files are sorted by person and activity. A shuffled batch for the figures has several.
        order_N = torch.randperm(len(labels_N), generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs[order_N], labels_N[order_N])

    def build_model(self) -> nn.Module:
        if self.mode == "flatten":
            sizes = [_FEATURES, *[self.width] * self.layers]
            hidden = [
                nn.Sequential(nn.Linear(before, after), nn.ReLU(), nn.Dropout(self.dropout))
                for before, after in itertools.pairwise(sizes)
            ]
            return nn.Sequential(*hidden, nn.Linear(self.width, len(self.class_names)))
        body = _BODIES[self.model](self.width, self.layers, self.dropout)
        return nn.Sequential(
            body, nn.Dropout(self.dropout), nn.Linear(self.width, len(self.class_names))
        )

    def figures(
        self, model: nn.Module, batch: Any, totals: Mapping[str, Tensor]
    ) -> dict[str, pictures.Picture]:
        figures = super().figures(model, batch, totals)
        if self.mode == "sequence":
            inputs_BCT, labels_B = batch
            predictions_B = model(inputs_BCT).argmax(1)
            # Show the wrongly classified windows first.
            shown = (predictions_B == labels_B).int().argsort(stable=True)[:_SHOWN]
            figures["signals"] = partial(
                _signals,
                inputs_BCT[shown].float().cpu(),
                labels_B[shown].tolist(),
                predictions_B[shown].tolist(),
                self.class_names,
            )
        return figures

    def _load(self, data_dir: Path, part: str) -> tuple[Tensor, Tensor]:
        """Return the inputs of one part, (N, 9, 128) or (N, 561), and its labels (N,).

        The inputs are standardised with the statistics of the training part.
        """
        folder = _find(data_dir)
        people = {
            name: _read(folder / name / f"subject_{name}.txt", None, 1)
            for name in ("train", "test")
        }
        _check_people(folder, people["train"], people["test"])
        train = _read_inputs(folder, "train", self.mode, len(people["train"]))
        inputs = (
            train if part == "train" else _read_inputs(folder, part, self.mode, len(people[part]))
        )
        labels_N = _read(folder / part / f"y_{part}.txt", len(inputs), 1)[:, 0]
        if not numpy.isin(labels_N, range(1, len(self.class_names) + 1)).all():
            raise WrongUse(
                f"{folder / part}/y_{part}.txt has other labels than 1 to "
                f"{len(self.class_names)}: {_REMEDY}"
            )
        return torch.from_numpy(_standardised(inputs, train)), torch.from_numpy(labels_N).long() - 1


class _Cnn(nn.Module):
    """A model (B, 9, 128) to (B, E): convolutions that halve the time, and the mean over time."""

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        sizes = [len(_CHANNELS), *[width] * layers]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv1d(before, after, 9, stride=2, padding=4), nn.ReLU(), nn.Dropout(dropout)
                )
                for before, after in itertools.pairwise(sizes)
            )
        )

    def forward(self, signals_BCT: Tensor) -> Tensor:
        features_BET: Tensor = self.layers(signals_BCT)
        return features_BET.mean(2)


class _Lstm(nn.Module):
    """A model (B, 9, 128) to (B, E): the mean over time of the last LSTM layer's outputs."""

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        sizes = [len(_CHANNELS), *[width] * layers]
        # Use one nn.LSTM per layer. The dropout between the layers of a single nn.LSTM has its own
        # state on a GPU, so a resumed run would draw other masks.
        self.layers = nn.ModuleList(
            nn.LSTM(before, after, batch_first=True) for before, after in itertools.pairwise(sizes)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, signals_BCT: Tensor) -> Tensor:
        outputs_BTE = signals_BCT.transpose(1, 2)
        for number, layer in enumerate(self.layers):
            outputs_BTE, _ = layer(outputs_BTE if number == 0 else self.dropout(outputs_BTE))
        return outputs_BTE.mean(1)


class _Transformer(nn.Module):
    """A model (B, 9, 128) to (B, E): an encoder over pieces of four readings, and their mean.

    The embeddings of the positions are learned.
    """

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.pieces = nn.Conv1d(len(_CHANNELS), width, _PIECE, stride=_PIECE)
        self.places_PE = nn.Parameter(0.02 * torch.randn(_READINGS // _PIECE, width))
        # nn.TransformerEncoder would copy one layer, so that all layers start with equal weights.
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width, _HEADS, 4 * width, dropout, batch_first=True, norm_first=True
                )
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, signals_BCT: Tensor) -> Tensor:
        pieces_BPE = self.pieces(signals_BCT).transpose(1, 2) + self.places_PE
        encoded_BPE: Tensor = self.norm(self.layers(pieces_BPE))
        return encoded_BPE.mean(1)


_BODIES: dict[str, type[_Cnn] | type[_Lstm] | type[_Transformer]] = {
    "cnn": _Cnn,
    "lstm": _Lstm,
    "transformer": _Transformer,
}

_REMEDY = f"put UCI's complete folder {_FOLDER!r} there, or delete it, so that it is downloaded"


def _find(data_dir: Path) -> Path:
    """Return the dataset's folder, and download it if it is missing.

    Some programs unpack it into another folder of the same name.
    """
    folder = data_dir / _FOLDER
    if not folder.exists():
        _download(data_dir)
    return folder / _FOLDER if (folder / _FOLDER).is_dir() else folder


def _download(data_dir: Path) -> None:
    """Download, check and unpack the dataset in a temporary folder, and then rename it.

    The dataset's folder is thus always complete.

    Raises:
        WrongUse: the download failed.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".har-", dir=data_dir) as name:
            temporary = Path(name)
            archive = temporary / "outer.zip"
            with answering():
                torch.hub.download_url_to_file(_URL, str(archive), hash_prefix=_SHA256)
            with zipfile.ZipFile(archive) as outer:
                outer.extract(f"{_FOLDER}.zip", temporary)
            with zipfile.ZipFile(temporary / f"{_FOLDER}.zip") as inner:
                inner.extractall(
                    temporary, [file for file in inner.namelist() if file.startswith(f"{_FOLDER}/")]
                )
            if not (data_dir / _FOLDER).exists():  # another run may have been faster
                (temporary / _FOLDER).rename(data_dir / _FOLDER)
    # torch raises RuntimeError for a wrong checksum.
    except (OSError, RuntimeError, zipfile.BadZipFile, KeyError) as error:
        raise WrongUse(
            f"{data_dir / _FOLDER} is missing and cannot be downloaded "
            f"({cause(error)}): unpack UCI's "
            f"{_FOLDER}.zip in {data_dir}, so that train and test are in {data_dir / _FOLDER}"
        ) from error


def _check_people(folder: Path, train_N1: _Numbers, test_N1: _Numbers) -> None:
    """Raise WrongUse if a subject is in both parts, because the metrics would be too good."""
    if len(both := numpy.intersect1d(train_N1, test_N1)):
        raise WrongUse(
            f"{folder}: subject {', '.join(f'{number:g}' for number in both)} is in train and in "
            "test: put all windows of a subject into one of the two"
        )


def _read_inputs(folder: Path, part: str, mode: str, windows: int) -> _Numbers:
    """Return the signals (N, 9, 128) or features (N, 561) of one part, where N is `windows`."""
    source = folder / part
    if mode == "flatten":
        return _read(source / f"X_{part}.txt", windows, _FEATURES)
    files = [source / "Inertial Signals" / f"{channel}_{part}.txt" for channel in _CHANNELS]
    return numpy.stack([_read(file, windows, _READINGS) for file in files], 1)


def _read(path: Path, lines: int | None, columns: int) -> _Numbers:
    """Return the numbers in a text file, shape (lines, columns).

    If `lines` is None, any number of lines is accepted.

    Raises:
        WrongUse: the file is missing or damaged.
    """
    if not path.is_file():
        raise WrongUse(f"{path} is missing: {_REMEDY}")
    try:
        # numpy.loadtxt would print a warning for an empty file.
        numbers = (
            numpy.loadtxt(path, numpy.float32, ndmin=2)
            if path.stat().st_size
            else numpy.empty((0, 0), numpy.float32)
        )
    except (OSError, ValueError) as error:
        raise WrongUse(
            f"{path} cannot be read ({str(error).splitlines()[0].rstrip('.')}): {_REMEDY}"
        ) from error
    if numbers.shape != (lines or max(1, len(numbers)), columns):
        wanted = f"{lines} lines of {columns}" if lines else f"lines of {columns}"
        raise WrongUse(
            f"{path} is damaged ({len(numbers)} lines of {numbers.shape[1]} numbers instead of "
            f"{wanted}): {_REMEDY}"
        )
    if not numpy.isfinite(numbers).all():
        raise WrongUse(f"{path} is damaged (a number is not finite): {_REMEDY}")
    return numbers


def _standardised(inputs: _Numbers, train: _Numbers) -> _Numbers:
    """Return `inputs` standardised with the mean and the deviation of the training part.

    Each channel or feature has its own mean and deviation.
    """
    axes = tuple(axis for axis in range(train.ndim) if axis != 1)
    # NumPy's sums do not depend on the number of threads.
    mean = train.mean(axes, dtype=numpy.float64, keepdims=True)
    std = train.std(axes, dtype=numpy.float64, keepdims=True)
    # The deviation of a constant feature is only rounding errors, so it gets a lower limit.
    standardised: _Numbers = ((inputs - mean) / numpy.maximum(std, 1e-6)).astype(numpy.float32)
    return standardised


def _signals(
    inputs_BCT: Tensor,
    labels: Sequence[int],
    predictions: Sequence[int],
    class_names: tuple[str, ...],
) -> Tensor:
    """Draw the acceleration of at most eight windows with their predicted class.

    A wrong prediction is red, and the true class follows.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=100, layout="constrained")
    axes = figure.subplots(2, 4, sharex=True, sharey=True).flat
    seconds_T = torch.arange(_READINGS) / 50
    windows = zip(inputs_BCT, labels, predictions, strict=True)
    for axis, (inputs_CT, label, prediction) in zip(axes, windows, strict=False):
        for channel, name in enumerate(_CHANNELS):
            if name.startswith("total_acc"):
                axis.plot(seconds_T, inputs_CT[channel], linewidth=1, label=name[-1])
        right = label == prediction
        title = (
            class_names[prediction]
            if right
            else f"{class_names[prediction]}, not {class_names[label]}"
        )
        axis.set_title(title, fontsize=10, color="#006e32" if right else "#be1414")
    figure.supxlabel("seconds", fontsize=10)
    figure.supylabel("total acceleration, standardised", fontsize=10)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right center", frameon=False)
    return pictures.from_figure(figure)
