"""The default task, digits: its accuracy, its entries in metrics.jsonl and in TensorBoard."""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.commands import Trainbox
from tests.support.here import board_of, training_here
from trainer.tasks.digits import Digits


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Return the run's folder after 5 epochs of the default command, and the output."""
    with training_here(tmp_path_factory.mktemp("digits")) as here:
        out = here.succeeds("train", "--device", "cpu", "--epochs", "5")
        (run,) = (here.folder / "runs").iterdir()
        yield run, out


def _entries(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [entry for line in lines if (entry := json.loads(line))["kind"] == kind]


@pytest.fixture(scope="module")
def board(trained: tuple[Path, str]) -> Any:
    return board_of(trained[0])


@pytest.mark.slow
def test_the_default_command_reaches_97_percent(trainbox: Trainbox) -> None:
    ended = trainbox.train("--device", "cpu")
    (run,) = (trainbox.folder / "runs").iterdir()
    _assert_learnt(run, ended.out, epochs=20, accuracy=0.97)
    environment = json.loads((run / "manifest.json").read_text())["environment"]
    assert environment["PYTHONHASHSEED"] == "0"  # Python's sets have the same order each time


def test_five_epochs_reach_95_percent(trained: tuple[Path, str]) -> None:
    _assert_learnt(*trained, epochs=5, accuracy=0.95)


def _assert_learnt(run: Path, out: str, epochs: int, accuracy: float) -> None:
    assert run.name.startswith("digits-")
    entries = _entries(run, "validation")
    assert [entry["epoch"] for entry in entries] == list(range(1, epochs + 1))
    best = max(entry["accuracy"] for entry in entries)
    assert best > accuracy
    match = re.search(r"^best +accuracy (0\.\d{4}|1\.0000), step (\d+)$", out, re.MULTILINE)
    assert match
    assert float(match[1]) == pytest.approx(best, abs=5e-5)


def test_the_exported_weights_have_the_accuracy_of_the_best_validation(
    trained: tuple[Path, str],
) -> None:
    model = Digits().build_model().eval()
    model.load_state_dict(load_file(trained[0] / "model.safetensors"))
    data = Digits().validation_dataset(Path())
    with torch.no_grad():
        images, labels = Digits().prepare(data.tensors, training=False)
        right = (model(images).argmax(1) == labels).double().mean()
    assert float(right) == pytest.approx(
        max(entry["accuracy"] for entry in _entries(trained[0], "validation"))
    )


def test_training_and_validation_together_have_1797_different_pictures() -> None:
    train, validation = Digits().train_dataset(Path()), Digits().validation_dataset(Path())
    pictures = torch.cat([train.tensors[0], validation.tensors[0]]).flatten(1)
    assert pictures.shape == (1797, 64)
    assert int(pictures.max()) == 16
    assert len(pictures.unique(dim=0)) == 1797
    for dataset in (train, validation):
        # Each class is in both parts.
        assert dataset.tensors[1].bincount(minlength=10).min() >= 0.07 * len(dataset)


def test_an_entry_of_a_training_has_all_metrics(trained: tuple[Path, str]) -> None:
    entries = _entries(trained[0], "train")
    assert [entry["step"] for entry in entries] == sorted(
        {*range(50, 111, 50), *range(22, 111, 22)}
    )
    for number, entry in enumerate(entries):
        assert {
            "kind",
            "step",
            "epoch",
            "time_unix_s",
            "loss",
            "learning_rate",
            "gradient_norm",
            "samples_per_second",
            *(["data_share"] if number else []),  # the first entry includes the start
        } == set(entry)
        assert 0 <= entry.get("data_share", 0) <= 1
        assert entry["samples_per_second"] > 0
        assert entry["epoch"] == math.ceil(entry["step"] / 22)
    assert entries[-1]["loss"] < 0.2 * entries[0]["loss"]


def test_tensorboard_has_the_values_of_metrics_jsonl(board: Any, trained: tuple[Path, str]) -> None:
    kinds = {"train": ("loss", "learning_rate", "gradient_norm", "samples_per_second")}
    for kind, names in (kinds | {"validation": ("accuracy", "loss", "macro_f1")}).items():
        for name in names:
            expected = {entry["step"]: entry[name] for entry in _entries(trained[0], kind)}
            found = {event.step: event.value for event in board.Scalars(f"{kind}/{name}")}
            assert list(found) == list(expected)
            assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-6)


def test_tensorboard_has_the_pictures_of_the_best_and_the_last_validation(
    board: Any, trained: tuple[Path, str]
) -> None:
    tags = {tag.rpartition("/")[2]: tag for tag in board.Tags()["images"]}
    assert set(tags) == {"confusion_matrix", "examples"}
    # In between, at most one drawing starts every 10 seconds.
    accuracies = {e["step"]: e["accuracy"] for e in _entries(trained[0], "validation")}
    first, best = min(accuracies), max(accuracies, key=lambda step: accuracies[step])
    for tag in tags.values():
        images = board.Images(tag)
        assert {first, best, 110} <= {image.step for image in images}
        for image in images:
            assert image.encoded_image_string.startswith(b"\x89PNG")
            assert image.width >= 400
            assert image.height >= 400
        assert len({hashlib.sha256(image.encoded_image_string).digest() for image in images}) > 1
