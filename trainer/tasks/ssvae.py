"""Train a semi-supervised VAE, and measure its accuracy on corrupted pictures.

This is model M2 of Kingma, Rezende, Mohamed and Welling, "Semi-supervised Learning with Deep
Generative Models" (2014).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from trainbox import Task, WrongUse, metrics, pictures
from trainer.tasks.digits import Digits
from trainer.tasks.fashion_mnist import FashionMnist
from trainer.tasks.mnist import Mnist
from trainer.tasks.reading.fields import FROM_0, FROM_1, check_fields

# Shape suffixes: N examples, B examples of a batch, C channels (1), H height, W width, P pixels, K
# classes, S styles, D corruptions, T their strengths, R rows and L columns of a sheet of pictures.

# The task that loads the pictures, the width of the pictures, and the value of white.
_SOURCES: dict[str, tuple[Digits | Mnist, int, int]] = {
    "mnist": (Mnist(), 28, 255),
    "fashion_mnist": (FashionMnist(), 28, 255),
    "digits": (Digits(), 8, 16),
}
_CORRUPTIONS = {
    "noise": "standard deviation, in units of white",
    "blur": "standard deviation, in fifths of the width",
    "occlusion": "side of a black square, in widths",
}
_STRENGTHS = (0.2, 0.4, 0.6)
_RECONSTRUCTIONS = 12
_STYLE_VALUES = (-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0)


@dataclass(frozen=True)
class Ssvae(Task):
    """Semi-supervised VAE of MNIST, FashionMNIST or digits, of which a share has labels.

    The model has a class and a style for each picture. A batch is (images (B, 1, H, W), labels
    (B,), labelled (B,) bool). If `labelled` is false, the losses ignore the label.
    """

    epochs: ClassVar[int] = 75
    batch_size: ClassVar[int] = 128
    learning_rate: ClassVar[float] = 1e-3
    best_by: ClassVar[str] = "max:accuracy"

    dataset: str = "mnist"
    labelled: float = 0.1
    num_style: int = 20
    hidden: int = 500
    classification_weight: float = 50.0

    def __post_init__(self) -> None:
        if self.dataset not in _SOURCES:
            raise WrongUse(f"--set dataset={self.dataset}: use one of {', '.join(_SOURCES)}")
        if not 0 < self.labelled <= 1:
            raise WrongUse(
                f"--set labelled={self.labelled}: use the share of examples with a label, "
                "above 0 and up to 1"
            )
        check_fields(self, FROM_1, "num_style", "hidden")
        check_fields(self, FROM_0, "classification_weight")

    @property
    def class_names(self) -> tuple[str, ...]:
        return _SOURCES[self.dataset][0].class_names

    def train_dataset(self, data_dir: Path) -> TensorDataset:
        images_NCHW, labels_N = _tensors(_SOURCES[self.dataset][0].train_dataset(data_dir))
        return TensorDataset(images_NCHW, labels_N, first_of_each_class(labels_N, self.labelled))

    def validation_dataset(self, data_dir: Path) -> TensorDataset:
        """Return the validation examples, all marked as unlabelled.

        The model's bound is then the bound on log p(x). Only the metrics use the labels.
        """
        images_NCHW, labels_N = _tensors(_SOURCES[self.dataset][0].validation_dataset(data_dir))
        return TensorDataset(images_NCHW, labels_N, torch.zeros(len(labels_N), dtype=torch.bool))

    def build_model(self) -> nn.Module:
        return M2(_SOURCES[self.dataset][1], len(self.class_names), self.num_style, self.hidden)

    def prepare(self, batch: Any, training: bool) -> tuple[Tensor, Tensor, Tensor]:
        images_BCHW, labels_B, labelled_B = batch
        return images_BCHW.float() / _SOURCES[self.dataset][2], labels_B, labelled_B

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the negative bound as two losses, in nats, and the loss of the classifier.

        The bound is on log p(x, y) for labelled examples, and on log p(x) for the others. A pixel
        is Bernoulli with its grey value as the target. This is the mean over all random ways to
        make the picture black and white.
        """
        images_BCHW, labels_B, labelled_B = batch
        assert isinstance(model, M2)
        logits_BK = model(images_BCHW).float()
        log_q_BK = logits_BK.log_softmax(1)
        classes = logits_BK.shape[1]
        mean_BKS, log_variance_BKS = model.encode(images_BCHW)
        # All classes of an example share one draw, so that their losses are comparable.
        drawn_B1S = torch.randn_like(mean_BKS[:, :1])
        pixels_BKP = model.decode(mean_BKS + (log_variance_BKS / 2).exp() * drawn_B1S)
        target_BKP = images_BCHW.flatten(1)[:, None].expand_as(pixels_BKP)
        reconstruction_BK = F.binary_cross_entropy_with_logits(
            pixels_BKP, target_BKP, reduction="none"
        ).sum(2)
        style_kl_BK = (mean_BKS.square() + log_variance_BKS.exp() - 1 - log_variance_BKS).sum(2) / 2
        # F.one_hot would look at the values, for which a CPU waits.
        one_hot_BK = labels_B[:, None] == torch.arange(classes, device=labels_B.device)
        # The class is known, or all classes are weighted by the classifier's probabilities.
        q_BK = torch.where(labelled_B[:, None], one_hot_BK.float(), log_q_BK.exp())
        entropy_B = torch.where(labelled_B, 0.0, -(log_q_BK.exp() * log_q_BK).sum(1))
        return {
            "reconstruction": (q_BK * reconstruction_BK).sum(1),
            "kl": (q_BK * style_kl_BK).sum(1) + math.log(classes) - entropy_B,
            "classification": self.classification_weight
            * labelled_B
            * F.nll_loss(log_q_BK, labels_B, reduction="none"),
        }

    def statistics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        images_BCHW, labels_B, _ = batch
        bound = self.losses(model, batch)
        right_DT = [
            [
                (model(corrupted(images_BCHW, kind, strength)).argmax(1) == labels_B).sum()
                for strength in _STRENGTHS
            ]
            for kind in _CORRUPTIONS
        ]
        return {
            "elbo": -(bound["reconstruction"] + bound["kl"]).sum(),
            "confusion": metrics.confusion_matrix(
                labels_B, model(images_BCHW).argmax(1), len(self.class_names)
            ),
            "right_when_corrupted": torch.stack([torch.stack(row_T) for row_T in right_DT]),
        }

    def metrics(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        accuracy_DT = (totals["right_when_corrupted"] / totals["examples"]).tolist()
        return {
            "accuracy": metrics.accuracy(totals["confusion"]),
            "macro_f1": metrics.macro_f1(totals["confusion"]),
            "elbo": float(totals["elbo"] / totals["examples"]),
            **{
                f"accuracy_{kind}_{strength}": accuracy
                for kind, accuracy_T in zip(_CORRUPTIONS, accuracy_DT, strict=True)
                for strength, accuracy in zip(_STRENGTHS, accuracy_T, strict=True)
            },
        }

    def figures(
        self, model: nn.Module, batch: Any, totals: Mapping[str, Tensor]
    ) -> dict[str, pictures.Picture]:
        assert isinstance(model, M2)
        images_BCHW = batch[0][:_RECONSTRUCTIONS]
        mean_BKS, _ = model.encode(images_BCHW)
        predictions_B = model(images_BCHW).argmax(1)
        chosen_BHW = (
            model.decode(mean_BKS)
            .sigmoid()[range(len(images_BCHW)), predictions_B]
            .view_as(images_BCHW)[:, 0]
        )
        style, grid_KLHW = style_grid(model, batch[0])
        return {
            "confusion_matrix": partial(
                pictures.confusion_matrix, totals["confusion"], self.class_names
            ),
            "reconstructions": partial(
                _sheet,
                torch.stack([images_BCHW[:, 0], chosen_BHW]).cpu(),
                ("original", "reconstruction"),
                [self.class_names[prediction] for prediction in predictions_B.tolist()],
                "below: the predicted class",
            ),
            "styles": partial(
                _sheet,
                grid_KLHW.cpu(),
                self.class_names,
                [f"{value:g}" for value in _STYLE_VALUES],
                f"value of style {style}",
            ),
            "robustness": partial(_robustness, self.metrics(totals)),
        }


class M2(nn.Module):
    """The networks for q(y|x), q(z|x,y) and p(x|y,z), each with two hidden layers.

    `forward` returns the logits (B, K) of the classifier q(y|x).
    """

    def __init__(self, side: int, classes: int, styles: int, hidden: int) -> None:
        super().__init__()
        pixels = side * side
        self.classifier = _layers(pixels, hidden, classes)
        self.encoder = _layers(pixels + classes, hidden, 2 * styles)
        self.decoder = _layers(classes + styles, hidden, pixels)
        self.register_buffer("classes_KK", torch.eye(classes))
        self.classes_KK: Tensor

    def forward(self, images_BCHW: Tensor) -> Tensor:
        logits_BK: Tensor = self.classifier(images_BCHW.flatten(1))
        return logits_BK

    def encode(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and the log-variance of the style for each class, each (B, K, S)."""
        images_BKP = images_BCHW.flatten(1)[:, None].expand(-1, len(self.classes_KK), -1)
        mean_BKS, log_variance_BKS = (
            self.encoder(self._with_classes(images_BKP)).float().chunk(2, 2)
        )
        return mean_BKS, log_variance_BKS

    def decode(self, styles_BKS: Tensor) -> Tensor:
        """Return the logits of the pixels, (B, K, P), for a style of each class (B, K, S)."""
        pixels_BKP: Tensor = self.decoder(self._with_classes(styles_BKS)).float()
        return pixels_BKP

    def _with_classes(self, values_BKX: Tensor) -> Tensor:
        return torch.cat([values_BKX, self.classes_KK.expand(len(values_BKX), -1, -1)], 2)


def _layers(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )


def _tensors(dataset: Dataset[Any]) -> tuple[Tensor, ...]:
    assert isinstance(dataset, TensorDataset)
    return dataset.tensors


def first_of_each_class(labels_N: Tensor, share: float) -> Tensor:
    """Return a mask (N,) of the first `share` of the examples of each class, rounded up."""
    one_hot_NK = F.one_hot(labels_N)
    number_in_class_N = (one_hot_NK.cumsum(0) * one_hot_NK).sum(1)
    wanted_K = (one_hot_NK.sum(0) * share).ceil()
    return number_in_class_N <= wanted_K[labels_N]


def corrupted(images_BCHW: Tensor, kind: str, strength: float) -> Tensor:
    """Return corrupted square pictures with values from 0 to 1.

    `_CORRUPTIONS` has the unit of `strength` for each kind. The noise and the position of the
    square are drawn from torch's generator for each picture.
    """
    width = images_BCHW.shape[3]
    at_W = torch.arange(width, device=images_BCHW.device)
    if kind == "noise":
        return (images_BCHW + strength * torch.randn_like(images_BCHW)).clamp(0, 1)
    if kind == "blur":
        weights_WW = (-((at_W[:, None] - at_W) / (strength * width / 5)).square() / 2).exp()
        # Normalise the weights, because pixels beyond the edge do not exist.
        weights_WW = weights_WW / weights_WW.sum(1, keepdim=True)
        return weights_WW @ images_BCHW @ weights_WW.T
    side = round(strength * width)
    first_2B11 = torch.randint(
        width - side + 1, (2, len(images_BCHW), 1, 1), device=images_BCHW.device
    )
    down_BH1, right_B1W = (
        (at_W >= first_B11) & (at_W < first_B11 + side) for first_B11 in first_2B11
    )
    return images_BCHW.masked_fill((down_BH1.mT & right_B1W)[:, None], 0)


def style_grid(model: M2, images_BCHW: Tensor) -> tuple[int, Tensor]:
    """Return the most varied style, and pictures (K, L, H, W) of each class for its values.

    The other styles are 0. The most varied style has the largest deviation of its mean over the
    pictures.
    """
    mean_BKS, _ = model.encode(images_BCHW)
    predictions_B = model(images_BCHW).argmax(1)
    style = int(mean_BKS[range(len(images_BCHW)), predictions_B].std(0, correction=0).argmax())
    styles_LKS = torch.zeros(len(_STYLE_VALUES), *mean_BKS.shape[1:], device=mean_BKS.device)
    styles_LKS[:, :, style] = torch.tensor(_STYLE_VALUES, device=mean_BKS.device)[:, None]
    return style, model.decode(styles_LKS).sigmoid().unflatten(2, images_BCHW.shape[2:]).transpose(
        0, 1
    )


def _sheet(images_RLHW: Tensor, rows: Sequence[str], columns: Sequence[str], title: str) -> Tensor:
    """Draw pictures with values from 0 to 1 in named rows and columns."""
    from matplotlib.figure import Figure

    height, width = images_RLHW.shape[2:]
    tiles = F.pad(images_RLHW, (1, 1, 1, 1), value=1.0).permute(0, 2, 1, 3).flatten(0, 1).flatten(1)
    figure = Figure(
        (1.4 + 0.62 * len(columns), 0.7 + 0.62 * len(rows)), dpi=100, layout="constrained"
    )
    axes = figure.add_subplot(title=title)
    axes.imshow(tiles.numpy(), cmap="gray", vmin=0, vmax=1)
    axes.set_yticks([(row + 0.5) * (height + 2) - 0.5 for row in range(len(rows))], rows)
    axes.set_xticks(
        [(column + 0.5) * (width + 2) - 0.5 for column in range(len(columns))], columns, fontsize=8
    )
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return pictures.from_figure(figure)


def _robustness(values: Mapping[str, float]) -> Tensor:
    """Draw the accuracy against the strength, with a line for each corruption."""
    from matplotlib.figure import Figure

    figure = Figure((6.4, 4.4), dpi=100, layout="constrained")
    axes = figure.add_subplot(
        xlabel="strength", ylabel="accuracy", ylim=(0, 1.02), xticks=(0, *_STRENGTHS)
    )
    for kind, unit in _CORRUPTIONS.items():
        accuracy_T = [
            values["accuracy"],
            *(values[f"accuracy_{kind}_{strength}"] for strength in _STRENGTHS),
        ]
        axes.plot((0, *_STRENGTHS), accuracy_T, marker="o", label=f"{kind}: {unit}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    return pictures.from_figure(figure)
