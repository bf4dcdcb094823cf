"""Each reader of a run finds a forged file: `verify` exits with 8, the others with 4."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.here import Here, training_here
from tests.support.tiny import TINY

_READERS = {
    "verify": ("verify", "runs/r", "--device", "cpu"),
    "evaluate": ("evaluate", "runs/r", "--device", "cpu"),
    "export": ("export", "runs/r"),
    "init": ("train", TINY, "--device", "cpu", "--run", "new", "--init", "runs/r"),
    "train": ("train", TINY, "--device", "cpu", "--run", "r", "--max-steps", "6"),
}


def _sidecar(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _sidecars(**changes: Any) -> Callable[[Path], None]:
    def forge(run: Path) -> None:
        for path in (run / "checkpoints").glob("*.json"):
            _sidecar(path, **changes)

    return forge


def _contents(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Return a function that changes each checkpoint, and corrects its sidecar."""

    def forge(run: Path) -> None:
        for path in (run / "checkpoints").glob("*.pt"):
            state = torch.load(path, weights_only=True)
            change(state)
            torch.save(state, path)
            data = path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            _sidecar(path.with_suffix(".json"), sha256=digest, bytes=len(data))

    return forge


def _exchange(one: Any, other: Any) -> None:
    for name in ("exp_avg", "exp_avg_sq"):
        one[name], other[name] = other[name], one[name]


def _exchange_moments(state: Any) -> None:
    for each in state["optimizer"]["state"].values():
        each["exp_avg"], each["exp_avg_sq"] = each["exp_avg_sq"], each["exp_avg"]


_FORGED: dict[str, Callable[[Path], object]] = {
    "digests of the files": _sidecars(sha256="0" * 64),
    "another run": _sidecars(run_id="0" * 16),
    "another step": _sidecars(step=5),
    "no checkpoints": lambda run: shutil.rmtree(run / "checkpoints"),
    "best step": _sidecars(best_step=3),
    "weights": _contents(lambda s: s["model"]["linear.weight"].neg_()),
    "exchanged moments": _contents(_exchange_moments),
    "moments of two parameters": _contents(lambda s: _exchange(*s["optimizer"]["state"].values())),
    "betas": _contents(lambda s: s["optimizer"]["param_groups"][0].update(betas=(0.5, 0.5))),
    "weight_decay": _contents(lambda s: s["optimizer"]["param_groups"][0].update(weight_decay=9.0)),
    "best_metrics": _contents(lambda s: s["progress"].update(best_metrics={"loss": 0.0})),
    "patience": _contents(lambda s: s["progress"].update(patience_used=3)),
    "scaler": _contents(lambda s: s["scaler"].update(scale=2.0)),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with training_here(tmp_path_factory.mktemp("whole")) as here:
        here.train(max_steps=6)
        yield here.path()


@pytest.mark.parametrize("reader", _READERS)
@pytest.mark.parametrize("forged", _FORGED)
def test_a_forged_run_is_refused(here: Here, whole: Path, forged: str, reader: str) -> None:
    shutil.copytree(whole, "runs/r")
    _FORGED[forged](here.path())
    code, _, err = here.command(*_READERS[reader])
    assert code == (8 if reader == "verify" else 4), err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("reader", _READERS)
def test_the_whole_run_is_read(here: Here, whole: Path, reader: str) -> None:
    shutil.copytree(whole, "runs/r")
    assert here.command(*_READERS[reader])[0] == 0
