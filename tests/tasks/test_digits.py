"""The default command: digits, to a good accuracy, with everything about it in metrics.jsonl and
TensorBoard alike.
"""

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import IMAGES, EventAccumulator

from tests.support.commands import Trainbox
from trainer.tasks.digits import Digits


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run's folder after `trainbox train`, and what it printed."""
    runner = Trainbox(tmp_path_factory.mktemp("digits"))
    ended = runner.train("--device", "cpu")
    (run,) = (runner.folder / "runs").iterdir()
    return run, ended.out


def _entries(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [entry for line in lines if (entry := json.loads(line))["kind"] == kind]


@pytest.fixture(scope="module")
def board(trained: tuple[Path, str]) -> EventAccumulator:
    board = EventAccumulator(str(trained[0] / "tensorboard"), {IMAGES: 0})
    board.Reload()
    return board


def test_it_is_right_on_more_than_97_of_100(trained: tuple[Path, str]) -> None:
    run, out = trained
    assert run.name.startswith("digits-")
    entries = _entries(run, "validation")
    assert [entry["epoch"] for entry in entries] == list(range(1, 21))
    best = max(entry["accuracy"] for entry in entries)
    assert best > 0.97
    match = re.search(r"^best +accuracy (0\.\d{4}|1\.0000), step (\d+)$", out, re.MULTILINE)
    assert match
    assert float(match[1]) == pytest.approx(best, abs=5e-5)


def test_the_best_weights_are_right_as_often_when_used_elsewhere(trained: tuple[Path, str]) -> None:
    model = Digits().build_model().eval()
    model.load_state_dict(load_file(trained[0] / "model.safetensors"))
    data = Digits().validation_dataset(Path())
    with torch.no_grad():
        images, labels = Digits().prepare(data.tensors, training=False)
        right = (model(images).argmax(1) == labels).double().mean()
    assert float(right) == pytest.approx(
        max(entry["accuracy"] for entry in _entries(trained[0], "validation"))
    )


def test_training_and_validation_examples_are_1797_different_pictures() -> None:
    train, validation = Digits().train_dataset(Path()), Digits().validation_dataset(Path())
    pictures = torch.cat([train.tensors[0], validation.tensors[0]]).flatten(1)
    assert pictures.shape == (1797, 64)
    assert int(pictures.max()) == 16
    assert len(pictures.unique(dim=0)) == 1797
    for dataset in (train, validation):
        # each class stands in both parts
        assert dataset.tensors[1].bincount(minlength=10).min() >= 0.07 * len(dataset)


def test_pythons_sets_have_the_same_order_each_time(trained: tuple[Path, str]) -> None:
    assert (
        json.loads((trained[0] / "manifest.json").read_text())["environment"]["PYTHONHASHSEED"]
        == "0"
    )


def test_each_validation_counts_all_examples_and_agrees_with_its_own_matrix(
    trained: tuple[Path, str],
) -> None:
    for entry in _entries(trained[0], "validation"):
        confusion = torch.tensor(entry["confusion"])
        assert confusion.shape == (10, 10)
        assert confusion.sum() == 360
        assert entry["accuracy"] == pytest.approx(float(confusion.diagonal().sum()) / 360)
        assert 0 < entry["macro_f1"] <= 1


def test_a_line_of_metrics_holds_what_is_needed_to_follow_a_run(trained: tuple[Path, str]) -> None:
    entries = _entries(trained[0], "train")
    assert [entry["step"] for entry in entries] == sorted(
        {*range(50, 441, 50), *range(22, 441, 22)}
    )
    for entry in entries:
        assert {
            "kind",
            "step",
            "epoch",
            "time_unix_s",
            "loss",
            "learning_rate",
            "gradient_norm",
            "samples_per_second",
        } == set(entry)
        assert entry["samples_per_second"] > 0
        assert entry["epoch"] == math.ceil(entry["step"] / 22)
    assert entries[-1]["loss"] < 0.1 * entries[0]["loss"]


@pytest.mark.parametrize(
    "tag", ["train/loss", "train/learning_rate", "train/gradient_norm", "train/samples_per_second"]
)
def test_tensorboard_holds_the_same_numbers_of_training(
    board: EventAccumulator, trained: tuple[Path, str], tag: str
) -> None:
    _check_scalars(board, trained[0], tag)


@pytest.mark.parametrize("tag", ["validation/accuracy", "validation/loss", "validation/macro_f1"])
def test_tensorboard_holds_the_same_numbers_of_validation(
    board: EventAccumulator, trained: tuple[Path, str], tag: str
) -> None:
    _check_scalars(board, trained[0], tag)


def _check_scalars(board: EventAccumulator, run: Path, tag: str) -> None:
    kind, name = tag.split("/")
    expected = {entry["step"]: entry[name] for entry in _entries(run, kind)}
    found = {event.step: event.value for event in board.Scalars(tag)}
    assert list(found) == list(expected)
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-6)


def test_tensorboard_holds_the_pictures_of_each_best(
    board: EventAccumulator, trained: tuple[Path, str]
) -> None:
    tags = {tag.rpartition("/")[2]: tag for tag in board.Tags()["images"]}
    assert set(tags) == {"confusion_matrix", "examples"}
    best, steps = 0.0, []
    for entry in _entries(trained[0], "validation"):
        if entry["accuracy"] > best or entry["step"] == 440:
            best = max(best, entry["accuracy"])
            steps.append(entry["step"])
    for tag in tags.values():
        images = board.Images(tag)
        assert [image.step for image in images] == steps
        for image in images:
            assert image.encoded_image_string.startswith(b"\x89PNG")
            assert image.width >= 400
            assert image.height >= 400
        assert len({hashlib.sha256(image.encoded_image_string).digest() for image in images}) > 1


def test_tensorboard_holds_the_settings_and_the_best_metrics_of_the_run(
    board: EventAccumulator, trained: tuple[Path, str]
) -> None:
    from tensorboard.plugins.hparams import plugin_data_pb2

    contents = board.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(contents).session_start_info
    assert start.hparams["batch_size"].number_value == 64
    assert start.hparams["learning_rate"].number_value == pytest.approx(0.003)
    assert start.hparams["optimizer"].string_value == "adamw"
    assert start.hparams["task"].string_value == "digits"
    contents = board.SummaryMetadata("_hparams_/experiment").plugin_data.content
    experiment = plugin_data_pb2.HParamsPluginData.FromString(contents).experiment
    names = {info.name.tag.rpartition("/")[2]: info.name.tag for info in experiment.metric_infos}
    # the first of the highest
    entry = max(_entries(trained[0], "validation"), key=lambda entry: entry["accuracy"])
    for name in ("accuracy", "loss", "macro_f1"):
        (event,) = board.Scalars(names[next(key for key in names if key.endswith(name))])
        assert event.value == pytest.approx(entry[name], rel=1e-6)
