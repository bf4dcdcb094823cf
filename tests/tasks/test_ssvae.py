"""The semi-supervised VAE: learning from unlabelled pictures, its bound and its corruptions."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal, kl_divergence
from torch.nn import functional as F

from tests.support.here import Here, board_of, training_here
from tests.tasks.test_mnist import files  # noqa: F401 - a fixture
from trainer.tasks.fashion_mnist import FashionMnist
from trainer.tasks.ssvae import M2, Ssvae, corrupted, first_of_each_class, style_grid

_FIELDS = {"dataset": "digits", "labelled": 0.1, "num_style": 10, "hidden": 256}
_SMALL_FIELDS = _FIELDS | {"num_style": 4, "hidden": 128}
_KINDS, _STRENGTHS = ("noise", "blur", "occlusion"), (0.2, 0.4, 0.6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    """Train a small model for a short time, with 2 validations."""
    with training_here(tmp_path_factory.mktemp("ssvae")) as here:
        here.train(
            task="ssvae",
            epochs=8,
            batch_size=64,
            learning_rate=5e-3,
            eval_every=4,
            threads=1,
            fields=_SMALL_FIELDS,
        )
        yield here


@pytest.fixture(scope="module")
def trained_long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    with training_here(tmp_path_factory.mktemp("ssvae")) as here:
        here.train(
            task="ssvae",
            epochs=40,
            batch_size=64,
            learning_rate=3e-3,
            eval_every=2,
            threads=1,
            fields=_FIELDS,
        )
        yield here


def _accuracy_from_the_labelled_alone() -> float:
    """Return the accuracy of the same classifier after 300 steps on the 148 labelled pictures."""
    task = Ssvae(**_FIELDS)  # type: ignore[arg-type]
    images, labels, labelled = task.prepare(task.train_dataset(Path()).tensors, training=True)
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = task.build_optimizer(model, "adamw", 3e-3, None)
    for _ in range(300):
        optimizer.zero_grad()
        F.cross_entropy(model(images[labelled]), labels[labelled]).backward()
        optimizer.step()
    images, labels, _ = task.prepare(task.validation_dataset(Path()).tensors, training=False)
    return float((model(images).argmax(1) == labels).double().mean())


@pytest.mark.slow
def test_a_short_training_improves_the_bound_and_the_accuracy(trained: Here) -> None:
    validations = trained.entries("validation")
    assert validations[-1]["accuracy"] > 0.85
    assert validations[-1]["elbo"] > validations[0]["elbo"] + 1
    entries = trained.entries("train")
    for name in ("loss_reconstruction", "loss_classification"):
        assert entries[-1][name] < entries[0][name]


@pytest.mark.slow
@pytest.mark.rare
def test_unlabelled_pictures_raise_the_accuracy_above_93_percent(trained_long: Here) -> None:
    """A tenth of the pictures is labelled. Training on these alone gives a lower accuracy."""
    best = max(entry["accuracy"] for entry in trained_long.entries("validation"))
    alone = _accuracy_from_the_labelled_alone()
    assert 0.85 < alone < 0.93
    assert best > 0.935
    assert best > alone + 0.015


def test_the_accuracies_of_a_validation_follow_from_its_counts(trained: Here) -> None:
    for entry in trained.entries("validation"):
        confusion = torch.tensor(entry["confusion"])
        assert confusion.sum() == 360
        assert entry["accuracy"] == pytest.approx(float(confusion.diagonal().sum()) / 360)
        for kind, rights in zip(_KINDS, entry["right_when_corrupted"], strict=True):
            for strength, right in zip(_STRENGTHS, rights, strict=True):
                assert entry[f"accuracy_{kind}_{strength}"] == pytest.approx(right / 360)


def test_a_stronger_corruption_lowers_the_accuracy(trained: Here) -> None:
    entry = trained.entries("validation")[-1]
    for kind in _KINDS:
        accuracy = [
            entry["accuracy"],
            *(entry[f"accuracy_{kind}_{strength}"] for strength in _STRENGTHS),
        ]
        assert accuracy[3] < accuracy[2] - 0.05 < accuracy[0] - 0.05


def test_tensorboard_shows_the_figures_and_the_accuracies(trained: Here) -> None:
    board = board_of(trained.path())
    tags = {tag.removeprefix("validation/") for tag in board.Tags()["images"]}
    assert tags == {"confusion_matrix", "reconstructions", "styles", "robustness"}
    noise = [event.value for event in board.Scalars("validation/accuracy_noise_0.4")]
    assert noise == pytest.approx(
        [entry["accuracy_noise_0.4"] for entry in trained.entries("validation")]
    )


@pytest.mark.slow
@pytest.mark.rare
def test_a_generated_picture_is_classified_as_its_class(trained_long: Here) -> None:
    model = M2(8, 10, 10, 256).eval()
    model.load_state_dict(trained_long.weights())
    images, _, _ = Ssvae(**_FIELDS).prepare(
        Ssvae(**_FIELDS).validation_dataset(Path()).tensors, False
    )  # type: ignore[arg-type]
    with torch.no_grad():
        style, grid = style_grid(model, images)
        assert grid.shape == (10, 9, 8, 8)
        middle = grid[:, 4]
        assert model(middle[:, None]).argmax(1).eq(torch.arange(10)).sum() >= 9
        assert (grid[:, 0] - grid[:, 8]).abs().mean() > 0.02  # the style changes the pictures
    assert 0 <= style < 10


def _reference(model: M2, image: Tensor, target: int | None, drawn: Tensor) -> float:
    """Return the negative bound of one picture (1, H, W): the paper's L(x, y), or its U(x)."""
    q_y = Categorical(logits=model(image[None])[0])
    loss = []
    for y in range(10):
        mean, log_variance = (part[0, y] for part in model.encode(image[None]))
        style = Normal(mean, (log_variance / 2).exp())
        logits = model.decode((style.mean + style.stddev * drawn).expand(1, 10, -1))[0, y]
        log_likelihood = (
            Bernoulli(logits=logits, validate_args=False).log_prob(image.flatten()).sum()
        )
        divergence = kl_divergence(
            style, Normal(torch.zeros_like(mean), torch.ones_like(mean))
        ).sum()
        loss.append(float(divergence - log_likelihood - math.log(1 / 10)))
    if target is not None:
        return loss[target]
    return sum(float(q) * of_y for q, of_y in zip(q_y.probs, loss, strict=True)) - float(
        q_y.entropy()
    )


@torch.no_grad()
def test_the_losses_are_those_of_the_paper() -> None:
    task = Ssvae(dataset="digits", num_style=3, hidden=16, classification_weight=7.0)
    torch.manual_seed(1)
    model = task.build_model()
    assert isinstance(model, M2)
    for parameter in model.parameters():
        parameter.mul_(3)  # so that no term is near 0
    images, labels, _ = (tensor[:4] for tensor in task.train_dataset(Path()).tensors)
    labelled = torch.tensor([True, False, True, False])
    batch = task.prepare((images, labels, labelled), training=True)
    torch.manual_seed(2)
    losses = task.losses(model, batch)
    torch.manual_seed(2)
    drawn = torch.randn(4, 1, 3)
    for i in range(4):
        expected = _reference(
            model, batch[0][i], int(labels[i]) if labelled[i] else None, drawn[i, 0]
        )
        assert float(losses["reconstruction"][i] + losses["kl"][i]) == pytest.approx(
            expected, rel=1e-5
        )
    cross_entropy = F.cross_entropy(model(batch[0]), labels, reduction="none")
    assert losses["classification"].tolist() == pytest.approx(
        (7 * cross_entropy * labelled).tolist()
    )


@pytest.mark.parametrize(("share", "wanted"), [(0.1, [2, 1]), (0.25, [3, 2]), (1.0, [11, 6])])
def test_the_first_of_each_class_have_a_label(share: float, wanted: list[int]) -> None:
    labels = torch.tensor([0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 1, 0, 1, 0, 0, 1, 0])
    labelled = first_of_each_class(labels, share)
    for label, count in enumerate(wanted):
        assert labelled[labels == label].tolist() == [True] * count + [False] * (
            int((labels == label).sum()) - count
        )


def test_a_tenth_of_the_digits_has_a_label_and_no_validation_picture_has() -> None:
    task = Ssvae(dataset="digits")
    _, labels, labelled = task.train_dataset(Path()).tensors
    counts, given = labels.bincount(minlength=10), labels[labelled].bincount(minlength=10)
    assert given.tolist() == [math.ceil(count / 10) for count in counts.tolist()]
    assert not task.validation_dataset(Path()).tensors[2].any()


def test_noise_has_the_strength_as_its_deviation_and_stays_between_black_and_white() -> None:
    torch.manual_seed(0)
    grey = torch.full((50, 1, 28, 28), 0.5)
    assert float(corrupted(grey, "noise", 0.1).std()) == pytest.approx(0.1, rel=0.02)
    strong = corrupted(grey, "noise", 0.6)
    assert (strong.min(), strong.max()) == (0, 1)


@pytest.mark.parametrize("width", [8, 28])
def test_blur_spreads_a_point_by_fifths_of_the_width_and_leaves_an_even_picture_even(
    width: int,
) -> None:
    even = torch.full((2, 1, width, width), 0.3)
    assert corrupted(even, "blur", 0.6).sub(even).abs().max() < 1e-6
    point = torch.zeros(1, 1, width, width)
    point[..., width // 2, width // 2] = 1
    row = corrupted(point, "blur", 0.4)[0, 0, width // 2]
    step = 0.4 * width / 5
    assert float(row[width // 2 + 1] / row[width // 2]) == pytest.approx(
        math.exp(-1 / (2 * step**2)), rel=0.2
    )


def test_occlusion_blackens_one_square_at_a_random_position() -> None:
    torch.manual_seed(0)
    hidden = corrupted(torch.ones(200, 1, 28, 28), "occlusion", 0.4) == 0
    side = round(0.4 * 28)
    assert hidden.sum((1, 2, 3)).eq(side * side).all()
    rows, columns = hidden.any(3), hidden.any(2)
    for lines in (rows, columns):
        assert lines.sum(2).eq(side).all()
        assert set(lines[:, 0].int().argmax(1).tolist()) == set(range(28 - side + 1))


def test_fashion_mnist_has_the_examples_of_the_task_of_that_name(
    here: Here,
    files: Path,  # noqa: F811
) -> None:
    shutil.copytree(files, here.folder / "data/FashionMNIST/raw")
    fields = {"dataset": "fashion_mnist", "hidden": 32, "num_style": 4, "labelled": 0.5}
    task, data = Ssvae(**fields), here.folder / "data"
    for found, source in (
        (task.train_dataset(data), FashionMnist().train_dataset(data)),
        (task.validation_dataset(data), FashionMnist().validation_dataset(data)),
    ):
        images, labels, _ = found.tensors
        assert images.equal(source.tensors[0])
        assert labels.equal(source.tensors[1])
    out = here.train(task="ssvae", max_steps=1, batch_size=8, fields=fields)
    assert "1,437 training and 360 validation examples, 0 in both, held on cpu" in out
    assert task.class_names[:2] == ("t-shirt", "trouser")
