"""A step of a built-in task launches hardly more operations than a step of a loop by hand."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.loop import Mlp, RandomMnist
from tests.support.here import Here
from tests.support.kinds import slow_after
from tests.support.pictures import FIELDS as PICTURES
from tests.support.task_digests import write_data
from tests.support.texts import FIELDS as TEXTS
from trainer.records.run_log import RunLog
from trainer.tasks.digits import Digits
from trainer.tasks.images import Images
from trainer.tasks.text import Text

_STEP = 5  # the step whose operations are counted; the first steps have checks
_ALONE = {"log_steps": 1000, "digest_steps": 1000, "eval_every": 1000, "threads": 1}
_BATCH_SIZE = 8
_WITHOUT_WORK = (
    "aten::empty",
    "aten::new_empty",
    "aten::detach",
    "aten::set_",
    "aten::_unsafe_view",
    "profiler::",
)


class _Ops(TorchDispatchMode):
    """Counts the operations that launch work: all but views, empty tensors and notes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = (value.alias_info for value in func._schema.returns)
        is_view = any(alias is not None and not alias.is_write for alias in returned)
        if not is_view and not func._schema.name.startswith(_WITHOUT_WORK):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _of_trainbox(here: Here, patch: pytest.MonkeyPatch, **settings: Any) -> Counter[str]:
    """Return the operations of a step and of what follows it, with the gather of the batch."""
    advance, ops, steps = RunLog.advance, _Ops(), 0

    def count(run: RunLog) -> None:
        nonlocal steps
        advance(run)
        steps += 1
        if steps == _STEP - 1:
            ops.__enter__()
        elif steps == _STEP:
            ops.__exit__(None, None, None)

    with patch.context() as inner:
        inner.setattr(RunLog, "advance", count)
        here.train(**_ALONE, **settings, batch_size=_BATCH_SIZE, max_steps=_STEP + 1)
    return ops.counts


def _by_hand(model: nn.Module, precision: str, loss: Callable[[], Tensor]) -> Counter[str]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            value = loss()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()

    step()
    with _Ops() as ops:
        step()
    return ops.counts


def _classifier(task: Any, precision: str) -> Counter[str]:
    model = task.build_model().train()
    images, labels = task.train_dataset(Path()).tensors
    chosen = torch.arange(_BATCH_SIZE)

    def loss() -> Tensor:
        batch = images.index_select(0, chosen), labels.index_select(0, chosen)
        inputs, targets = task.prepare(batch, training=True)
        return F.cross_entropy(model(inputs), targets)

    return _by_hand(model, precision, loss)


def _text(data: Path, precision: str) -> Counter[str]:
    task = Text(**TEXTS)
    model = task.build_model().train()
    (bytes_BT,) = torch.utils.data.default_collate(
        [task.train_dataset(data)[index] for index in range(_BATCH_SIZE)]
    )

    def loss() -> Tensor:
        given = bytes_BT.long()
        return F.cross_entropy(model(given[:, :-1]).flatten(0, 1), given[:, 1:].flatten())

    return _by_hand(model, precision, loss)


def _pictures(data: Path, precision: str, name: str) -> Counter[str]:
    task = Images(**{**PICTURES, "model": name}).with_data(data)
    model = task.build_model().train()
    pictures, labels, _ = torch.utils.data.default_collate(
        [task.train_dataset(data)[index] for index in range(_BATCH_SIZE)]
    )
    mean, std = torch.rand(3, 1, 1), torch.rand(3, 1, 1)

    def loss() -> Tensor:
        images = pictures.permute(0, 3, 1, 2).float().contiguous().sub(mean).div(std)
        return F.cross_entropy(model(images), labels)

    return _by_hand(model, precision, loss)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.mark.parametrize("precision", slow_after(1, ["fp32", "bf16"]))
@pytest.mark.parametrize(
    ("case", "most"),
    [
        ("digits", 1),
        ("perceptron", 1),
        ("CNN", 1),
        ("text", 3),
        pytest.param("resnet50", 12, marks=pytest.mark.slow),
    ],
)
def test_a_step_has_few_operations_beside_those_of_a_loop_by_hand(
    here: Here, monkeypatch: pytest.MonkeyPatch, data: Path, case: str, most: int, precision: str
) -> None:
    (here.folder / "data").symlink_to(data)
    settings: dict[str, Any] = {
        "digits": {"task": "digits"},
        "perceptron": {"task": "benchmarks.loop:Mlp", "fields": {"examples": 64}},
        "CNN": {"task": "benchmarks.loop:RandomMnist", "fields": {"examples": 64}},
        "text": {"task": "text", "fields": TEXTS},
        "resnet50": {"task": "images", "fields": {**PICTURES, "model": "resnet50"}},
    }[case]
    ours = _of_trainbox(here, monkeypatch, precision=precision, **settings)
    hand = {
        "digits": lambda: _classifier(Digits(), precision),
        "perceptron": lambda: _classifier(Mlp(examples=64), precision),
        "CNN": lambda: _classifier(RandomMnist(examples=64), precision),
        "text": lambda: _text(data, precision),
        "resnet50": lambda: _pictures(data, precision, "resnet50"),
    }[case]()
    assert ours.total() - hand.total() <= most, (ours - hand, hand - ours)
