"""Measure the data path of the task `images` beside a plain torchvision script.

Both read the same JPEG files, augment them in the same way, and return normalized batches. The CPU
time of one process without loader workers counts, so other programs hardly change the result.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from benchmarks.jobs import median_and_middle
from trainer.data.batches import training_batches
from trainer.data.schedule import Schedule, micro_batches
from trainer.tasks.images import Images

TURNS = 7
BATCH_SIZE = 32
SIDE = 224
SIZES = ((500, 375), (1600, 1200))


def measure() -> Iterator[str]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield "| pictures | torchvision, ms of CPU | `images`, ms of CPU | ratio | middle half |"
    yield "|---|---|---|---|---|"
    for width, height in SIZES:
        with tempfile.TemporaryDirectory() as name:
            _write(Path(name), width, height)
            plain, ours, ratios = [], [], []
            for _ in range(TURNS):
                plain.append(_ms_of_a_picture(lambda: _plain(Path(name))))
                ours.append(_ms_of_a_picture(lambda: _ours(Path(name))))
                ratios.append(ours[-1] / plain[-1])
        yield (
            f"| {width} x {height} | {statistics.median(plain):.2f} | "
            f"{statistics.median(ours):.2f} | {median_and_middle(ratios)} |"
        )
    torch.set_num_threads(threads)


def _write(folder: Path, width: int, height: int) -> None:
    """Write two classes of 40 smooth pictures each in `folder`/pictures/train."""
    random = numpy.random.default_rng(0)
    for part, count in (("train", 40), ("val", 1)):
        for label in "ab":
            (folder / "pictures" / part / label).mkdir(parents=True)
            for number in range(count):
                coarse = random.integers(0, 256, (height // 8, width // 8, 3), dtype=numpy.uint8)
                Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(
                    folder / "pictures" / part / label / f"{number}.jpg", quality=90
                )


def _ms_of_a_picture(batches: Callable[[], Iterator[Tensor]]) -> float:
    begin, count = time.process_time(), 0
    for images_BCHW in batches():
        assert images_BCHW.shape[1:] == (3, SIDE, SIDE) and images_BCHW.dtype == torch.float32
        count += len(images_BCHW)
    return 1000 * (time.process_time() - begin) / count


def _plain(folder: Path) -> Iterator[Tensor]:
    transforms = v2.Compose(
        [
            v2.RandomResizedCrop(SIDE),
            v2.RandomHorizontalFlip(),
            v2.TrivialAugmentWide(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        ]
    )
    dataset = ImageFolder(folder / "pictures/train", transforms)
    for images_BCHW, _ in DataLoader(dataset, BATCH_SIZE, shuffle=True, drop_last=True):
        yield images_BCHW


def _ours(folder: Path) -> Iterator[Tensor]:
    task = Images(folder="pictures", size=SIDE).with_data(folder)
    dataset = task.train_dataset(folder)
    examples = len(dataset)  # type: ignore[arg-type]
    micros = micro_batches(BATCH_SIZE, 1, 1, range(1))
    schedule = Schedule(0, examples, BATCH_SIZE, examples // BATCH_SIZE, micros)
    for batch in training_batches(dataset, schedule, 0, torch.device("cpu"), 0):
        yield task.prepare(batch, training=True)[0]
