"""Human activity recognition on a small folder in UCI HAR's layout.

The data is synthetic, and built such that a broken model does not learn it.
"""

import hashlib
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.support.har_folder import CHANNELS, write_folder
from tests.support.here import Here, board_of
from tests.support.served import served
from trainer.tasks import har
from trainer.tasks.har import Har

_NAME = "UCI HAR Dataset"
_NOWHERE = "http://127.0.0.1:9/har.zip"  # refused at once
_MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"epochs": 20, "learning_rate": 3e-3, "fields": {"mode": "flatten", "width": 64}},
    "cnn": {"epochs": 8, "learning_rate": 5e-3, "fields": {"width": 16}},
    "lstm": {
        "epochs": 45,
        "learning_rate": 1e-2,
        "clip_norm": 1.0,
        "fields": {"model": "lstm", "width": 32, "layers": 1},
    },
    "transformer": {
        "epochs": 10,
        "learning_rate": 3e-3,
        "fields": {"model": "transformer", "width": 32},
    },
}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(har, "_URL", _NOWHERE)


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data folder with 480 training windows of eight people and 240 of four others."""
    folder = tmp_path_factory.mktemp("people")
    write_folder(folder)
    return folder


@pytest.fixture
def data(here: Here, people: Path) -> Path:
    """Return a copy of the data folder, as ./data, which a test may damage."""
    shutil.copytree(people, here.folder / "data")
    return here.folder / "data" / _NAME


@pytest.mark.slow
@pytest.mark.parametrize("model", _MODELS)
def test_a_model_recognises_the_activities_of_new_people(
    here: Here, data: Path, model: str
) -> None:
    settings = _MODELS[model]
    out = here.train(
        task="har", batch_size=48, threads=1, eval_every=settings["epochs"], **settings
    )
    assert "480 training and 240 validation examples, 0 in both, held on cpu" in out
    last = here.entries("validation")[-1]
    assert last["accuracy"] > 0.9
    assert last["macro_f1"] > 0.9
    assert [sum(row) for row in last["confusion"]] == [40] * 6
    board = board_of(here.path())
    pictures = {"confusion_matrix"} if model == "mlp" else {"confusion_matrix", "signals"}
    assert {tag.rpartition("/")[2] for tag in board.Tags()["images"]} == pictures


def _raw(folder: Path, part: str, file: str) -> Any:
    return numpy.array(
        [line.split() for line in (folder / part / file).read_text().splitlines()], float
    )


@pytest.mark.parametrize("part", ["train", "test"])
def test_inputs_have_the_right_order_and_are_standardised_by_the_training_part(
    people: Path, part: str
) -> None:
    folder = people / _NAME
    windows = {"train": 480, "test": 240}[part]
    order = (
        range(480)
        if part == "train"
        else torch.randperm(240, generator=torch.Generator().manual_seed(0)).tolist()
    )

    def load(task: Har) -> Any:
        return (task.train_dataset if part == "train" else task.validation_dataset)(people).tensors

    inputs, labels = load(Har())
    assert inputs.shape == (windows, 9, 128)
    assert inputs.dtype == torch.float32
    for channel, name in enumerate(CHANNELS):
        train = _raw(folder, "train", f"Inertial Signals/{name}_train.txt")
        wanted = (
            _raw(folder, part, f"Inertial Signals/{name}_{part}.txt") - train.mean()
        ) / train.std()
        assert torch.allclose(
            inputs[:, channel].double(), torch.from_numpy(wanted[order]), atol=1e-4
        )
    train = _raw(folder, "train", "X_train.txt")
    features, same_labels = load(Har(mode="flatten"))
    wanted = (_raw(folder, part, f"X_{part}.txt") - train.mean(0)) / train.std(0)
    assert torch.allclose(features.double(), torch.from_numpy(wanted[order]), atol=1e-3)
    assert (
        labels.tolist()
        == same_labels.tolist()
        == (_raw(folder, part, f"y_{part}.txt")[order, 0] - 1).tolist()
    )
    # The first validation batch, which the figures show, has all activities.
    assert len(labels[:24].unique()) == 6 or part == "train"


def test_a_constant_channel_becomes_zero(here: Here, data: Path) -> None:
    for part, lines in (("train", 480), ("test", 240)):
        (data / part / "Inertial Signals" / f"body_gyro_y_{part}.txt").write_text(
            (" 0.3" * 128 + "\n") * lines
        )
    inputs, _ = Har().validation_dataset(here.folder / "data").tensors
    assert inputs[:, 4].unique().tolist() == pytest.approx([0], abs=1e-6)
    assert inputs[:, 5].std() == pytest.approx(1, abs=0.3)


def test_a_folder_inside_a_folder_of_the_same_name_is_found(tmp_path: Path, people: Path) -> None:
    shutil.copytree(people / _NAME, tmp_path / _NAME / _NAME)
    assert len(Har(mode="flatten").train_dataset(tmp_path)) == 480


def _cut(path: Path, lines: int) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


_SIGNAL = "train/Inertial Signals/body_gyro_y_train.txt"
_SUBJECTS = "test/subject_test.txt"


# fmt: off
_FILES = [
    (_SIGNAL, Path.unlink, "is missing: "),
    (_SIGNAL, lambda path: _cut(path, 479),
     r"is damaged \(479 lines of 128 numbers instead of 480 lines of 128\): "),
    (_SIGNAL, lambda path: path.write_text("<html>no</html>"),
     r"cannot be read \(could not convert string .*\): "),
    (_SIGNAL, lambda path: _replace(path, "e-001", "e+099"),
     r"is damaged \(a number is not finite\): "),
    (_SUBJECTS, lambda path: path.write_text("9 9\n"),
     r"is damaged \(1 lines of 2 numbers instead of lines of 1\): "),
    ("train/y_train.txt", lambda path: _replace(path, "6\n", "7\n"),
     "has other labels than 1 to 6: "),
]
# fmt: on


@pytest.mark.parametrize(("file", "damage", "told"), _FILES)
def test_a_damaged_file_is_reported(
    here: Here, data: Path, file: str, damage: Callable[[Path], Any], told: str
) -> None:
    damage(data / file)
    code, _, err = here.command("train", "har", "--device", "cpu")
    cure = f"put UCI's complete folder '{_NAME}' there, or delete it, so that it is downloaded"
    assert re.fullmatch(f"trainbox: data/{_NAME}/{file} {told}{cure}\n", err)
    assert code == 2


def test_people_in_both_parts_are_refused(here: Here, data: Path) -> None:
    _replace(data / "test/subject_test.txt", "9\n", "8\n")
    _replace(data / "test/subject_test.txt", "10\n", "3\n")
    err = here.refused("train", "har", "--device", "cpu", "--set", "mode=flatten")
    assert f"data/{_NAME}: subject 3, 8 is in train and in test: put all windows of a subj" in err


def test_without_network_a_message_names_the_missing_files(here: Here) -> None:
    err = here.refused("train", "har", "--device", "cpu")
    (message,) = [line for line in err.splitlines() if line.startswith("trainbox: ")]
    assert message.startswith(f"trainbox: data/{_NAME} is missing and cannot be downloaded (")
    assert message.endswith(
        f"unpack UCI's {_NAME}.zip in data, so that train and test are in data/{_NAME}"
    )
    assert "Traceback" not in err
    assert list((here.folder / "data").iterdir()) == []


@pytest.fixture(scope="module")
def archive(people: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the data folder as an archive in UCI's format."""
    folder = tmp_path_factory.mktemp("archive")
    with zipfile.ZipFile(folder / "inner.zip", "w", zipfile.ZIP_DEFLATED) as inner:
        for file in people.rglob("*.txt"):
            inner.write(file, file.relative_to(people))
        inner.writestr(f"__MACOSX/{_NAME}/._train", "of no use")
    with zipfile.ZipFile(folder / "har.zip", "w") as outer:
        outer.write(folder / "inner.zip", f"{_NAME}.zip")
        outer.writestr(f"{_NAME}.names", "of no use")
    return folder / "har.zip"


@pytest.fixture
def mirror(
    tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, list[str]]]:
    """Serve a copy of the archive; return its path and the list of requested paths."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    shutil.copy(archive, folder)
    with served(folder) as (address, requested):
        monkeypatch.setattr(har, "_URL", f"{address}har.zip")
        monkeypatch.setattr(
            har, "_SHA256", hashlib.sha256((folder / "har.zip").read_bytes()).hexdigest()
        )
        yield folder / "har.zip", requested


def test_it_is_downloaded_once(here: Here, people: Path, mirror: tuple[Path, list[str]]) -> None:
    for run in ("first", "second"):
        here.train(run, task="har", max_steps=1, fields={"mode": "flatten"})
    assert mirror[1] == ["/har.zip"]
    assert [path.name for path in (here.folder / "data").iterdir()] == [_NAME]
    found = {
        path.relative_to(here.folder / "data"): path.read_bytes()
        for path in (here.folder / "data").rglob("*.txt")
    }
    assert found == {path.relative_to(people): path.read_bytes() for path in people.rglob("*.txt")}


@pytest.mark.parametrize(
    ("right", "told"), [(False, "invalid hash value"), (True, "File is not a zip file")]
)
def test_a_file_with_another_checksum_is_refused(
    here: Here,
    mirror: tuple[Path, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    right: bool,
    told: str,
) -> None:
    mirror[0].write_bytes(b"<html>not found</html>")
    if right:
        monkeypatch.setattr(har, "_SHA256", hashlib.sha256(mirror[0].read_bytes()).hexdigest())
    code, _, err = here.command("train", "har", "--device", "cpu")
    assert code == 2
    assert f"trainbox: data/{_NAME} is missing and cannot be downloaded ({told}" in err
    assert list((here.folder / "data").iterdir()) == []
