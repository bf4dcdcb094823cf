"""Tasks as people write them keep state beside their weights, and none of them is refused."""

import functools
import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from tests.support.here import Here
from tests.support.kinds import slow_but
from tests.support.tiny import StepCounter, Tiny


class _Metric(nn.Module):
    """Counts as torchmetrics does: states in attributes, a count of updates, a cached result."""

    def __init__(self) -> None:
        super().__init__()
        self._update_count, self._computed, self._states = 0, None, {"total": torch.zeros(())}
        self.total, self.history = torch.zeros(()), list[Tensor]()

    def update(self, values_B: Tensor) -> None:
        self._update_count += 1
        self.total = self.total + values_B.detach().sum()
        self.history.append(values_B.detach())

    def compute(self) -> float:
        if self._update_count == 0:
            raise RuntimeError("compute() was called before update()")
        found = float(self.total)
        self._update_count, self.total, self.history = 0, torch.zeros(()), []
        return found


class _Handle:
    """A logger such as W&B's, which must be called with steps that grow."""

    def __init__(self) -> None:
        self.step, self.lines, self.lock = 0, list[str](), threading.Lock()

    def log(self, values: Mapping[str, float]) -> None:
        self.step += 1
        with self.lock:
            self.lines.append(f"{self.step} {dict(values)}")


class _Model(StepCounter):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.metric, self.shapes = 0, _Metric(), Counter[tuple[int, ...]]()
        self.cache, self.activations = dict[int, Tensor](), dict[str, Tensor]()
        self.linear.register_forward_hook(
            lambda _module, _inputs, output: self.activations.update(last=output.detach())
        )


def _of(task: Tiny) -> dict[str, Any]:
    return vars(task)


def _once(task: Tiny, name: str, make: Callable[[], Any]) -> Any:
    return _of(task).setdefault(name, make())


def _mask(task: Tiny, model: _Model, inputs_B4: Tensor) -> None:
    size = len(inputs_B4)
    if size not in model.cache:
        model.cache[size] = torch.ones(size, 4)
    inputs_B4.mul_(model.cache[size])


@functools.lru_cache(maxsize=8)
def _positions(size: int) -> Tensor:
    return torch.zeros(size, 4)


def _progress(task: Tiny, _model: _Model, inputs_B4: Tensor) -> None:
    bar = _once(task, "bar", lambda: tqdm(total=100, disable=False, file=Path("bar.txt").open("w")))  # noqa: SIM115
    bar.update(1)
    bar.set_postfix(mean=float(inputs_B4.mean()))


def _timed(task: Tiny, _model: _Model, _inputs: Tensor) -> None:
    begin_s = time.perf_counter()
    _of(task)["seconds"] = _of(task).get("seconds", 0.0) + time.perf_counter() - begin_s
    _of(task)["last"] = time.time()


def _running(task: Tiny, model: _Model, inputs_B4: Tensor) -> None:
    _of(task)["ema"] = 0.9 * _of(task).get("ema", 0.0) + 0.1 * float(inputs_B4.mean())
    _once(task, "recent", lambda: deque(maxlen=20)).append(_of(task)["ema"])
    _once(task, "by_class", lambda: defaultdict(list))[int(model.forwards) % 3].append(1)


def _write(task: Tiny, _model: _Model, inputs_B4: Tensor) -> None:
    writer = _once(task, "writer", lambda: SummaryWriter("boards"))
    _of(task)["n"] = _of(task).get("n", 0) + 1
    writer.add_scalar("mean", float(inputs_B4.mean()), _of(task)["n"])


def _to_file(task: Tiny, _model: _Model, inputs_B4: Tensor) -> None:
    file = _once(task, "file", lambda: Path("log.txt").open("a"))  # noqa: SIM115
    file.write(f"{float(inputs_B4.mean())}\n")
    file.flush()


_STATES: dict[str, Callable[[Tiny, _Model, Tensor], Any]] = {
    "a call counter": lambda _, model, __: setattr(model, "calls", model.calls + 1),
    "a counter that logs": lambda task, model, _: (
        _once(task, "log", lambda: logging.getLogger("tiny")).info("step")
        if model.calls % 10 == 0
        else None,
        setattr(model, "calls", model.calls + 1),
    ),
    "a metric in the model": lambda _, model, inputs: model.metric.update(inputs),
    "a metric in the task": lambda task, _, inputs: _once(task, "metric", _Metric).update(inputs),
    "a progress bar": _progress,
    "a handle": lambda task, _, inputs: _once(task, "handle", _Handle).log(
        {"mean": float(inputs.mean())}
    ),
    "a writer": _write,
    "a file": _to_file,
    "timers": _timed,
    "means and histories": _running,
    "a mask cache": _mask,
    "lru_cache": lambda _, __, inputs: inputs.add_(_positions(len(inputs))),
    "shapes": lambda _, model, inputs: model.shapes.update([tuple(inputs.shape)]),
    "a flag": lambda _, model, __: setattr(model, "warned", True),
    "the epoch": lambda task, model, _: _of(task).update(epoch=int(model.forwards) // 6),
}


_FAST = ("a metric in the model", "a writer")


@pytest.mark.parametrize("name", slow_but(_FAST, _STATES))
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_task_with_state_that_changes_no_bits_trains_and_resumes(here: Here, name: str) -> None:
    plain = Tiny.losses

    def losses(task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        if model.training:
            _STATES[name](task, model, batch[0])
        return plain(task, model, batch)

    here.plant(build_model=lambda _task: _Model(), losses=losses)
    here.train("whole", workers=0)
    here.stopped(7)
    here.train()
    assert here.digest() == here.digest("whole")


class _Averaged(StepCounter):
    def __init__(self) -> None:
        super().__init__()
        self.ema = AveragedModel(self.linear, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def forward(self, inputs_B4: Tensor) -> Tensor:
        if self.training:
            self.ema.update_parameters(self.linear)
            return super().forward(inputs_B4)
        found: Tensor = self.ema(inputs_B4).squeeze(1)
        return found


def test_a_moving_average_of_the_weights_trains_and_resumes(here: Here) -> None:
    def build_model(_task: Tiny) -> nn.Module:
        model = _Averaged()
        model.ema.requires_grad_(False)
        return model

    here.plant(build_model=build_model)
    here.train("whole")
    here.stopped(7)
    here.train()
    assert here.digest() == here.digest("whole")


def test_a_metric_object_that_replaces_the_totals_trains(here: Here) -> None:
    """It is reset by metrics(), and cannot be computed twice."""

    def statistics(task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        losses_B = task.losses(model, batch)["squared_error"]
        _once(task, "metric", _Metric).update(losses_B)
        return {"loss": losses_B.sum()}

    here.plant(
        statistics=statistics, metrics=lambda task, _totals: {"loss": _of(task)["metric"].compute()}
    )
    here.train("whole")
    here.stopped(7)
    assert "note       metrics() returns something else" in here.train()
    assert here.digest() == here.digest("whole")
