"""MNIST and Fashion-MNIST from small files in their format, with 8x8 digits enlarged to 28x28."""

import gzip
import hashlib
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision import datasets

from tests.support.here import Here
from tests.support.served import served
from trainbox.errors import WrongUse
from trainer.tasks.digits import Digits
from trainer.tasks.fashion_mnist import FashionMnist
from trainer.tasks.mnist import Mnist
from trainer.tasks.reading import download

_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_NOWHERE = "http://127.0.0.1:9/"  # refused at once


def _drawn(dataset: Any) -> tuple[Tensor, Tensor]:
    """Return the 8x8 digits enlarged, (N, 28, 28) uint8 from 0 to 240, and the labels (N,)."""
    images_N188, labels_N = dataset.tensors
    large = images_N188[:, 0].repeat_interleave(3, 1).repeat_interleave(3, 2) * 15
    return F.pad(large, (2, 2, 2, 2)), labels_N.to(torch.uint8)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the four files, uncompressed."""
    folder = tmp_path_factory.mktemp("idx")
    for prefix, dataset in (
        ("train", Digits().train_dataset(folder)),
        ("t10k", Digits().validation_dataset(folder)),
    ):
        images, labels = _drawn(dataset)
        header = struct.pack(">IIII", 2051, len(images), 28, 28)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(header + images.numpy().tobytes())
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 2049, len(labels)) + labels.numpy().tobytes()
        )
    return folder


def _zipped(files: Path, folder: Path) -> list[tuple[str, str]]:
    """Write the files as .gz into `folder`; return torchvision's list of names and checksums."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _NAMES:
        (folder / f"{name}.gz").write_bytes(gzip.compress((files / name).read_bytes(), mtime=0))
    return [
        (f"{name}.gz", hashlib.md5((folder / f"{name}.gz").read_bytes()).hexdigest())  # noqa: S324
        for name in _NAMES
    ]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for kind in (datasets.MNIST, datasets.FashionMNIST):
        monkeypatch.setattr(kind, "mirrors", [_NOWHERE])


@pytest.mark.parametrize(
    ("task", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")]
)
@pytest.mark.slow
def test_a_model_learns_from_plain_files(here: Here, files: Path, task: str, folder: str) -> None:
    shutil.copytree(files, here.folder / "data" / folder / "raw")
    out = here.train(
        task=task,
        epochs=3,
        eval_every=3,
        batch_size=32,
        learning_rate=5e-3,
        threads=1,
        fields={"width": 4, "hidden": 32, "dropout": 0.0},
    )
    assert "1,437 training and 360 validation examples, 0 in both, held on cpu" in out
    entries = here.entries("validation")
    assert entries[-1]["accuracy"] > 0.9
    assert sum(map(sum, entries[-1]["confusion"])) == 360


@pytest.mark.slow
def test_loader_workers_do_not_change_the_bits(here: Here, files: Path) -> None:
    shutil.copytree(files, here.folder / "data" / "MNIST" / "raw")
    for run, fields, workers in (("held", {}, None), ("read", {"in_memory": False}, 2)):
        out = here.train(
            run,
            task="mnist",
            max_steps=3,
            workers=workers,
            fields={"width": 4, "hidden": 8, **fields},
        )
    assert "360 validation examples, 0 in both, read by 2 loader workers a process" in out
    assert here.digest("held") == here.digest("read")


@pytest.mark.parametrize("kind", [Mnist, FashionMnist])
def test_it_reads_compressed_files(
    tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Mnist]
) -> None:
    monkeypatch.setattr(
        getattr(datasets, kind.torchvision_name),
        "resources",
        _zipped(files, tmp_path / kind.torchvision_name / "raw"),
    )
    for found, source in (
        (kind().train_dataset(tmp_path), Digits().train_dataset(tmp_path)),
        (kind().validation_dataset(tmp_path), Digits().validation_dataset(tmp_path)),
    ):
        images, labels = _drawn(source)
        assert found.tensors[0].equal(images[:, None])
        assert found.tensors[1].equal(labels.long())
        assert found.tensors[0].dtype == torch.uint8


def test_the_defaults_are_those_of_pytorchs_example() -> None:
    task = Mnist()
    model = task.build_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_199_882
    images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 1, 28, 28)
    prepared, _ = task.prepare((images, torch.zeros(2)), training=True)
    assert prepared[:, 0, 0, 0].tolist() == pytest.approx([-0.4242, 2.8215], abs=1e-4)
    assert model(prepared).shape == (2, 10)
    fashion, _ = FashionMnist().prepare((images, torch.zeros(2)), training=True)
    assert fashion[:, 0, 0, 0].tolist() == pytest.approx([-0.8102, 2.0227], abs=1e-4)
    assert len(FashionMnist.class_names) == len(Mnist.class_names) == 10


def test_without_network_a_message_names_the_missing_files(here: Here) -> None:
    err = here.refused("train", "mnist", "--device", "cpu")
    messages = [line for line in err.splitlines() if line.startswith("trainbox:")]
    assert len(messages) == 1, err
    reason = "MNIST is not in data/MNIST/raw and cannot be downloaded (<urlopen error "
    assert reason in messages[0]
    assert messages[0].endswith(f"put these files there, with or without .gz: {', '.join(_NAMES)}")
    assert "Traceback" not in err


def test_only_the_files_that_are_missing_are_named(tmp_path: Path, files: Path) -> None:
    (tmp_path / "FashionMNIST/raw").mkdir(parents=True)
    shutil.copy(files / _NAMES[0], tmp_path / "FashionMNIST/raw")
    with pytest.raises(WrongUse) as failure:
        FashionMnist().train_dataset(tmp_path)
    assert str(failure.value).endswith(f"with or without .gz: {', '.join(_NAMES[1:])}")
    assert f"FashionMNIST is not in {tmp_path}/FashionMNIST/raw" in str(failure.value)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


# fmt: off
_DAMAGES = [
    pytest.param(lambda raw: _cut(raw / _NAMES[0]), id="images cut short"),
    pytest.param(lambda raw: _cut(raw / _NAMES[1]), id="labels cut short"),
    pytest.param(lambda raw: (raw / _NAMES[0]).write_bytes(b""), id="empty"),
    pytest.param(lambda raw: (raw / _NAMES[0]).write_bytes(b"<html>not found</html>"),
     id="another format"),
    pytest.param(lambda raw: shutil.copy(raw / _NAMES[3], raw / _NAMES[1]),
     id="labels of the other part"),
]
# fmt: on


@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_damaged_file_is_reported_with_its_folder(
    here: Here, files: Path, damage: Callable[[Path], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    raw = here.folder / "data/MNIST/raw"
    shutil.copytree(files, raw)
    damage(raw)
    err = here.refused("train", "mnist", "--device", "cpu")
    assert err.startswith("trainbox: data/MNIST/raw has a damaged file (")
    assert "delete the folder, so that it is downloaded again" in err


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[Path, str, list[str]]]:
    """Return the folder and the URL of an HTTP server, and the list of requested paths."""
    folder = tmp_path / "mirror"
    with served(folder) as (address, requested):
        yield folder, address, requested


def test_it_is_downloaded_once_from_the_first_mirror_that_answers(
    here: Here, files: Path, mirror: tuple[Path, str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address, requested = mirror
    monkeypatch.setattr(datasets.MNIST, "resources", _zipped(files, folder))
    monkeypatch.setattr(datasets.MNIST, "mirrors", [_NOWHERE, address])
    here.train("first", task="mnist", max_steps=1, fields={"width": 4, "hidden": 8})
    requests = list(requested)
    assert list(dict.fromkeys(requests)) == [f"/{name}.gz" for name in _NAMES]
    here.train("second", task="mnist", max_steps=1, fields={"width": 4, "hidden": 8})
    assert requested == requests
    assert (here.folder / "data/MNIST/raw" / _NAMES[0]).read_bytes() == (
        files / _NAMES[0]
    ).read_bytes()


def test_a_mirror_that_does_not_answer_is_given_up(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never answers
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        monkeypatch.setattr(datasets.MNIST, "mirrors", [address])
        code, _, err = here.command("train", "mnist", "--device", "cpu")
    assert code == 2
    assert "MNIST is not in data/MNIST/raw and cannot be downloaded (timed out)" in err
    assert socket.getdefaulttimeout() is None


def test_a_download_with_a_wrong_checksum_is_refused(
    here: Here, files: Path, mirror: tuple[Path, str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address, requested = mirror
    resources = _zipped(files, folder)
    resources[2] = (resources[2][0], "0" * 32)
    monkeypatch.setattr(datasets.MNIST, "resources", resources)
    monkeypatch.setattr(datasets.MNIST, "mirrors", [address])
    code, _, err = here.command("train", "mnist", "--device", "cpu")
    assert code == 2
    assert "trainbox: MNIST is not in data/MNIST/raw and cannot be downloaded (" in err
    assert f"with or without .gz: {_NAMES[2]}, {_NAMES[3]}\n" in err
    assert list(dict.fromkeys(requested)) == [f"/{name}.gz" for name in _NAMES[:3]]
