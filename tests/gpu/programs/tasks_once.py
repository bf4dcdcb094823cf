"""Train each built-in task for five steps in each precision, and yield the digests."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from tests.gpu.digests import last
from tests.gpu.program import tried
from tests.gpu.programs.training import train
from tests.support.films import FIELDS
from tests.support.pictures import FIELDS as PICTURES
from tests.support.pictures import MULTILABEL, REGRESSION
from tests.support.task_digests import write_data
from tests.support.texts import FIELDS as TEXTS

_SMALL = {"width": 4, "hidden": 8}
TASKS: dict[str, dict[str, Any]] = {
    "digits": {},
    "digits_augmented": {},
    "mnist": _SMALL,
    "fashion_mnist": {**_SMALL, "in_memory": False},
    "ssvae": {"dataset": "digits", "num_style": 4, "hidden": 16},
    "har": {"width": 8},
    "har lstm": {"model": "lstm", "width": 8},
    "har transformer": {"model": "transformer", "width": 8},
    "har flatten": {"mode": "flatten", "width": 8},
    "teacher_student": {},
    "teacher_student gnc": {"method": "gnc", "examples": 32, "draws_per_step": 64},
    "images": PICTURES,
    "images_regression": REGRESSION,
    "images_multilabel": MULTILABEL,
    "text": TEXTS,
    "video": FIELDS,
}


def measure(
    device: str,
    folder: str,
    precisions: Sequence[str],
    tasks: Sequence[str] | None = None,
    steps: int = 5,
    capture: str = "off",
) -> Iterator[tuple[str, Any]]:
    """Yield ("TASK PRECISION", digest) and ("rnn TASK PRECISION", types of its RNN's outputs).

    With `capture`, yield ("eager TASK PRECISION", why its steps are not captured) as well.
    """
    write_data(Path(folder) / "data")
    types: set[str] = set()
    register_module_forward_hook(lambda module, _, output: _note(module, output, types))
    for name in tasks or TASKS:
        for precision in precisions:
            types.clear()
            settings = {"max_steps": steps, "capture": capture}
            trained = partial(_digest, device, folder, name, precision, settings)
            yield f"{name} {precision}", tried(trained)
            if capture != "off":
                yield f"eager {name} {precision}", tried(partial(_eager, folder, name, precision))
            if types:
                yield f"rnn {name} {precision}", sorted(types)


def _run(folder: str, name: str, precision: str) -> Path:
    return Path(folder, "runs", f"{name} {precision}".replace(" ", "-"))


def _eager(folder: str, name: str, precision: str) -> str:
    manifest = json.loads((_run(folder, name, precision) / "manifest.json").read_text())
    return str(manifest["rehearsal"]["eager"])


def _digest(device: str, folder: str, name: str, precision: str, settings: dict[str, Any]) -> str:
    run = _run(folder, name, precision)
    train(
        device,
        folder,
        run.name,
        name.split(maxsplit=1)[0],
        fields=TASKS[name],
        precision=precision,
        batch_size=8 if name in ("images", "video") else 32,
        threads=1,
        workers=2,
        **settings,
    )
    return last(run)


def _note(module: nn.Module, output: Any, types: set[str]) -> None:
    if isinstance(module, nn.RNNBase):
        first = output[0]
        if isinstance(first, torch.Tensor):
            types.add(str(first.dtype))
