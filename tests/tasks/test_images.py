"""The task `images`: the layout of the folder, decoding, damaged files, models and trainings."""

import contextlib
import json
import os
import re
import shutil
import struct
import urllib.error
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image, UnidentifiedImageError
from safetensors.torch import save_file
from torchvision import models

from tests.support.here import Here, board_of
from tests.support.pictures import FIELDS, make_pictures
from trainbox.errors import WrongUse
from trainer.tasks.images import Images
from trainer.tasks.imaging.augment import load_augmented_picture, mixed
from trainer.tasks.imaging.class_folders import find_pictures
from trainer.tasks.imaging.damage import (
    damaged_pictures,
    found_damage,
    refuse_damaged,
)
from trainer.tasks.imaging.models import build_model, describe_weights, normalization
from trainer.tasks.imaging.picture import load_picture
from trainer.tasks.reading.files import test_folder as folder_of_test

_CLASSES = ("cross", "disc", "stripes")
_SHORT: dict[str, Any] = {
    "task": "images",
    "max_steps": 2,
    "batch_size": 8,
    "workers": 0,
    "threads": 1,
    "fields": FIELDS,
}


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    """Return the folder of 36 pictures in three classes."""
    make_pictures(tmp_path / "data/shapes", _CLASSES, 12, seed=0)
    return tmp_path / "data/shapes"


def _task(**fields: Any) -> Images:
    return Images(**{**FIELDS, **fields})


# Training.


def test_a_run_reports_classes_metrics_and_figures(here: Here, shapes: Path) -> None:
    out = here.train(**_SHORT)
    assert "\ndata       27 training and 9 validation examples" in out
    assert "\nclasses    cross 10, disc 9, stripes 8\n" in out
    assert "\nvalidation cross 2, disc 3, stripes 4\n" in out
    (entry,) = here.entries("validation")
    assert list(map(sum, entry["confusion"])) == [2, 3, 4]
    assert {"loss", "accuracy", "macro_f1"} <= set(entry)
    board = board_of(here.path())
    names = {tag.rpartition("/")[2] for tag in board.Tags()["images"]}
    assert names == {"confusion_matrix", "examples"}


@pytest.mark.slow
@pytest.mark.rare
def test_a_training_from_new_weights_recognizes_three_shapes(here: Here) -> None:
    make_pictures(here.folder / "data/shapes", _CLASSES, 200, seed=0, size=64)
    fields = {"folder": "shapes", "size": 64}  # a ResNet-18
    here.train(**_SHORT | {"max_steps": None, "epochs": 12, "batch_size": 32, "fields": fields})
    assert max(entry["macro_f1"] for entry in here.entries("validation")) > 0.95


# Losses and metrics.


def _prepared(task: Images, labels: list[int], weights: list[float]) -> tuple[Any, Any]:
    """Return prepared pictures whose pixels are 10 times the label."""
    labels_B = torch.tensor(labels)
    pictures_BHWC = (10 * labels_B).byte().view(-1, 1, 1, 1).expand(-1, 16, 16, 3)
    batch = (pictures_BHWC, labels_B, torch.tensor(weights))
    return task.prepare(batch, training=True)


def test_training_pictures_are_flipped_and_all_are_normalized() -> None:
    torch.manual_seed(0)
    pictures_BHWC = torch.zeros(16, 8, 8, 3, dtype=torch.uint8)
    pictures_BHWC[:, :, :4, 0] = 255  # the left half is red
    batch = (pictures_BHWC, torch.zeros(16, dtype=torch.int64), torch.ones(16))
    red, black = (1 - 0.485) / 0.229, -0.485 / 0.229
    task = _task(classes="a/b")
    left_B = task.prepare(batch, training=True)[0][:, 0, 0, 0]
    assert 3 <= (left_B > 0).sum() <= 13
    assert torch.allclose(left_B, torch.where(left_B > 0, red, black))
    for images_BCHW in (
        task.prepare(batch, training=False)[0],
        _task(classes="a/b", augment=False).prepare(batch, training=True)[0],
    ):
        assert images_BCHW.is_contiguous()
        assert torch.allclose(images_BCHW[:, 0, :, :4], torch.tensor(red))
        assert torch.allclose(images_BCHW[:, 1, :, :], torch.tensor(-0.456 / 0.224))


def test_labels_have_the_losses_and_gradients_of_their_targets() -> None:
    torch.manual_seed(0)
    task, labels_B = _task(classes="a/b/c"), torch.arange(64) % 3
    found = []
    for targets in (labels_B, torch.nn.functional.one_hot(labels_B, 3).float()):
        logits_BK = torch.randn(64, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
        losses = task.losses(lambda _, found=logits_BK: found, (None, targets))  # type: ignore[arg-type,misc]
        losses["cross_entropy"].sum().backward()
        assert logits_BK.grad is not None
        found.append((losses["cross_entropy"].tolist(), losses["accuracy"], logits_BK.grad))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1:], found[1][1:]))


def test_targets_are_smoothed_and_weighted() -> None:
    _, targets_BK = _prepared(_task(classes="a/b", label_smoothing=0.2), [0, 1], [1.0, 3.0])
    assert torch.allclose(targets_BK, torch.tensor([[0.9, 0.1], [0.3, 2.7]]))
    task = _task(classes="a/b", label_smoothing=0.2)
    logits_BK, labels_B = torch.randn(2, 2), torch.tensor([0, 1])
    losses = task.losses(lambda _: logits_BK, (None, targets_BK))  # type: ignore[arg-type]
    expected_B = torch.nn.functional.cross_entropy(
        logits_BK, labels_B, reduction="none", label_smoothing=0.2
    ) * torch.tensor([1.0, 3.0])
    assert torch.allclose(losses["cross_entropy"], expected_B)
    assert losses["accuracy"].tolist() == (logits_BK.argmax(1) == labels_B).tolist()


@pytest.mark.parametrize("fields", [{"mixup": 0.5}, {"cutmix": 1.0}, {"mixup": 1, "cutmix": 1}])
def test_targets_are_mixed_in_the_shares_of_the_pictures(fields: dict[str, float]) -> None:
    torch.manual_seed(0)
    task = _task(classes="a/b/c", **fields)
    labels = [0, 1, 2, 1] * 4
    images_BCHW, targets_BK = _prepared(task, labels, [1.0] * len(labels))
    plain_BCHW, labels_B = _prepared(_task(classes="a/b/c"), labels, [1.0] * len(labels))
    assert labels_B.tolist() == labels
    pixel_K = torch.stack([plain_BCHW[labels.index(k), 0, 0, 0] for k in range(3)])
    assert torch.allclose(images_BCHW[:, 0].mean((1, 2)), targets_BK @ pixel_K, atol=1e-5)
    assert torch.allclose(targets_BK.sum(1), torch.ones(len(labels)))
    own_B = targets_BK.gather(1, labels_B[:, None]).squeeze(1)
    assert 0.2 < own_B.mean() < 0.8
    assert (own_B[1:] != own_B[:-1]).any()  # each picture has its own share
    if "mixup" not in fields:
        whole = (images_BCHW[:, 0, :, :, None] - pixel_K).abs().min(-1).values
        assert whole.max() < 1e-5


def test_with_mixup_and_cutmix_each_picture_draws_one() -> None:
    torch.manual_seed(0)
    images_BCHW = (torch.arange(200.0) % 2).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    found_BCHW, _ = mixed(images_BCHW, torch.zeros(200, 2), 1.0, 1.0)
    whole_B = ((found_BCHW == 0) | (found_BCHW == 1)).flatten(1).all(1)  # as CutMix leaves pixels
    blended_B = found_BCHW.flatten(1).std(1) < 1e-6
    assert 60 < int(whole_B.sum()) < 140
    assert (whole_B | blended_B).all()


def test_the_weights_of_classes_are_balanced(tmp_path: Path) -> None:
    make_pictures(tmp_path / "shapes/train", ("a",), 6, seed=0)
    make_pictures(tmp_path / "shapes/train", ("b",), 2, seed=0)
    make_pictures(tmp_path / "shapes/val", ("a", "b"), 1, seed=1)
    task = _task(class_weights=True).with_data(tmp_path)
    train, validation = task.pictures(tmp_path)
    weights = [float(train[i][2]) for i in range(8)]
    assert weights == pytest.approx([2 / 3] * 6 + [2.0] * 2)
    assert sum(weights) == pytest.approx(8)
    classes = task.notes(train, validation)["classes"]
    assert classes == "a 6, b 2 (weights from 0.667 to 2)"


def test_top_5_counts_labels_among_the_five_largest_logits() -> None:
    task = _task(classes="a/b/c/d/e/f/g")
    logits_BK = torch.tensor([[7.0, 6, 5, 4, 3, 2, 1]] * 4)
    sums = task.sums(logits_BK, torch.tensor([0, 4, 5, 6]))
    assert sums["top5"] == 2
    totals = {name: value.double() for name, value in sums.items()} | {"examples": torch.tensor(4)}
    metrics = task.metrics(totals)
    assert (metrics["top5"], metrics["accuracy"]) == (0.5, 0.25)
    assert "top5" not in _task(classes="a/b").sums(logits_BK[:, :2], torch.tensor([0, 1, 1, 1]))


def test_the_average_of_the_weights_is_validated_and_saved(here: Here, shapes: Path) -> None:
    fields = FIELDS | {"ema": 0.75}
    here.train(**_SHORT | {"fields": fields, "max_steps": 3}, checkpoint_steps=1, keep=9)
    states = [here.state(step)["model"] for step in (1, 2, 3)]
    for name in ("fc.weight", "conv1.1.running_mean"):
        average = states[0][f"model.{name}"]
        for state in states:
            average = torch.lerp(average, state[f"model.{name}"], 0.25)
            assert torch.equal(state[f"averaged.module.{name}"], average)
        assert not torch.equal(average, states[2][f"model.{name}"])
    # The plain model with the averaged weights has the loss of the last validation.
    path = Path("averaged.pt")
    torch.save(states[2], path)
    model = build_model(FIELDS["model"], 3, 32, str(path)).eval()
    task = Images(**fields).with_data(Path("data"))
    _, validation = task.pictures(Path("data"))
    batch = torch.utils.data.default_collate([validation[i] for i in range(len(validation))])
    with torch.no_grad():
        sums = task.statistics(model, task.prepare(batch, training=False))
    loss = here.entries("validation")[-1]["loss"]
    assert float(sums["loss"]) / len(validation) == pytest.approx(loss, rel=1e-5)


def test_data_with_other_classes_are_refused(here: Here, shapes: Path) -> None:
    here.train(**_SHORT | {"max_steps": 1})
    assert here.json("manifest.json")["classes"] == list(_CLASSES)
    (shapes / "disc").rename(shapes / "a")
    err = here.refused("evaluate", "runs/r", "--device", "cpu")
    assert "class 0 of runs/r is cross, but class 0 of the data is a: give data with the" in err


# Predictions of files.


_PREDICT = ("predict", "runs/r", "--device", "cpu")


@pytest.mark.slow
def test_the_predictions_of_the_validation_files_are_those_of_evaluate(here: Here) -> None:
    for seed, part in enumerate(("train", "val")):
        make_pictures(here.folder / "data/shapes" / part, _CLASSES, 5, seed=seed)
    here.train(**_SHORT | {"fields": FIELDS | {"ema": 0.75}})
    out = here.succeeds("evaluate", "runs/r", "--device", "cpu", "--predictions", "out.csv")
    assert "  equal to the training's validation at step " in out
    header, *rows = [row.split(",") for row in Path("out.csv").read_text().splitlines()]
    assert header == ["id", "truth", "prediction", *(f"probability_{name}" for name in _CLASSES)]
    assert all(Path(row[0]).parent == Path("data/shapes/val") / row[1] for row in rows)
    code, out, err = here.command(*_PREDICT, "data/shapes/val")
    assert code == 0 and err.endswith("trainbox: 15 predictions\n")
    header, *found = [row.split(",") for row in out.splitlines()]
    assert header == ["file", "prediction", *(f"probability_{name}" for name in _CLASSES)]
    assert found == [[row[0], *row[2:]] for row in rows]
    # Other pictures at the same time do not change a prediction by more than the last digits.
    _, out, _ = here.command(*_PREDICT, rows[3][0])
    assert out.splitlines()[1].split(",")[1] == rows[3][2]
    assert [float(share) for share in out.splitlines()[1].split(",")[2:]] == pytest.approx(
        [float(share) for share in rows[3][3:]], rel=1e-5
    )


@pytest.mark.parametrize("classes", ["", "stripes/disc/cross"])
def test_pictures_are_predicted_without_the_training_data(
    here: Here, shapes: Path, classes: str
) -> None:
    here.train(**_SHORT | {"fields": FIELDS | {"classes": classes}})
    shutil.move(shapes / "disc", "new")
    shutil.rmtree("data")
    code, out, _ = here.command(*_PREDICT, "new")
    assert code == 0 and out.count("\n") == 13
    columns = [f"probability_{name}" for name in (classes or "cross/disc/stripes").split("/")]
    assert out.startswith(f"file,prediction,{','.join(columns)}\n")


def test_pictures_are_predicted_without_a_file_of_weights_but_not_without_classes(
    here: Here, shapes: Path
) -> None:
    here.train("a", **_SHORT)
    weights = {"weights": "runs/a/model.safetensors"}
    here.train("r", **_SHORT | {"fields": FIELDS | weights})
    files = str(shapes / "disc")
    before = here.command(*_PREDICT, files)
    shutil.rmtree("runs/a")
    assert before[0] == 0 and here.command(*_PREDICT, files) == before
    manifest = here.json("manifest.json") | {"classes": None}
    Path("runs/r/manifest.json").write_text(json.dumps(manifest))
    err = here.refused(*_PREDICT, files)
    assert err.startswith(
        "trainbox: class 0 of runs/r is missing, but class 0 of the data is cross"
    )


def test_damaged_pictures_are_refused_or_left_out_as_in_the_training(
    here: Here, shapes: Path
) -> None:
    make_pictures(here.folder / "new", ("a",), 4, seed=5)
    for name in ("0001", "0003"):
        path = here.folder / f"new/a/{name}.jpg"
        path.write_bytes(path.read_bytes()[:300])
    here.train(**_SHORT)
    err = here.refused(*_PREDICT, "new", silent=True)
    (line,) = err.splitlines()
    assert line.startswith("trainbox: new/a/0001.jpg is damaged (")
    assert line.endswith("; 1 more are damaged): replace it or leave it out")
    shutil.rmtree("runs")
    here.train(**_SHORT | {"fields": FIELDS | {"skip_damaged": "true"}})
    code, out, err = here.command(*_PREDICT, "new")
    names = [row.split(",")[0] for row in out.splitlines()[1:]]
    assert (code, names) == (0, ["new/a/0000.jpg", "new/a/0002.jpg"])
    assert "trainbox: 2 file(s) are left out: new/a/0001.jpg, new/a/0003.jpg\n" in err
    err = here.refused(*_PREDICT, "new/a/0001.jpg", silent=True)
    assert err == "trainbox: none of the 1 file(s) has an example: name other files\n"


# The folder.


@pytest.mark.parametrize("names", [("train", "val"), ("Train", "Valid"), ("TRAIN", "VALIDATION")])
def test_train_and_val_folders_are_the_parts(tmp_path: Path, names: tuple[str, str]) -> None:
    make_pictures(tmp_path / "flowers" / names[0], ("a", "b"), 4, seed=0)
    make_pictures(tmp_path / "flowers" / names[1], ("a", "b"), 2, seed=1)
    task = _task(folder="flowers").with_data(tmp_path)
    train, validation = task.pictures(tmp_path)
    assert task.class_names == ("a", "b")
    assert [picture.path.parts[-3] for picture in train.pictures] == [names[0]] * 8
    assert [picture.path.parts[-3:] for picture in validation.pictures] == [
        (names[1], name, f"{number:04}.jpg") for name in "ab" for number in range(2)
    ]
    assert [validation[i][1] for i in range(4)] == [0, 0, 1, 1]


def test_the_folder_test_has_the_pictures_of_the_test(tmp_path: Path) -> None:
    for name, count in (("train", 3), ("val", 2), ("Test", 4)):
        make_pictures(tmp_path / "flowers" / name, ("a", "b"), count, seed=count)
    (tmp_path / "flowers/Test/a/0001.jpg").write_bytes(b"no picture")
    fields = {"folder": "flowers", "class_weights": True, "augment": True}
    task = _task(**fields, skip_damaged=True).with_data(tmp_path)
    found = task.test_dataset(tmp_path)
    assert [path.split("/")[-3:] for path in found.ids] == [
        ["Test", name, f"{number:04}.jpg"]
        for name, numbers in (("a", (0, 2, 3)), ("b", range(4)))
        for number in numbers
    ]
    assert not found.augment
    with pytest.raises(WrongUse, match=r"Test/a/0001\.jpg"):
        _task(**fields).with_data(tmp_path).test_dataset(tmp_path)


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (("train", "val"), " has no test data: make the folders train, val and test in it, or use"),
        (("test", "a"), " has no test data: make the folders train, val and test in it, or use"),
        (("train", "val", "test", "Test"), " has several folders for the test (Test, test): keep "),
    ],
)
def test_test_data_that_cannot_be_found_is_refused(
    tmp_path: Path, folders: Sequence[str], message: str
) -> None:
    for name in folders:
        make_pictures(tmp_path / name, ("a", "b"), 2, seed=0)
    with pytest.raises(WrongUse, match=re.escape(message)):
        folder_of_test(tmp_path)


@pytest.mark.parametrize("classes", ["cross", "cross/cross", "cross/", "/", "cross/../disc"])
def test_classes_must_be_the_names_of_two_folders_or_more(classes: str) -> None:
    with pytest.raises(WrongUse, match=f"^--set classes={re.escape(classes)}: use the different"):
        _task(classes=classes)


def _only_train(folder: Path) -> None:
    inner = folder.with_name("inner")
    folder.rename(inner)
    folder.mkdir()
    inner.rename(folder / "train")


def _only_validation(folder: Path) -> None:
    _only_train(folder)
    (folder / "train").rename(folder / "val")


def _two_of_validation(folder: Path) -> None:
    _only_train(folder)
    for name in ("Val", "valid"):
        shutil.copytree(folder / "train", folder / name)


def _with_val(*classes: str) -> Callable[[Path], None]:
    """Return a function that adds a validation folder with these classes."""

    def add(folder: Path) -> None:
        _only_train(folder)
        make_pictures(folder / "val", classes, 1, seed=1)

    return add


def test_train_without_validation_is_split(tmp_path: Path) -> None:
    """The folder `test` beside it is still the test data."""
    make_pictures(tmp_path / "shapes/train", _CLASSES, 20, seed=0)
    make_pictures(tmp_path / "shapes/test", _CLASSES, 1, seed=1)
    task = _task(classes="/".join(_CLASSES))
    train, validation = (part.ids for part in task.pictures(tmp_path))
    assert min(len(train), len(validation)) > 3 and len({*train, *validation}) == 60
    assert all("/train/" in path for path in (*train, *validation))
    assert all("/test/" in path for path in task.test_dataset(tmp_path).ids)


# fmt: off
_BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: [shutil.rmtree(folder / name) for name in _CLASSES[1:]],
     "data/shapes has 1 class folder(s): put the pictures into a folder for each"),
    (lambda folder: (folder / "empty").mkdir(), "data/shapes/empty has no picture (.jpg, .jpeg, "),
    (shutil.rmtree, "data/shapes does not exist: put pictures there, as data/shapes/CLASS"),
    (_only_validation, "data/shapes has a folder val but no folder train: add train, or rename"),
    (_two_of_validation, "data/shapes has several folders for validation (Val, valid): keep "),
    (lambda folder: os.mkfifo(folder / "disc/x.jpg"),
     "data/shapes/disc/x.jpg is a FIFO, a device or a socket, not a file: remove it"),
    (_with_val(*_CLASSES, "oval"),
     "data/shapes/val/oval is a class that data/shapes/train does not have: "),
    (_with_val(*_CLASSES[:2]),
     "data/shapes/val has no folder stripes: add it with pictures of this class"),
    (lambda folder: [path.unlink() for path in sorted((folder / "disc").iterdir())[1:]],
     "data/shapes: class disc has no picture for "),
]
# fmt: on


@pytest.mark.parametrize(("broken", "message"), _BROKEN)
def test_a_folder_that_cannot_be_used_is_one_line_and_exit_2(
    here: Here, shapes: Path, broken: Callable[[Path], None], message: str
) -> None:
    broken(shapes)
    err = here.refused(*_train())
    assert err.splitlines()[0].startswith(f"trainbox: {message}")


def _train(*fields: str, workers: int = 0) -> tuple[str, ...]:
    """Return the command that trains for one step with `fields`."""
    settings = [f"--set={name}={value}" for name, value in FIELDS.items()]
    more = ("--max-steps=1", "--batch-size=4", "--device=cpu", "--threads=1", "--run=r")
    new = (f"--set={field}" for field in fields)
    return ("train", "images", *settings, *new, *more, f"--workers={workers}")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("weights=gone.pt", "--set weights=gone.pt: gone.pt does not exist: check the path"),
        ("folder=data/shapes", "data/data/shapes does not exist: there is a folder data/shapes in"),
        ("folder=Shapes", "data/Shapes does not exist: did you mean data/shapes (--set folder=sh"),
        ("folder=sahpes", "data/sahpes does not exist: did you mean data/shapes (--set folder=sh"),
        ("folder=zebra", "data/zebra does not exist: put pictures there, as data/zebra/CLASS/NAME"),
        ("classes=cross/oval", "data/shapes/oval does not exist: use folders of "),
        ("weights=w.pt", "--set weights=w.pt has no tensor of the model: it has layers."),
    ],
)  # fmt: skip
def test_a_wrong_field_is_one_line_and_exit_2(
    here: Here, shapes: Path, field: str, message: str
) -> None:
    torch.save(models.get_model("mnasnet0_5").state_dict(), "w.pt")  # of another model
    err = here.refused(*_train(field))
    assert err.startswith(f"trainbox: {message}")


# Decoding.

_RED, _GREEN, _BLUE, _WHITE = (250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 250)
_TURNED_BACK = {  # how a camera stores an upright picture, by orientation
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def _quarters(width: int = 48, height: int = 48) -> Image.Image:
    picture = Image.new("RGB", (width, height), _WHITE)
    picture.paste(_RED, (0, 0, width // 2, height // 2))
    picture.paste(_GREEN, (width // 2, 0, width, height // 2))
    picture.paste(_BLUE, (0, height // 2, width // 2, height))
    return picture


def _assert_quarters(pixels_HWC: torch.Tensor) -> None:
    ends = (1, len(pixels_HWC) - 2)  # the outermost pixels may have some of their neighbours
    corners = [pixels_HWC[y, x].tolist() for y in ends for x in ends]
    expected = [_RED, _GREEN, _BLUE, _WHITE]
    assert numpy.abs(numpy.array(corners) - numpy.array(expected)).max() < 12, corners


@pytest.mark.parametrize("orientation", _TURNED_BACK)
@pytest.mark.parametrize("ending", ["jpg", "png", "tif"])
def test_pictures_are_turned_upright(tmp_path: Path, orientation: int, ending: str) -> None:
    stored, turn = Image.new("RGB", (96, 64)), _TURNED_BACK[orientation]
    stored.paste(_quarters(64, 64), (16, 0))  # black on the left and on the right
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"x.{ending}"
    (stored if turn is None else stored.transpose(turn)).save(path, exif=exif)
    pixels = load_picture(path, 16, 16)
    assert pixels.shape == (16, 16, 3) and pixels.dtype == torch.uint8
    _assert_quarters(pixels)


@pytest.mark.parametrize(
    ("mode", "name", "value", "expected"),
    [
        ("L", "x.png", 100, (100, 100, 100)),
        ("L", "x.jpg", 100, (100, 100, 100)),
        ("LA", "x.png", (100, 255), (100, 100, 100)),
        ("RGBA", "x.png", (0, 0, 0, 0), (255, 255, 255)),
        ("RGBA", "x.webp", (200, 10, 20, 255), (200, 10, 20)),
        ("RGB", "x.avif", (250, 0, 0), (250, 0, 0)),
        ("CMYK", "x.jpg", (0, 255, 255, 0), (254, 0, 0)),
        ("1", "x.png", 1, (255, 255, 255)),
        ("I;16", "x.png", 40_000, (156, 156, 156)),
        ("I;16", "x.tif", 40_000, (156, 156, 156)),
        ("I", "x.tif", 65_535, (255, 255, 255)),
    ],
)
def test_each_kind_of_pixels_becomes_rgb(
    tmp_path: Path, mode: str, name: str, value: Any, expected: tuple[int, ...]
) -> None:
    Image.new(mode, (20, 30), value).save(tmp_path / name)
    pixels = load_picture(tmp_path / name, 8, 8)
    assert (pixels.int() - torch.tensor(expected)).abs().max() <= 5


def test_transparent_colours_of_a_palette_are_white(tmp_path: Path) -> None:
    picture = Image.new("P", (20, 20), 1)
    picture.putpalette([0, 0, 0, 200, 0, 0])
    picture.save(tmp_path / "x.gif", transparency=1)
    assert (load_picture(tmp_path / "x.gif", 8, 8) == 255).all()


def test_the_centre_is_cut_from_the_shorter_side(tmp_path: Path) -> None:
    picture = Image.new("RGB", (80, 40), _WHITE)
    picture.paste(_RED, (20, 0, 60, 40))
    picture.save(tmp_path / "x.png")
    assert (load_picture(tmp_path / "x.png", 8, 8)[:, 1:-1] == torch.tensor(_RED)).all()
    picture.paste(_BLUE, (30, 10, 50, 30))
    picture.save(tmp_path / "x.png")
    assert (load_picture(tmp_path / "x.png", 8, 16)[1:-1, 1:-1] == torch.tensor(_BLUE)).all()


def test_a_large_jpeg_that_is_decoded_smaller_looks_the_same(tmp_path: Path) -> None:
    paths = make_pictures(tmp_path, ("a", "b", "c"), 1, seed=0, size=400)
    for path in paths:
        with Image.open(path) as image:
            image.save(path.with_suffix(".png"))
        small = load_picture(path, 32, 32).float()
        assert (small - load_picture(path.with_suffix(".png"), 32, 32).float()).abs().mean() < 2


def test_an_augmented_picture_follows_from_the_seed(tmp_path: Path) -> None:
    (path,) = make_pictures(tmp_path, ("a",), 1, seed=0)
    drawn = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        drawn.append(load_augmented_picture(path, 24))
    assert drawn[0].shape == (24, 24, 3)
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


# Damaged pictures.


def _cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:400])


def _overwrite(path: Path) -> None:
    path.write_text("not a picture")


def _replace_by_a_broken_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("gone.jpg"))


_DAMAGES: dict[Callable[[Path], None], str] = {
    _overwrite: "it does not start as a picture",
    _replace_by_a_broken_link: "No such file or directory",
    lambda path: os.truncate(path, 0): "the file is empty",
    _cut_off: "Truncated File Read",
}


@pytest.mark.parametrize(("damage", "reason"), _DAMAGES.items(), ids=_DAMAGES.values())
def test_a_damaged_picture_is_named(
    here: Here, shapes: Path, damage: Callable[[Path], None], reason: str
) -> None:
    damage(shapes / "disc/0003.jpg")
    if reason.startswith("Trunc"):  # found when it is read: leave no other picture of the class
        for path in (shapes / "disc").iterdir():
            damage(path)
    code, _, err = here.command(*_train(workers=int(reason.startswith("Trunc"))))
    assert code == 2
    assert re.match(rf"trainbox: data/shapes/disc/\d+\.jpg is damaged \({reason}", err), err
    assert "set skip_damaged=true" in err.splitlines()[0]
    assert "Traceback" not in err


def test_damaged_pictures_are_skipped_and_counted(here: Here, shapes: Path) -> None:
    bits = []
    for number, damage in enumerate(_DAMAGES):
        damage(shapes / f"cross/{number:04}.jpg")
    for run, workers in (("one", 0), ("two", 1)):
        fields = {**FIELDS, "skip_damaged": "true"}
        out = here.train(run, **_SHORT | {"workers": workers, "fields": fields})
        assert "\ndamaged    4 pictures are skipped: data/shapes/cross/000" in out
        bits.append(here.digest(run))
    assert bits[0] == bits[1]
    for number in range(len(_DAMAGES)):
        (shapes / f"cross/{number:04}.jpg").unlink()
    here.train("without", **_SHORT)
    assert here.digest("without") == bits[0]


def test_the_search_for_damage_is_kept_until_a_file_changes(shapes: Path) -> None:
    pictures = find_pictures(shapes, _CLASSES, shapes)
    _cut_off(shapes / "disc/0001.jpg")
    found = {shapes / "disc/0001.jpg"}
    assert damaged_pictures(shapes, pictures) == found
    (kept,) = (shapes / ".cache").iterdir()
    kept.write_text('["disc/0005.jpg"]')
    assert damaged_pictures(shapes, pictures) == {shapes / "disc/0005.jpg"}
    _cut_off(shapes / "disc/0002.jpg")
    found |= {shapes / "disc/0002.jpg"}
    assert damaged_pictures(shapes, pictures) == found
    (shapes / "disc/9.jpg").symlink_to("missing")
    assert damaged_pictures(shapes, find_pictures(shapes, _CLASSES, shapes)) == found | {
        shapes / "disc/9.jpg"
    }


def test_a_picture_that_cannot_be_read_is_not_skipped(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    message = r"/a/x\.jpg cannot be read \(Not a directory\): make it readable$"
    with pytest.raises(WrongUse, match=message):
        found_damage([tmp_path / "a/x.jpg"])


def test_warnings_of_decoded_pictures_are_not_shown(here: Here, shapes: Path) -> None:
    # The orientation has no value in the file.
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", 0x0112, 2, 99, 999)
    path = shapes / "disc/0001.jpg"
    Image.open(path).save(path, exif=exif)
    with pytest.warns(UserWarning):
        load_picture(path, 4, 4)
    here.succeeds(*_train())


@pytest.mark.parametrize(
    ("major", "compatible", "reason"),
    [
        (b"avif", b"", None),
        (b"mif1", b"miafavif", None),
        (b"mif1", b"heic", "it is a HEIC picture: convert it to JPEG"),
        (b"isom", b"mp41", "it does not start as a picture"),
    ],
)
def test_the_brands_of_a_file_show_what_it_is(
    tmp_path: Path, major: bytes, compatible: bytes, reason: str | None
) -> None:
    box = b"ftyp" + major + bytes(4) + compatible
    path = tmp_path / "a/x.HEIC"
    path.parent.mkdir()
    path.write_bytes((len(box) + 4).to_bytes(4) + box + b"avif" * 9)
    pictures = find_pictures(tmp_path, ["a"], tmp_path)
    with contextlib.nullcontext() if reason is None else pytest.raises(WrongUse) as refused:
        refuse_damaged(pictures)
    assert reason is None or f"/a/x.HEIC is damaged ({reason})" in str(refused.value)


def test_a_picture_with_impossible_values_is_damaged(tmp_path: Path) -> None:
    Image.fromarray(numpy.full((9, 9), 0.5, numpy.float32)).save(tmp_path / "x.tif")
    with pytest.raises(UnidentifiedImageError, match="not whole numbers"):
        load_picture(tmp_path / "x.tif", 4, 4)


# Models and weights.


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where torchvision's cache has the weights of the tests' model, for 1,000 classes."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    url = models.get_model_weights(FIELDS["model"])["DEFAULT"].url
    path = tmp_path / "torch/hub/checkpoints" / url.rpartition("/")[2]
    path.parent.mkdir(parents=True)
    torch.manual_seed(7)
    torch.save(models.get_model(FIELDS["model"]).state_dict(), path)
    return path


def test_weights_of_the_cache_are_loaded_except_the_last_layer(
    here: Here, shapes: Path, cached: Path
) -> None:
    out = here.train(**_SHORT | {"fields": {**FIELDS, "weights": "DEFAULT"}, "max_steps": 1})
    assert "\nweights    DEFAULT: 336 of 338 tensors; fc is new (3 classes)\n" in out
    model, given = build_model(FIELDS["model"], 3, 32, "DEFAULT").state_dict(), torch.load(cached)
    assert {name for name in model if not torch.equal(model[name], given[name])} == {
        "fc.weight",
        "fc.bias",
    }


@pytest.mark.parametrize(
    ("ending", "start", "more"),
    [
        ("safetensors", "", ""),
        ("pt", "", ""),
        ("pt", "module.", "; names of the file without module."),
    ],
)
def test_weights_of_a_file_are_loaded(tmp_path: Path, ending: str, start: str, more: str) -> None:
    path = tmp_path / f"weights.{ending}"
    given = build_model(FIELDS["model"], 3, 32).state_dict()
    named = {f"{start}{name}": value for name, value in given.items()}
    if ending == "pt":
        torch.save({"model": named, "step": 3}, path)
    else:
        save_file(named, path)
    model = build_model(FIELDS["model"], 3, 32, str(path)).state_dict()
    assert all(torch.equal(model[name], given[name]) for name in model)
    assert describe_weights(FIELDS["model"], 3, 32, str(path)) == (
        f"{path}: 338 of 338 tensors{more}"
    )


def test_a_run_starts_from_the_averaged_weights_of_another(here: Here, shapes: Path) -> None:
    averaging = {**FIELDS, "ema": 0.5}
    here.train("a", **_SHORT | {"fields": averaging, "max_steps": 2})
    given = here.weights("a")
    assert not torch.equal(given["model.fc.weight"], given["averaged.module.fc.weight"])
    for run, fields, start in (("b", FIELDS, ""), ("c", averaging, "model.")):
        settings = {"fields": fields, "max_steps": 1, "init": "runs/a", "freeze": [f"{start}fc"]}
        out = here.train(run, **_SHORT | settings)
        assert "\ninit       runs/a/model.safetensors: 338 of 338 tensors\n" in out
        weights = here.weights(run)
        assert torch.equal(weights[f"{start}fc.weight"], given["averaged.module.fc.weight"])
    assert torch.equal(weights["averaged.module.fc.weight"], weights["model.fc.weight"])


@pytest.mark.parametrize(("model", "size"), [("vit_b_32", 33), ("maxvit_t", 32)])
def test_a_size_that_a_transformer_cannot_have_is_named(model: str, size: int) -> None:
    with torch.device("meta"), pytest.raises(WrongUse, match=f"^--set size={size}: model {model} "):
        build_model(model, 2, size)


@pytest.mark.parametrize(
    ("model", "size", "least"), [("alexnet", 62, 63), ("squeezenet1_1", 8, 17)]
)
def test_a_size_that_is_too_small_is_named_with_the_least_one(
    monkeypatch: pytest.MonkeyPatch, model: str, size: int, least: int
) -> None:
    # The weights can need larger pictures than the layers.
    meta = models.get_model_weights(model)["DEFAULT"].meta
    monkeypatch.setitem(meta, "min_size", (100, 100))
    message = f"^--set size={size}: model {model} needs pictures of {least} pixels or more: use "
    with pytest.raises(WrongUse, match=message):
        build_model(model, 2, size)
    with torch.device("meta"):
        assert build_model(model, 2, least)(torch.zeros(2, 3, least, least)).shape == (2, 2)


def test_weights_that_cannot_be_downloaded_are_named_with_their_folder(
    here: Here, shapes: Path, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no route to host")

    cached.unlink()
    monkeypatch.setattr("torch.hub.download_url_to_file", refused)
    err = here.refused(*_train("weights=DEFAULT"))
    assert f"{cached.name} is not in {cached.parent} and cannot be downloaded (<urlopen err" in err


def test_a_damaged_file_of_the_cache_is_named(here: Here, shapes: Path, cached: Path) -> None:
    cached.write_bytes(cached.read_bytes()[:5000])
    err = here.refused(*_train("weights=DEFAULT"))
    assert err.startswith(f"trainbox: {cached} is damaged (")


def test_weights_bring_their_normalization() -> None:
    assert normalization("resnet18", "") == normalization("resnet18", "DEFAULT")
    assert normalization("efficientnet_v2_l", "DEFAULT") == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def test_auxiliary_outputs_are_left_out() -> None:
    with torch.device("meta"):
        model = build_model("googlenet", 3, 64).train()
        assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 3)
    assert not [name for name, _ in model.named_parameters() if name.startswith("aux")]


_SIZES = {"inception_v3": 75, "maxvit_t": 224, "vit_h_14": 56}


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("name", models.list_models(module=models))
def test_each_model_of_torchvision_has_an_output_per_class(name: str) -> None:
    if name.startswith("regnet") and name != "regnet_x_400mf":
        pytest.skip("RegNet cannot be built without memory, so only a small one is")
    size = _SIZES.get(name, 64)
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        model = build_model(name, 3, size).train()
        assert model(torch.zeros(2, 3, size, size)).shape == (2, 3)
    total = len(model.state_dict())
    described = describe_weights(name, 3, _SIZES_OF_WEIGHTS.get(name, size), "DEFAULT")
    loaded = total - (1 if name == "maxvit_t" else 2)  # its last layer has no bias
    assert re.match(rf"DEFAULT: {loaded} of {total} tensors; \S+ is new \(3 classes\)", described)


_SIZES_OF_WEIGHTS = {
    "maxvit_t": 224,
    "vit_b_16": 224,
    "vit_b_32": 224,
    "vit_l_16": 224,
    "vit_l_32": 224,
    "vit_h_14": 518,
}
