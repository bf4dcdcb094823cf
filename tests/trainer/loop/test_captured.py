"""Captured steps have the bits of eager steps, and a task whose steps differ stays eager.

A stand-in for CUDA graphs, tests/support/recorded_graph.py, records the steps.
"""

import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from tests.support import recorded_graph
from tests.support.here import Here, StopAfter
from tests.support.kinds import slow_after, slow_but
from trainbox.errors import Preempted
from trainer.checks import capture
from trainer.loop.captured import CapturedStep, KeptMemory

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def graphs(monkeypatch: Patch) -> None:
    recorded_graph.install(monkeypatch.setattr)


@pytest.fixture
def here(here: Here) -> Here:
    here.rehearses = True
    return here


class Net(nn.Module):
    """Normalises, drops and averages, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
        )

    def forward(self, inputs_B4: Tensor) -> Tensor:
        output_B: Tensor = self.layers(inputs_B4).squeeze(1)
        return output_B


def _losses(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
    inputs_B4, targets_B = batch
    return {"error": (model(inputs_B4) - targets_B).square()}


def _use(here: Here, net: Callable[[], nn.Module], losses: Any = _losses) -> None:
    here.plant(build_model=lambda _task: net(), losses=losses)


def _row(out: str) -> str:
    (row,) = [line for line in out.splitlines() if line.startswith("step  ")]
    return row.removeprefix("step").strip()


def _compared(here: Here, **settings: Any) -> str:
    """Train with and without captured steps to the same bits, and return the row of the header."""
    out = here.train("captured", capture="auto", **settings)
    here.train("eager", capture="off", **settings)
    assert here.digest("captured") == here.digest("eager")
    assert here.digest("captured")
    return _row(out)


def _manifest(here: Here, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((here.path(run) / "manifest.json").read_text())
    return found


def _replays(monkeypatch: Patch) -> list[int]:
    """Return a list that gets the number of each replay's micro-batch, or -1 of an update."""
    found = list[int]()
    replayed = CapturedStep._replayed

    def counted(step: CapturedStep, graph: Any) -> Any:
        found.append(next((n for n, g in step._micros.items() if g is graph), -1))
        return replayed(step, graph)

    monkeypatch.setattr(CapturedStep, "_replayed", counted)
    return found


@pytest.mark.parametrize(
    "settings",
    slow_after(
        3,
        [
            {},
            {"optimizer": "sgd"},
            {"optimizer": "adam", "weight_decay": 0.1},
            {"clip_norm": 0.1},
            {"shards": 4},
            {"accumulation": 4},
            {"shards": 2, "accumulation": 2, "clip_norm": 1.0},
            {"precision": "bf16"},
            {"warmup_epochs": 1.0, "log_steps": 1},
            {"batch_size": 7, "shards": 3},
            {"freeze": ["layers.0"]},
        ],
    ),
    ids=str,
)
def test_captured_steps_have_the_bits_of_eager_steps(
    here: Here, monkeypatch: Patch, settings: dict[str, Any]
) -> None:
    _use(here, Net)
    replays = _replays(monkeypatch)
    assert _compared(here, **settings) == "captured as CUDA graphs"
    steps = replays.count(-1)
    # Two in the rehearsal, and all but the first two of the training.
    assert steps == 2 + 3 * (50 // settings.get("batch_size", 8)) - 2
    micros = settings.get("shards", 1) * settings.get("accumulation", 1)
    assert len(replays) == steps * (1 + micros)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_scaler_of_the_gradient_is_captured(
    here: Here, monkeypatch: Patch, clip_norm: float | None
) -> None:
    """As --precision fp16 has it, which needs a GPU."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(
        torch.amp, "GradScaler", lambda device, enabled: scaler(device, growth_interval=3)
    )
    _use(here, Net)
    assert _compared(here, clip_norm=clip_norm) == "captured as CUDA graphs"


def _tied() -> nn.Module:
    net = Net()
    net.layers[4] = nn.Linear(8, 1)
    net.layers[0].bias = net.layers[1].bias
    return net


class Recomputing(Net):
    def forward(self, inputs_B4: Tensor) -> Tensor:
        first, *others = self.layers
        hidden: Tensor = checkpoint(first, inputs_B4, use_reentrant=False, preserve_rng_state=False)
        for layer in others:
            hidden = layer(hidden)
        return hidden.squeeze(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(1, 6, 2, batch_first=True, dropout=0.1)
        self.last = nn.Linear(6, 1)

    def forward(self, inputs_B4: Tensor) -> Tensor:
        output_B: Tensor = self.last(self.cells(inputs_B4[:, :, None])[0][:, -1]).squeeze(1)
        return output_B


class MeanTeacher(Net):
    """Has an average of its weights, which each forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(4, 8)
        self.teacher.requires_grad_(False)

    def forward(self, inputs_B4: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                first = self.layers[0]
                assert isinstance(first, nn.Linear)
                self.teacher.weight.lerp_(first.weight, 0.1)
        added_B: Tensor = self.teacher(inputs_B4).sum(1)
        return super().forward(inputs_B4) + 0.01 * added_B


def _mixed_up(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
    inputs_B4, targets_B = batch
    share = torch.rand((), device=targets_B.device)
    mixed_B4 = share * inputs_B4 + (1 - share) * inputs_B4.flip(0)
    return {"error": (model(mixed_B4) - share * targets_B).square(), "other": targets_B.abs()}


def _in_place(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
    inputs_B4, targets_B = batch
    inputs_B4.mul_(2)
    return {"error": (model(inputs_B4) - targets_B.add_(1)).square()}


def _weighted(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
    weights_3 = torch.tensor([0.2, 0.5, 0.3])  # made in each step, with the same values
    inputs_B4, targets_B = batch
    return {"error": (model(inputs_B4) - targets_B).square() * weights_3[1]}


@pytest.mark.parametrize("shards", slow_but([1], [1, 2]))
@pytest.mark.parametrize(
    ("net", "losses"),
    slow_after(
        3,
        [
            (_tied, _losses),
            (Recomputing, _losses),
            (Recurrent, _losses),
            (MeanTeacher, _losses),
            (Net, _mixed_up),
            (Net, _in_place),
            (Net, _weighted),
        ],
    ),
)
def test_ordinary_models_and_losses_are_captured(
    here: Here, net: Any, losses: Any, shards: int
) -> None:
    _use(here, net, losses)
    assert _compared(here, shards=shards) == "captured as CUDA graphs"


class Counting(Net):
    """Uses the number of its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs_B4: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(inputs_B4)


class CountingInExtraState(Counting):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, inputs_B4: Tensor) -> Tensor:
        return super().forward(inputs_B4) / (1 + self.calls)


class Deep(Net):
    """Leaves out a layer at random, as stochastic depth does."""

    def forward(self, inputs_B4: Tensor) -> Tensor:
        if self.training and random.random() < 0.02:  # noqa: S311
            inputs_B4 = inputs_B4.relu()
        return super().forward(inputs_B4)


class Rebinding(Net):
    """Has a buffer that each forward replaces."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs_B4: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
        return super().forward(inputs_B4) + 0.01 * self.seen


class Reading(Rebinding):
    """Reads a number of a tensor."""

    def forward(self, inputs_B4: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return Net.forward(self, inputs_B4) * (2.0 if float(self.seen) > 10 else 1.0)


class Choosing(Net):
    """Computes with the examples that have a property."""

    def forward(self, inputs_B4: Tensor) -> Tensor:
        output_B = super().forward(inputs_B4)
        return output_B + 0.1 * output_B[inputs_B4[:, 0] > 0].sum()


class Literal(Rebinding):
    """Makes a tensor of a number that changes."""

    def forward(self, inputs_B4: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return Net.forward(self, inputs_B4) + torch.tensor(self.seen.numpy().tolist())


class OfNumpy(Literal):
    def forward(self, inputs_B4: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return Net.forward(self, inputs_B4) + torch.from_numpy(self.seen.numpy().reshape(1) * 2)


class Scaled(Literal):
    def forward(self, inputs_B4: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        factor: float = self.seen.numpy().tolist()
        return Net.forward(self, inputs_B4) * factor


class Moving(Net):
    """Gives a parameter other memory in each forward."""

    def forward(self, inputs_B4: Tensor) -> Tensor:
        weight = self.get_parameter("layers.0.weight")
        if self.training:
            weight.data = weight.data.clone()
        return super().forward(inputs_B4)


_calls = 0


class Alternating(Net):
    """Takes turns by a variable that no checkpoint and no fingerprint has."""

    def forward(self, inputs_B4: Tensor) -> Tensor:
        global _calls  # noqa: PLW0603
        _calls += self.training
        return super().forward(inputs_B4) + 0 * (inputs_B4.sum() if _calls % 2 else 0)


class RecomputingWithDropout(Net):
    """Draws its random numbers twice: torch sets the generator back meanwhile."""

    def forward(self, inputs_B4: Tensor) -> Tensor:
        output_B: Tensor = checkpoint(super().forward, inputs_B4, use_reentrant=False)
        return output_B


def _drawing(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
    inputs_B4, targets_B = batch
    noise = float(numpy.random.normal()) / 10
    return {"error": (model(inputs_B4) - targets_B + noise).square()}


def _branching(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
    losses_B = _losses(task, model, batch)["error"]
    return {"error": losses_B / 2 if losses_B.mean() > 5 else losses_B}


def _listing(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
    model.__dict__.setdefault("seen", []).append(len(batch))
    return _losses(task, model, batch)


def _equal(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
    inputs_B4, targets_B = batch
    changed = torch.equal(inputs_B4, inputs_B4.flip(0))
    return {"error": (model(inputs_B4) - targets_B).square() * (1 + changed)}


HOSTILE = [
    (Net, _drawing, "generator of NumPy"),
    (Deep, _losses, "generator of Python"),
    (Counting, _losses, "Counting.calls changes during the training"),
    (CountingInExtraState, _losses, "CountingInExtraState.calls changes during the training"),
    (Rebinding, _losses, "seen is another tensor after a step"),
    (Reading, _losses, "aten._local_scalar_dense needs the values of a tensor on the host"),
    (Choosing, _losses, "aten.index needs the values of a tensor on the host"),
    (Literal, _losses, "aten.lift_fresh has a tensor of another shape or place in each step"),
    (OfNumpy, _losses, "in each step"),
    (Scaled, _losses, "aten.mul has another number in each step ("),
    (Moving, _losses, "layers.0.weight is another tensor after a step"),
    (Alternating, _losses, "in one step and"),
    (RecomputingWithDropout, _losses, "has other bits in replay 1"),
    (Net, _branching, "needs the values of a tensor on the host"),
    (Net, _listing, "Net.seen changes during the training"),
    (Net, _equal, "aten.equal needs the values of a tensor on the host"),
]


@pytest.mark.parametrize(("net", "losses", "reason"), slow_after(7, HOSTILE))
def test_a_task_whose_steps_differ_is_eager_and_the_header_has_the_cause(
    here: Here, net: Any, losses: Any, reason: str
) -> None:
    _use(here, net, losses)
    row = _compared(here)
    assert row.startswith("eager: task Tiny: ")
    assert reason in row
    assert _manifest(here, "captured")["rehearsal"]["eager"] in row


class CountingInItsGroup(torch.optim.SGD):
    """Has a number in its group that each step changes, as schedule-free optimizers have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["momentum"] = 0.5
            group["steps"] = group.get("steps", 0) + 1
        super().step()


class Hand(torch.optim.Optimizer):
    """Computes with its learning rate as a number of Python."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad)


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    slow_after(
        1,
        [
            (lambda p, lr: CountingInItsGroup(p, lr, fused=True), "changes its parameter groups"),
            (Hand, "Hand is neither fused nor capturable"),
            (torch.optim.AdamW, "AdamW is neither fused nor capturable"),
        ],
    ),
)
def test_an_optimizer_that_a_graph_cannot_repeat_is_eager(
    here: Here, optimizer: Any, reason: str
) -> None:
    _use(here, Net)
    here.plant(build_optimizer=lambda _t, model, _n, lr, _d: optimizer(model.parameters(), lr))
    assert reason in _compared(here)


class Words(Dataset[Any]):
    """Examples of several lengths."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((2 + index % 7,), float(index) / 200), torch.tensor(index % 2 * 1.0)


def _padded(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    words, targets = zip(*examples, strict=True)
    return nn.utils.rnn.pad_sequence(list(words), batch_first=True), torch.stack(targets)


def test_batches_of_other_shapes_are_computed_eagerly_and_end_the_capture_after_sixteen(
    here: Here,
) -> None:
    class Summing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, inputs_BL: Tensor) -> Tensor:
            output_B: Tensor = self.layer(inputs_BL.sum(1, keepdim=True)).squeeze(1)
            return output_B

    # In step 4 and 5 all lengths are equal, and later they differ.
    lengths = iter([*[9] * 60, *range(1, 400)])

    def collated(_task: Any, examples: Any) -> Any:
        words_BL, targets_B = _padded(examples)
        return F.pad(words_BL, (0, 200 + min(next(lengths), 200) - words_BL.shape[1])), targets_B

    _use(here, Summing)
    here.plant(
        train_dataset=lambda _task, _folder: Words(),
        validation_dataset=lambda _task, _folder: Words(),
        collate=collated,
    )
    out = here.train("captured", capture="auto", workers=0, batch_size=8, max_steps=60)
    assert _row(out) == "captured as CUDA graphs"
    assert "steps are eager from now on: 16 batches had other shapes, types or plain values" in out


class _Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of torch that start work on a device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.namespace != "profiler":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_captured_step_starts_at_most_seven_operations_beside_its_graphs(
    here: Here, monkeypatch: Patch
) -> None:
    _use(here, Net, _mixed_up)
    steps = list[list[str]]()
    called = CapturedStep.__call__

    def counted(step: CapturedStep, needs_norm: bool) -> Any:
        with _Launches() as launches:
            result = called(step, needs_norm)
        steps.append(launches.names)
        return result

    def replay(_graph: Any) -> None:
        """Do nothing."""

    monkeypatch.setattr(recorded_graph._Recording, "replay", replay)
    monkeypatch.setattr(CapturedStep, "__call__", counted)
    monkeypatch.setattr(capture.CaptureRehearsal, "_agree", lambda *_: None)
    here.train(capture="auto", max_steps=12)
    assert steps[-1] == steps[-2]
    assert len(steps[-1]) <= 7, steps[-1]


_phase = {"late": False}
_box = [1.0]


class Scaling(Net):
    scale = 1.0

    def forward(self, inputs_B4: Tensor) -> Tensor:
        return super().forward(inputs_B4) * self.scale


class CountingEpochs(Net):
    """Counts its validations, and saves the number."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0

    def train(self, mode: bool = True) -> Any:
        self.epochs += self.training and not mode
        return super().train(mode)

    def get_extra_state(self) -> int:
        return self.epochs

    def set_extra_state(self, state: int) -> None:
        self.epochs = state

    def forward(self, inputs_B4: Tensor) -> Tensor:
        return super().forward(inputs_B4) * (1 + 0.1 * self.epochs)


def _in_phases(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
    return {"error": _losses(task, model, batch)["error"] * (0.1 if _phase["late"] else 1.0)}


def _boxed(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
    return {"error": _losses(task, model, batch)["error"] / _box[0]}


def _by_rate(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
    rate = _built[-1][1].param_groups[0]["lr"]
    return {"error": _losses(task, model, batch)["error"] + rate * model.layers[0].weight.sum()}


_built: list[tuple[Any, Any]] = []


def _set_phase(step: int) -> None:
    _phase["late"] = step >= 10


def _set_box(step: int) -> None:
    _box[0] = 1.0 + step // 9


def _set_scale(step: int) -> None:
    _built[-1][0].scale = 0.5 if step >= 10 else 1.0


def _unfreeze(step: int) -> None:
    _built[-1][0].layers[0].requires_grad_(step >= 10)


def _set_momentum(step: int) -> None:
    _built[-1][0].layers[1].momentum = 0.5 * 0.5 ** (step // 8)


def _set_decay(step: int) -> None:
    for group in _built[-1][1].param_groups:
        group["weight_decay"] = 0.01 if step < 10 else 0.5


@pytest.mark.parametrize(
    ("net", "losses", "act"),
    slow_after(
        2,
        [
            (Net, _in_phases, _set_phase),
            (Net, _boxed, _set_box),
            (Scaling, _losses, _set_scale),
            (Net, _losses, _unfreeze),
            (Net, _losses, _set_momentum),
            (Net, _losses, _set_decay),
            (Net, _by_rate, lambda _step: None),
            (CountingEpochs, _losses, lambda _step: None),
        ],
    ),
)
def test_settings_that_follow_the_step_act_in_captured_trainings_too(
    here: Here, net: Any, losses: Any, act: Any
) -> None:
    _use(here, net, losses)

    def optimizer(_task: Any, model: Any, _name: Any, lr: float, _decay: Any) -> Any:
        _built.append((model, torch.optim.AdamW(model.parameters(), lr, fused=True)))
        return _built[-1][1]

    def schedule(_task: Any, step: int, *_: Any) -> float:
        act(step)
        return 0.1 if step >= 12 else 1.0

    here.plant(build_optimizer=optimizer, schedule=schedule)
    _compared(here)
    with pytest.raises(Preempted):
        here.train("stopped", capture="auto", stop=StopAfter(14))
    here.train("stopped", capture="auto")
    assert here.digest("stopped") == here.digest("eager")


def _set_scaling(_model: Any, scale: float) -> None:
    Scaling.scale = scale


class Configured(Scaling):
    """Has its scale in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.array_1, self.nested = SimpleNamespace(scale=1.0), numpy.ones(1), ([1.0],)

    def forward(self, inputs_B4: Tensor) -> Tensor:
        scale: float = self.config.scale * float(self.array_1[0]) * self.nested[0][0]
        return super().forward(inputs_B4) * scale


def _set_config(model: Any, scale: float) -> None:
    model.config.scale = scale


def _set_array(model: Any, scale: float) -> None:
    model.array_1[0] = scale


def _set_nested(model: Any, scale: float) -> None:
    model.nested[0][0] = scale


def _set_memory(model: Any, scale: float) -> None:
    """As adapters do that merge their weights."""
    if scale != 1.0:
        model.layers[0].weight.data = model.layers[0].weight.data.clone()


@pytest.mark.parametrize(
    "act", slow_after(1, [_set_scaling, _set_config, _set_array, _set_nested, _set_memory])
)
def test_a_change_after_the_capture_ends_it_before_the_next_step(here: Here, act: Any) -> None:
    """At the end of the training, which the rehearsal looks at, the model is as at its start."""
    built = list[Configured]()

    def net() -> nn.Module:
        built.append(Configured())
        return built[-1]

    _use(here, net)

    def schedule(_task: Any, step: int, *_: Any) -> float:
        act(built[-1], 0.5 if 8 <= step < 12 else 1.0)
        return 1.0

    here.plant(schedule=schedule)
    out = here.train("captured", capture="auto")
    assert _row(out) == "captured as CUDA graphs"
    assert "step 8: steps are eager from now on: " in out
    here.train("eager")
    assert here.digest("captured") == here.digest("eager")


class Growing(Net):
    """Has a table that a longer input replaces."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(8).cos(), persistent=False)

    def forward(self, inputs_BL: Tensor) -> Tensor:
        length = inputs_BL.shape[1]
        if length > len(self.table):
            self.register_buffer("table", torch.arange(length).cos(), persistent=False)
        inputs_BL = inputs_BL * self.table[:length]
        return super().forward(torch.nn.functional.adaptive_avg_pool1d(inputs_BL[None], 4)[0])


def test_the_memory_that_a_graph_reads_is_kept() -> None:
    """The stand-in keeps all memory, as a CUDA graph does not."""
    table_8, added_8 = torch.arange(8.0), torch.ones(8)
    with KeptMemory() as kept:
        made_8 = torch.add(table_8, added_8).relu()
    read = {t.untyped_storage().data_ptr() for t in (table_8, added_8)}
    assert kept.storages.keys() == read
    assert made_8.untyped_storage().data_ptr() not in read


def test_a_table_that_is_replaced_is_not_read_by_a_graph(here: Here) -> None:
    _use(here, Growing)
    lengths = [8] * 12 + [20] + [8] * 99

    def collated(_task: Any, examples: Any) -> Any:
        words_BL, targets_B = _padded(examples)
        number = int(words_BL[0, 0] * 200) % 13
        return F.pad(words_BL, (0, lengths[number] - words_BL.shape[1])), targets_B

    here.plant(
        train_dataset=lambda _task, _folder: Words(),
        validation_dataset=lambda _task, _folder: Words(),
        collate=collated,
    )
    _compared(here, workers=0, batch_size=8, max_steps=40)


def _of_physics(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
    """Differentiates by its inputs."""
    inputs_B4, targets_B = batch
    inputs_B4.requires_grad_()
    with torch.enable_grad():
        output_B = model(inputs_B4)
        (slope_B4,) = torch.autograd.grad(output_B.sum(), inputs_B4, create_graph=True)
    return {"error": (output_B - targets_B).square() + slope_B4.square().sum(1)}


def _of_csr(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
    inputs_B4, targets_B = batch
    matrix_44 = torch.eye(4).to_sparse_csr()
    return {"error": (model((matrix_44 @ inputs_B4.T).T) - targets_B).square()}


def _of_nested(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
    inputs_B4, targets_B = batch
    both = torch.nested.nested_tensor([inputs_B4, inputs_B4[:2]], layout=torch.jagged)
    return {"error": (model(both.values()[: len(targets_B)]) - targets_B).square()}


def _of_functions(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
    inputs_B4, targets_B = batch
    _, slope_B4 = torch.func.jvp(torch.sin, (inputs_B4,), (torch.ones_like(inputs_B4),))
    return {"error": (model(slope_B4) - targets_B).square()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("losses", slow_after(1, [_of_physics, _of_csr, _of_nested, _of_functions]))
def test_unusual_operations_train_with_capture(here: Here, losses: Any) -> None:
    _use(here, Net, losses)
    _compared(here)


@pytest.mark.parametrize(
    "value",
    [numpy.arange, lambda number: [f"name {number}"], lambda number: 5],
)
def test_batches_with_other_values_than_tensors_train_with_capture(here: Here, value: Any) -> None:
    def collated(_task: Any, examples: Any) -> Any:
        words_BL, targets_B = _padded(examples)
        return words_BL[:, :2].repeat(1, 2), targets_B, value(int(words_BL.sum()))

    def losses(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
        return _losses(task, model, batch[:2])

    _use(here, Net, losses)
    here.plant(
        train_dataset=lambda _task, _folder: Words(),
        validation_dataset=lambda _task, _folder: Words(),
        collate=collated,
    )
    row = _compared(here, workers=0, batch_size=8, max_steps=30)
    assert (row == "captured as CUDA graphs") == (value(1) == 5)


def test_a_stopped_training_captures_again_and_has_the_same_bits(
    here: Here, monkeypatch: Patch
) -> None:
    _use(here, Net)
    with pytest.raises(Preempted):
        here.train("stopped", capture="auto", stop=StopAfter(8))
    replays = _replays(monkeypatch)
    assert _row(here.train("stopped", capture="auto")) == "captured as CUDA graphs"
    assert replays.count(-1) == 18 - 8 - 2
    here.train("eager")
    assert here.digest("stopped") == here.digest("eager")


def test_a_run_that_was_eager_resumes_with_its_reason(here: Here) -> None:
    _use(here, Deep)
    with pytest.raises(Preempted):
        here.train("stopped", capture="auto", stop=StopAfter(8))
    assert "generator of Python" in _row(here.train("stopped", capture="auto"))
    assert "generator of Python" in _manifest(here, "stopped")["resumes"][0]["eager"]


def test_a_run_without_a_rehearsal_is_eager(here: Here) -> None:
    _use(here, Net)
    out = here.train(capture="auto", rehearses=False)
    assert _row(out) == "eager: the run was not rehearsed"


def test_memory_that_is_used_up_in_the_capture_leaves_the_training_eager(
    here: Here, monkeypatch: Patch
) -> None:
    _use(here, Net)
    record = recorded_graph.Recorder.record
    records = list[int]()

    def full(recorder: Any, work: Any) -> Any:
        records.append(1)
        if len(records) > 2:  # the first two are the rehearsal's
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return record(recorder, work)

    monkeypatch.setattr(recorded_graph.Recorder, "record", full)
    out = here.train("captured", capture="auto")
    assert "steps are eager from now on: the step cannot be captured (the GPU's memory" in out
    here.train("eager")
    assert here.digest("captured") == here.digest("eager")


def test_a_short_training_is_eager(here: Here, monkeypatch: Patch) -> None:
    _use(here, Net)
    monkeypatch.setattr(capture, "FEWEST_STEPS", 19)
    assert _row(here.train(capture="auto")) == "eager: only 18 steps are left"
