"""The built-in tasks let the GPU run ahead: no operation of a forward needs a value on the host."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.programs.tasks_once import TASKS
from tests.support.here import Here
from tests.support.kinds import slow_but
from tests.support.task_digests import write_data
from tests.support.tiny import Tiny
from trainer.loop import evaluate
from trainer.loop.losses import LossModule

# Each of these reads a value of the GPU, or a size that depends on one.
_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.bincount.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.repeat_interleave.Tensor,
}
_REPO = Path(__file__).parents[2]


class _Waits(TorchDispatchMode):
    """Notes the lines whose operations would wait for a GPU, while `noting`."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: set[str] = set()
        self.noting = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masked = func is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if func in _READS or masked:
            self.note(str(func))
        return func(*args, **(kwargs or {}))

    def note(self, what: str) -> None:
        if self.noting:
            frame: Any = sys._getframe(1)
            while not frame.f_code.co_filename.startswith(str(_REPO / "train")):
                frame = frame.f_back
            file = Path(frame.f_code.co_filename).relative_to(_REPO)
            made_once = frame.f_code.co_qualname.startswith("_colours")
            if not file.match("trainer/data/*") and not made_once:  # batches are made on the host
                self.lines.add(f"{file}:{frame.f_lineno}: {what}")

    @contextmanager
    def set(self, noting: bool) -> Iterator[None]:
        before, self.noting = self.noting, noting
        with self:
            yield
        self.noting = before

    def around(self, call: Callable[..., Any], noting: bool = True) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            with self.set(noting):
                return call(*args, **options)

        return called


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> _Waits:
    """The waits in the forwards of the training, and in the batches of the validation."""
    found = _Waits()
    monkeypatch.setattr(LossModule, "forward", found.around(LossModule.forward))
    monkeypatch.setattr(evaluate, "add_up", found.around(evaluate.add_up))
    # At the end of a validation, the host needs the totals.
    monkeypatch.setattr(evaluate, "_add", found.around(evaluate._add, noting=False))
    # On a CPU, torch also checks the labels, which it leaves to a kernel on a GPU.
    one_hot = F.one_hot
    monkeypatch.setattr(
        F, "one_hot", lambda *given: _one_hot(*given) if found.noting else one_hot(*given)
    )
    for name in ("tensor", "as_tensor"):
        make = getattr(torch, name)

        def made(*args: Any, make: Any = make, name: str = name, **options: Any) -> Tensor:
            if "device" in options:
                found.note(f"torch.{name}")
            tensor: Tensor = make(*args, **options)
            return tensor

        monkeypatch.setattr(torch, name, made)
    return found


def _one_hot(labels_B: Tensor, num_classes: int) -> Tensor:
    return (labels_B[:, None] == torch.arange(num_classes)).long()


@dataclass(frozen=True)
class Waiting(Tiny):
    """A mistake: its losses read a value of the GPU."""

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        losses = super().losses(model, batch)
        assert next(iter(losses.values())).sum().item() >= 0
        return losses


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


def _train(here: Here, task: str, **fields: Any) -> None:
    size = 8 if task.startswith(("images", "video")) else 32
    here.train(task=task, fields=fields, max_steps=1, batch_size=size, threads=1, workers=1)


_FAST = ("digits",)


@pytest.mark.parametrize("case", slow_but(_FAST, [*TASKS, "images mixed and averaged"]))
def test_a_step_and_a_validation_do_not_wait_for_the_gpu(
    here: Here, waits: _Waits, data: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case != "teacher_student gnc":  # it accepts a guess by its loss
        monkeypatch.setattr(GradScaler, "step", waits.around(GradScaler.step))
    (here.folder / "data").symlink_to(data)
    other = {**TASKS["images"], "mixup": 0.2, "cutmix": 1.0, "ema": 0.9}
    _train(here, case.split(maxsplit=1)[0], **TASKS.get(case, other))
    assert not waits.lines


def test_a_wait_is_found(here: Here, waits: _Waits) -> None:
    _train(here, f"{__name__}:Waiting")
    assert any("aten._local_scalar_dense" in line for line in waits.lines)
