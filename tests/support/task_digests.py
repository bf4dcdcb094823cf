"""Train each built-in task for a few steps and print the digests, to compare two versions.

Run it once with the `trainbox` command of each checkout and compare the two outputs:

    python -m tests.support.task_digests > after.txt
    python -m tests.support.task_digests --trainbox ../before/.venv/bin/trainbox > before.txt
    diff before.txt after.txt

The digests depend on torch and on the CPU, so both outputs must come from one machine.
"""

import argparse
import json
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.commands import clean_environment
from tests.support.films import FIELDS, write_films
from tests.support.har_folder import write_folder
from tests.support.pictures import FIELDS as PICTURES
from tests.support.pictures import MULTILABEL, REGRESSION, make_pictures, write_labels
from tests.support.texts import FIELDS as TEXTS
from tests.support.texts import write_texts
from trainer.tasks.digits import Digits

_SMALL = {"width": 4, "hidden": 8}
_FIVE_STEPS = (
    *("--max-steps", "5", "--digest-steps", "2"),
    *("--batch-size", "32", "--threads", "1"),
)
_PICTURES = (*_FIVE_STEPS[:4], "--batch-size", "8", "--threads", "1")

# Name of the case: task, its fields, and the options of `trainbox train`.
CASES: dict[str, tuple[str, dict[str, object], tuple[str, ...]]] = {
    "digits, as `make train`": ("digits", {}, ()),
    "digits, as `make train PROCESSES=2`": ("digits", {}, ("--processes", "2")),
    "digits, sgd and clipping": (
        "digits", {}, (*_FIVE_STEPS, "--optimizer", "sgd", "--clip-norm", "1"),
    ),
    "digits_augmented, 2 epochs": ("digits_augmented", {}, ("--epochs", "2", "--shards", "4")),
    "digits_augmented, 2 processes": (
        "digits_augmented", {}, ("--epochs", "2", "--shards", "4", "--processes", "2"),
    ),
    "mnist": ("mnist", _SMALL, _FIVE_STEPS),
    "mnist, read by workers": ("mnist", {**_SMALL, "in_memory": "false"}, _FIVE_STEPS),
    "fashion_mnist": ("fashion_mnist", _SMALL, _FIVE_STEPS),
    "images": ("images", dict(PICTURES), _PICTURES),
    "images_regression": ("images_regression", dict(REGRESSION), _PICTURES),
    "images_multilabel": ("images_multilabel", dict(MULTILABEL), _PICTURES),
    "ssvae": ("ssvae", {"dataset": "digits", "num_style": 4, "hidden": 16}, _FIVE_STEPS),
    "har, cnn": ("har", {"width": 8}, _FIVE_STEPS),
    "har, lstm": ("har", {"model": "lstm", "width": 8}, _FIVE_STEPS),
    "har, transformer": ("har", {"model": "transformer", "width": 8}, _FIVE_STEPS),
    "har, flatten": ("har", {"mode": "flatten", "width": 8}, _FIVE_STEPS),
    "teacher_student, gd": ("teacher_student", {}, _FIVE_STEPS),
    "teacher_student, gnc": (
        "teacher_student", {"method": "gnc", "examples": 32, "draws_per_step": 64}, _FIVE_STEPS,
    ),
    "text": ("text", dict(TEXTS), _FIVE_STEPS),
    "video": ("video", dict(FIELDS), _PICTURES),
}  # fmt: skip


def write_data(folder: Path) -> None:
    """Write small made-up datasets for the tasks that would download theirs."""
    write_films(folder / "video")
    paths = make_pictures(folder / "shapes", ("cross", "disc", "stripes"), 12, seed=0)
    write_labels(folder / "shapes", paths)
    write_folder(folder)
    write_texts(folder / "texts")
    for name in ("MNIST", "FashionMNIST"):
        raw = folder / name / "raw"
        raw.mkdir(parents=True)
        for prefix, dataset in (
            ("train", Digits().train_dataset(folder)),
            ("t10k", Digits().validation_dataset(folder)),
        ):
            images_N188, labels_N = dataset.tensors
            images_NHW = _enlarged(images_N188)
            header = struct.pack(">IIII", 2051, len(images_NHW), 28, 28)
            (raw / f"{prefix}-images-idx3-ubyte").write_bytes(header + images_NHW.numpy().tobytes())
            labels = labels_N.to(torch.uint8).numpy().tobytes()
            header = struct.pack(">II", 2049, len(labels_N))
            (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(header + labels)


def _enlarged(images_N188: Tensor) -> Tensor:
    """(N, 28, 28) uint8 from the (N, 1, 8, 8) digits."""
    images_NHW = images_N188[:, 0].repeat_interleave(3, 1).repeat_interleave(3, 2) * 15
    return F.pad(images_NHW, (2, 2, 2, 2))


def digests_of(case: str, trainbox: str, folder: Path) -> Iterator[str]:
    """Train `case` and yield one line for each entry of its digests.jsonl."""
    task, fields, options = CASES[case]
    settings = [
        argument for name, value in fields.items() for argument in ("--set", f"{name}={value}")
    ]
    run = "run-" + str(list(CASES).index(case))
    command = [trainbox, "train", task, *settings, *options, "--device", "cpu", "--run", run]
    command += ["--runs-dir", str(folder / "runs"), "--data-dir", str(folder / "data")]
    ended = subprocess.run(
        command, cwd=folder, env=clean_environment(), capture_output=True, text=True
    )
    if ended.returncode:
        sys.exit(f"{case}: exit {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
    lines = (folder / "runs" / run / "digests.jsonl").read_text().splitlines()
    # A checkpoint repeats the digests of a step that has an entry.
    by_step: dict[int, dict[str, Any]] = {}
    for line in lines:
        by_step.setdefault(json.loads(line)["step"], json.loads(line))
    for entry in by_step.values():
        parts = " ".join(f"{name} {entry[name][:16]}" for name in ("model", "optimizer", "order"))
        yield f"{case}: step {entry['step']} {parts}"


def main() -> None:
    """Print the digests of all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainbox", default=str(Path(sys.executable).with_name("trainbox")))
    trainbox = str(Path(parser.parse_args().trainbox).absolute())
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder) / "data")
        for case in CASES:
            for line in digests_of(case, trainbox, Path(folder)):
                print(line, flush=True)


if __name__ == "__main__":
    main()
