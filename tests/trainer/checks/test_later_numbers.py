"""State that acts after step 2: refused with a proof, or noted, and never stops a training."""

import copy
import random
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from tests.support.here import Here
from tests.support.kinds import slow_after, slow_but
from tests.support.tiny import StepCounter, Tiny
from trainbox.errors import Failure, WrongUse

Losses = Callable[[Tiny, Any, Any], dict[str, Tensor]]
_END = 18  # steps of a training of `Tiny`


class _Counter:
    def __init__(self) -> None:
        self.n = 0


class _Net(StepCounter):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seconds, self.state, self.phase = 0, 0.0, {"n": 0}, 1.0
        self.own, self.recent, self.mean = _Counter(), deque[float](maxlen=20), 0.0
        self.calls_list: list[int] = []
        self.table = list(range(_END))


def _grow(model: _Net) -> None:
    model.calls += 1
    model.seconds += 0.25
    model.state["n"] += 1
    model.own.n += 1


# A factor on the losses, which is 1 in steps 1 and 2 of a new training.
_ACTING: dict[str, Callable[[_Net], float]] = {
    "_Net.calls": lambda model: 0.5 if model.calls > 9 else 1.0,
    "_Net.seconds": lambda model: 0.5 if model.seconds > 3 else 1.0,
    "_Net.state['n']": lambda model: 0.5 if model.state["n"] == 12 else 1.0,
    "_Net.own.n": lambda model: 1.0 if model.own.n % 6 else 0.5,
}


def _with(here: Here, act: Callable[[_Net], Any]) -> None:
    """Call `act` with the model in each training forward. A number is a factor on the losses."""
    plain = Tiny.losses

    def losses(task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        factor = act(model) if model.training else 1.0
        found = plain(task, model, batch)
        return {n: v * factor for n, v in found.items()} if isinstance(factor, float) else found

    here.plant(build_model=lambda _task: _Net(), losses=losses)


@pytest.mark.parametrize("name", _ACTING)
def test_a_number_that_acts_later_is_refused_with_the_proof(here: Here, name: str) -> None:
    def act(model: _Net) -> float:
        _grow(model)
        return _ACTING[name](model)

    _with(here, act)
    with pytest.raises(WrongUse) as refused:
        here.train()
    text = str(refused.value)
    assert text.startswith(f"task Tiny: {name} changes the training: step 3 has other bits, first")
    assert "squared_error, if it is " in text
    assert text.endswith(
        "leave it out: make it a buffer (a list of layers: an nn.ModuleList), or "
        "save it with get_extra_state()"
    )
    assert here.steps() == []
    assert not (here.path() / "rehearsal").exists()


def test_numbers_that_change_nothing_are_noted_and_a_resume_has_the_same_bits(here: Here) -> None:
    def count(model: _Net) -> None:
        _grow(model)
        model.recent.append(float(model.calls))
        model.mean = 0.9 * model.mean + 0.1 * float(model.linear.bias.detach())
        assert model.table[model.calls - 1] >= 0  # an index that is valid until the end

    _with(here, count)
    out = here.train("whole")
    (line,) = (line for line in out.splitlines() if line.startswith("note "))
    assert line == (
        "note       _Net.calls, _Net.mean, _Net.own and 3 more changed in a step, and checkpoints "
        "leave this out; step 3 had the same bits without it, and with 5 later values of its counts"
    )
    assert here.json("manifest.json", "whole")["rehearsal"]["notes"] == [line[11:]]
    here.stopped(5)
    assert line in here.train()  # also at a resume
    assert here.digest() == here.digest("whole")


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda model: model.table[model.calls * 2], "step 3 raises IndexError"),
        pytest.param(
            lambda model: [0] * (10**9 * (model.calls > 15)), "step 3 takes", marks=pytest.mark.slow
        ),
    ],
)
def test_a_number_with_which_a_step_fails_or_takes_long_is_refused(
    here: Here, monkeypatch: pytest.MonkeyPatch, act: Callable[[_Net], Any], text: str
) -> None:
    monkeypatch.setattr("trainer.checks.rehearsal._SLOWER_S", 0.1)

    def count(model: _Net) -> None:
        model.calls += 1
        act(model)

    _with(here, count)
    with pytest.raises(WrongUse, match=f"_Net.calls changes the training: {text}"):
        here.train()


def test_an_error_beside_a_container_that_is_younger_shows_nothing(here: Here) -> None:
    def count(model: _Net) -> None:
        model.calls_list.append(model.calls)
        model.calls += 1
        assert model.calls_list[model.calls - 1] == model.calls - 1

    _with(here, count)
    assert "\nnote       _Net.calls and _Net.calls_list changed in a step" in here.train()


def test_state_that_each_step_sets_again_is_not_noted(here: Here) -> None:
    def set_again(model: _Net) -> None:
        model.calls, model.state["n"] = 7, int(model.forwards)
        model.recent.clear()
        model.mean = float(model.linear.bias.detach())

    _with(here, set_again)
    assert "\nnote " not in here.train()


def test_a_state_that_changes_later_is_noted_once_and_at_a_resume(here: Here) -> None:
    def late(model: _Net) -> None:
        model.phase = 2.0 if int(model.forwards) == 8 else model.phase

    _with(here, late)
    text = "_Net.phase changed, which checkpoints leave out: a resume may have other bits"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.loop.saving.Saving.save_and_stop", lambda _: None)
        out = here.train("whole", checkpoint_steps=12)
    assert out.count("changed, which") == 1
    assert f"\nnote: by step 12, {text}, and `trainbox drill` shows whether it does\n" in out
    assert here.steps("whole")[-1] == _END
    here.stopped(13)
    assert "note       _Net.phase changed during the training, and checkpo" in here.train()


class _Phased(StepCounter):
    """A model whose phase changes late, and is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = 1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"phase": self.phase}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.phase = state["phase"]

    def forward(self, inputs_B4: Tensor) -> Tensor:
        self.phase = 0.5 if int(self.forwards) > 5 else self.phase
        return self.phase * super().forward(inputs_B4)


def test_extra_state_may_change_without_a_note(here: Here) -> None:
    here.plant(build_model=lambda _task: _Phased())
    assert "note" not in here.train(max_steps=12)


def test_a_patience_in_finished_is_refused(here: Here) -> None:
    """Only validations count, so its value at the end is their number."""

    def finished(task: Tiny, _metrics: Mapping[str, float]) -> bool:
        vars(task)["waits"] = vars(task).get("waits", 0) + 1
        return vars(task)["waits"] > 10

    here.plant(finished=finished)
    with pytest.raises(WrongUse, match=r"Tiny.waits changes the training: .* of finished\(\), if"):
        here.train(epochs=20)
    assert "\nnote       Tiny.waits changed in a step" in here.train("short", epochs=2)


@pytest.mark.parametrize("method", ["prepare", "metrics", "figures"])
def test_a_method_that_counts_is_noted(here: Here, method: str) -> None:
    plain = getattr(Tiny, method)

    def counted(task: Tiny, *arguments: Any, **options: Any) -> Any:
        vars(task)["calls"] = vars(task).get("calls", 0) + 1
        return plain(task, *arguments, **options)

    here.plant(**{method: counted})
    assert "\nnote       Tiny.calls changed in a step" in here.train(max_steps=12)


def test_a_metric_that_adds_up_over_validations_is_refused(here: Here) -> None:
    def metrics(task: Tiny, totals: Mapping[str, Tensor]) -> dict[str, float]:
        vars(task)["sum"] = vars(task).get("sum", 0.0) + float(totals["loss"])
        return {"loss": vars(task)["sum"]}

    here.plant(metrics=metrics)
    with pytest.raises(WrongUse, match="the metric loss differs after a resume") as refused:
        here.train()
    assert "(Tiny.sum): keep it in a buffer of the model, or return a factor" in str(refused.value)


def test_a_task_that_counts_its_steps_is_told_where_to_keep_them(here: Here) -> None:
    plain = Tiny.losses

    def losses(task: Tiny, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        vars(task)["calls"] = vars(task).get("calls", 0) + 1
        factor = 0.5 if vars(task)["calls"] > 9 else 1.0
        return {name: value_B * factor for name, value_B in plain(task, model, batch).items()}

    here.plant(losses=losses)
    with pytest.raises(WrongUse, match=r"Tiny.calls changes .*: keep it in a buffer of the model"):
        here.train()


def test_metrics_that_reset_their_state_are_noted(here: Here) -> None:
    plain = Tiny.statistics

    def statistics(task: Tiny, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        vars(task).setdefault("seen", []).append(
            float(task.losses(model, batch)["squared_error"].mean())
        )
        return plain(task, model, batch)

    def metrics(task: Tiny, _totals: Mapping[str, Tensor]) -> dict[str, float]:
        losses = vars(task).pop("seen")
        return {"loss": sum(losses) / len(losses)}

    here.plant(statistics=statistics, metrics=metrics)
    out = here.train()
    assert "note       metrics() returns something else when it is called again" in out


def test_a_schedule_is_called_for_all_steps_before_the_first(here: Here) -> None:
    def drawing(_task: Tiny, *_: Any) -> float:
        return random.random()  # noqa: S311

    here.plant(schedule=lambda _, step, *__: [1.0, 0.5][step // 17])
    here.train("whole")
    here.plant(schedule=lambda _, step, *__: [1.0][step // 17])
    with pytest.raises(Failure, match="raised IndexError: list index out of range"):
        here.train("short")
    here.plant(schedule=lambda _, step, *__: None if step > 8 else 1.0)
    with pytest.raises(WrongUse, match=r"schedule\(\) returned None: return a finite number"):
        here.train("none")
    here.plant(schedule=drawing)
    with pytest.raises(WrongUse, match=r"schedule\(\) returned 0\.\d+ and then 0\.\d+ at step 17:"):
        here.train("drawn")


@pytest.mark.parametrize("step_size", [1, 4, 30])
def test_a_scheduler_of_torch_that_schedule_keeps_is_refused(here: Here, step_size: int) -> None:
    """Its factors depend on how often it was stepped, also if two calls in a row are the same."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    kept = torch.optim.lr_scheduler.StepLR(optimizer, step_size)

    def schedule(_task: Tiny, *_: Any) -> float:
        optimizer.step()
        kept.step()
        return kept.get_last_lr()[0]

    here.plant(schedule=schedule)
    text = r"arguments alone, and use trainbox.scheduler_factor for a scheduler of torch$"
    with pytest.raises(WrongUse, match=text):
        here.train()


def test_a_scheduler_of_torch_that_acts_later_is_refused(here: Here) -> None:
    def build_optimizer(task: Tiny, model: nn.Module, *_: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        vars(task)["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        return optimizer

    def step(task: Tiny, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        if model.training and act:
            vars(task)["scheduler"].step()
        return plain(task, model, batch)

    act, plain = False, Tiny.losses
    here.plant(build_optimizer=build_optimizer, losses=step)
    here.train("unused", max_steps=6)
    act = True
    with (
        pytest.warns(UserWarning, match="lr_scheduler.step"),
        pytest.raises(WrongUse, match=r"Tiny.scheduler.*|the weight.*|optimizer"),
    ):
        here.train()


class _Rows(Dataset[Any]):
    def __init__(self) -> None:
        self.reads, self.cache = 0, dict[int, Tensor]()

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        self.cache[index] = torch.full((4,), float(index))
        factor = 0.5 if self.acts and self.reads > 100 else 1.0
        return factor * self.cache[index], torch.tensor(1.0)

    acts = False


@pytest.mark.parametrize("workers", slow_but([0, 2], [0, 1, 2]))
def test_a_cache_and_a_counter_of_a_dataset(
    here: Here, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    here.plant(train_dataset=lambda _task, _folder: _Rows())
    out = here.train("noted", workers=workers)
    assert "note       train_dataset.cache and train_dataset.reads changed in a step" in out
    monkeypatch.setattr(_Rows, "acts", True)
    with pytest.raises(WrongUse, match="train_dataset.reads changes the training: step 3 has"):
        here.train("acts", workers=workers)


def test_a_model_that_build_model_keeps_is_refused(here: Here) -> None:
    """The rehearsal would train the model of the training."""
    kept = StepCounter()
    shared, plain = nn.Linear(4, 1), Tiny.build_model

    def partly(task: Tiny) -> nn.Module:
        model = plain(task)
        model.linear = shared
        return model

    for build in (lambda _task: kept, partly):
        here.plant(build_model=build)
        with pytest.raises(
            WrongUse, match=r"build_model\(\) returned other weights when it was ca"
        ):
            here.train()
        assert here.steps() == []
    here.train("skipped", rehearses=False)


def test_fast_and_no_rehearsal_train_a_task_with_hidden_state(here: Here) -> None:
    def act(model: _Net) -> float:
        model.calls += 1
        return _ACTING["_Net.calls"](model)

    _with(here, act)
    out = here.train("fast", max_steps=12, deterministic=False)
    assert "\nrehearsal  2 steps, a validation and a checkpoint in " in out
    assert "\nrehearsal  skipped\n" in here.train("skipped", max_steps=12, rehearses=False)
    assert here.steps("fast")[-1] == here.steps("skipped")[-1] == 12


def _mean_removed(output_B: Tensor, target_B: Tensor) -> Tensor:
    return (output_B - output_B.mean() - target_B).square()


def _broadcast(output_B: Tensor, target_B: Tensor) -> Tensor:
    return (output_B[:, None] - target_B).square().mean(1)


def _contrastive(output_B: Tensor, target_B: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        output_B[:, None] * target_B, torch.arange(len(output_B)), reduction="none"
    )


def _alone(output_B: Tensor, target_B: Tensor) -> Tensor:
    return (output_B - target_B).square()


def _random(output_B: Tensor, target_B: Tensor) -> Tensor:
    return (output_B + torch.randn(len(output_B)) - target_B).square()


@pytest.mark.parametrize(
    ("compute", "depends"),
    [
        (_mean_removed, True),
        (_broadcast, True),
        (_contrastive, True),
        (_alone, False),
        (_random, False),
    ],
)
def test_losses_that_depend_on_the_batch_are_noted_with_the_size_of_the_difference(
    here: Here,
    compute: Callable[[Tensor, Tensor], Tensor],
    depends: bool,
) -> None:
    def losses(_task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        inputs_B4, targets_B = batch
        return {"error": compute(model(inputs_B4), targets_B)}

    here.plant(losses=losses)
    out = here.train()
    assert (
        "note       the loss error of an example depends on the other examples" in out
    ) == depends
    assert not depends or "it differs by up to " in out
    assert ("if this is a mistake, use reduction='none', with an output" in out) == depends


@pytest.mark.parametrize(
    ("applied", "takes", "twice"),
    [
        (torch.sigmoid, F.binary_cross_entropy_with_logits, True),
        (lambda output_B: output_B, F.binary_cross_entropy_with_logits, False),
        (torch.sigmoid, F.binary_cross_entropy, False),
    ],
)
def test_a_sigmoid_before_a_loss_of_logits_is_noted(
    here: Here, applied: Any, takes: Any, twice: bool
) -> None:
    def losses(_task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        found_B = applied(model(batch[0])[:, None])[:, 0]
        return {"error": takes(found_B, (batch[1] > 0).float(), reduction="none")}

    here.plant(losses=losses)
    line = (
        "the loss error applies a sigmoid to the output of a sigmoid: remove the sigmoid of the "
        "model, because binary_cross_entropy_with_logits takes logits"
    )
    assert here.train(accumulation=2).count(line) == twice


def _cross_entropy(logits_B1: Tensor, **options: Any) -> Tensor:
    logits_B2 = torch.cat([logits_B1, logits_B1], 1).softmax(1)
    labels_B = torch.zeros(len(logits_B2), dtype=torch.int64)
    return F.cross_entropy(logits_B2, labels_B, reduction="none", **options)


@pytest.mark.parametrize(
    ("outputs", "source"),
    [
        (nn.Linear(1, 2), "linear layer"),
        (nn.Sequential(nn.Linear(1, 2), nn.Softmax(1)), "softmax"),
        (nn.Sequential(nn.Linear(1, 2), nn.LogSoftmax(1)), ""),
        (nn.Sequential(nn.Linear(1, 2), nn.LogSigmoid()), ""),
    ],
)
def test_an_nll_loss_without_logarithms_is_noted(here: Here, outputs: Any, source: str) -> None:
    def losses(_task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        labels_B = torch.zeros(len(batch[0]), dtype=torch.int64)
        found_B2 = outputs(model(batch[0])[:, None])
        return {"nll": F.nll_loss(found_B2, labels_B, reduction="none") / 2}

    here.plant(losses=losses)
    text = f"the loss nll gives nll_loss the output of a {source}, but it takes log-probabilities"
    out = here.train(max_steps=2)
    assert (out.count(text), out.count("gives nll_loss")) == ((1, 1) if source else (0, 0))


def _curriculum(losses_B: Tensor, model: Any) -> Tensor:
    """Weights of the loss that grow from 0."""
    return losses_B * (int(model.forwards) - 1)


@pytest.mark.parametrize(
    ("compute", "is_zero"),
    [
        (lambda losses_B, _model: losses_B * 0, True),
        (lambda losses_B, _model: (losses_B - 1e6).relu(), True),
        (lambda losses_B, _model: losses_B - losses_B.detach(), False),  # as in REINFORCE
        (_curriculum, False),
        (lambda losses_B, _model: losses_B, False),
    ],
)
def test_losses_that_are_all_zero_are_noted(here: Here, compute: Any, is_zero: bool) -> None:
    plain = Tiny.losses

    def losses(task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        found_B = plain(task, model, batch)["squared_error"]
        return {"a": compute(found_B, model), "b": compute(found_B, model) * 2}

    here.plant(losses=losses)
    text = "note       all losses of the first 2 steps are 0, and so is the gradient: check the"
    assert (text in here.train()) == is_zero


def _distilled(logits_B1: Tensor) -> Tensor:
    logits_B2 = torch.cat([logits_B1, -logits_B1], 1)
    return -(logits_B2.softmax(1) * logits_B2.log_softmax(1)).sum(1) / 2


@pytest.mark.parametrize(
    ("compute", "twice"),
    [
        (lambda logits_B1: 2 * _cross_entropy(logits_B1), True),
        (lambda logits_B1: _cross_entropy(logits_B1, label_smoothing=0.1), True),
        (lambda logits_B1: _cross_entropy(logits_B1)[:, None].sum(1) / 4, True),
        (lambda logits_B1: logits_B1.square()[:, 0] + 0.1 * _cross_entropy(logits_B1), True),
        (_distilled, False),
        # Logits in a range, on purpose.
        (lambda logits_B1: F.softplus(-logits_B1.sigmoid() * 10)[:, 0], False),
        (
            lambda logits_B1: F.binary_cross_entropy_with_logits(
                logits_B1.sigmoid() * 10, torch.ones_like(logits_B1), reduction="none"
            )[:, 0],
            False,
        ),
    ],
)
def test_a_weight_of_the_loss_does_not_hide_a_second_softmax(
    here: Here, compute: Any, twice: bool
) -> None:
    def losses(_task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        return {"error": compute(model(batch[0])[:, None])}

    here.plant(losses=losses)
    text = "the loss error applies a softmax to the output of a softmax: remove the softmax"
    assert here.train(max_steps=2).count(text) == twice


def test_an_activation_elsewhere_in_the_loss_and_a_frozen_layer_are_not_noted(here: Here) -> None:
    """Such as gates of the model, and the frozen network of a loss."""

    def losses(_task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        frozen = torch.nn.Linear(4, 4)
        gates_B4 = torch.sigmoid(model.linear.weight * batch[0]).log_softmax(1)
        error_B = F.mse_loss(model(frozen(batch[0]).detach()), batch[1], reduction="none")
        return {"error": error_B + gates_B4.square().mean(1)}

    here.plant(losses=losses)
    out = here.train()
    assert "applies a softmax" not in out and "creates the layer" not in out


@pytest.mark.parametrize("method", ["losses", "statistics", ""])
def test_a_method_that_leaves_the_model_in_another_mode_is_noted(here: Here, method: str) -> None:
    before = here.train("plain")
    if method:
        usual = getattr(Tiny, method)

        def changing(task: Tiny, model: Any, batch: Any) -> Any:
            model.train(method == "statistics")
            return usual(task, model, batch)

        here.plant(**{method: changing})
    out = here.train("r")
    assert "leaves the model" not in before and "puts the model" not in before
    assert ("losses() leaves the model in evaluation mode" in out) == (method == "losses")
    assert ("statistics() puts the model in training mode" in out) == (method == "statistics")


def test_data_in_memory_is_the_same_after_the_comparison(here: Here) -> None:
    plain = Tiny.losses

    def losses(task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        batch[0].mul_(2)
        return plain(task, model, batch)

    here.plant(losses=losses)
    here.train("rehearsed")
    here.train("skipped", rehearses=False)
    assert here.digest("rehearsed") == here.digest("skipped")
    assert here.entries("validation", "rehearsed") is not None


class _Part(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.forwards = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.part = part

    def forward(self, inputs_B4: Tensor) -> Tensor:
        found: Tensor = self.part(inputs_B4).squeeze(1)
        return found


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    "build",
    slow_after(
        1,
        [
            lambda: torch.jit.script(_layers()),
            lambda: _Part(torch.jit.script(_layers())),
            lambda: torch.jit.trace(_layers(), torch.randn(8, 4)),
        ],
    ),
    ids=["script", "part", "trace"],
)
def test_scripted_and_traced_models_train_and_resume(
    here: Here, build: Callable[[], nn.Module]
) -> None:
    here.plant(
        losses=lambda _t, m, b: {"error": (m(b[0]).reshape(-1) - b[1]).square()},
        build_model=lambda _task: build(),
    )
    with pytest.warns(FutureWarning, match="deprecated"):
        for shards in (1, 2):
            run = f"shards-{shards}"
            here.train(f"{run}-whole", shards=shards, threads=1)
            here.stopped(5, run, shards=shards, threads=1)
            here.train(run, shards=shards, threads=1)
            assert here.digest(run) == here.digest(f"{run}-whole")


def test_a_buffer_that_is_registered_again_with_another_size_is_refused(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Growing(StepCounter):
        first = 0

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.zeros(1))

        def forward(self, inputs_B4: Tensor) -> Tensor:
            if self.training and int(self.forwards) >= self.first:
                self.register_buffer("queue", torch.cat([self.queue, torch.ones(1)]))
            return super().forward(inputs_B4)

    here.plant(build_model=lambda _task: Growing())
    text = r"\(queue: shape \(1,\) -> shape \(3,\)\), so a resume could not load a checkpoint"
    with pytest.raises(WrongUse, match=text):
        here.train()
    with pytest.raises(WrongUse, match=r"a forward changes the shape of the buffer queue from"):
        here.train("sharded", shards=2, threads=1)
    monkeypatch.setattr(Growing, "first", 8)
    with pytest.raises(WrongUse, match=text.replace("3", "5")):
        here.train("late")
    assert here.steps("late") == [6]


class _Lagging(StepCounter):
    """A model whose average, outside of its modules, follows its weights and is equal at first."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["average"] = copy.deepcopy(self.linear)

    def forward(self, inputs_B4: Tensor) -> Tensor:
        average: Any = self.average
        if self.training:
            for mean, weight in zip(average.parameters(), self.linear.parameters(), strict=True):
                mean.data.lerp_(weight.data, 0.1)
            return super().forward(inputs_B4)
        found: Tensor = average(inputs_B4).squeeze(1)
        return found


def test_an_average_that_is_as_new_after_step_1_is_refused_if_it_is_used(here: Here) -> None:
    here.plant(build_model=lambda _task: _Lagging())
    with pytest.raises(WrongUse, match=r"the statistic loss differs .* \(_Lagging.average\): make"):
        here.train()


def test_a_count_that_each_validation_sets_back_is_refused(here: Here) -> None:
    def act(model: _Net) -> float:
        model.calls += 1
        return 0.5 if model.calls >= 5 else 1.0

    def statistics(task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        model.calls = 0
        return plain(task, model, batch)

    plain = Tiny.statistics
    _with(here, act)
    here.plant(statistics=statistics)
    text = "_Net.calls changes the training: step 3 has other bits, .*, if it is 5, as at the end"
    with pytest.raises(WrongUse, match=text):
        here.train()


def test_a_count_in_a_namespace_is_tried(here: Here) -> None:
    def act(model: _Net) -> float:
        model.own.all = getattr(model.own, "all", SimpleNamespace(n=[0]))  # type: ignore[attr-defined]
        model.own.all.n[0] += 1  # type: ignore[attr-defined]
        return 0.5 if model.own.all.n[0] > 9 else 1.0  # type: ignore[attr-defined]

    def build_model(_task: Tiny) -> nn.Module:
        model = _Net()
        model.own.all = SimpleNamespace(n=[0])  # type: ignore[attr-defined]
        return model

    _with(here, act)
    here.plant(build_model=build_model)
    with pytest.raises(WrongUse, match=r"_Net\.own\.all\.n\[0\] changes the training"):
        here.train()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: model.linear.bias.requires_grad_(False), "_Net.linear.requires_grad"),
        (lambda model: setattr(model, "act", torch.tanh), "_Net.act"),
        (lambda model: setattr(model, "layer", nn.Tanh()), "_Net.layer.__class__"),
    ],
)
def test_a_change_of_what_a_module_is_is_noted(
    here: Here, change: Callable[[Any], Any], name: str
) -> None:
    def build_model(_task: Tiny) -> nn.Module:
        model = _Net()
        model.act, model.layer = torch.relu, nn.ReLU()
        return model

    _with(here, lambda model: change(model) if int(model.forwards) == 7 else None)
    here.plant(build_model=build_model)
    assert f"note: by step 12, {name}" in here.train(checkpoint_steps=12)


@pytest.mark.parametrize("copied", ["parameter", "module"])
def test_a_trained_parameter_that_is_replaced_is_refused_at_the_next_save(
    here: Here, copied: str
) -> None:
    def replace(model: Any) -> None:
        if int(model.forwards) != 7:
            return
        if copied == "module":
            model.linear = copy.deepcopy(model.linear)
        else:
            model.linear.weight = nn.Parameter(model.linear.weight.detach().clone())

    _with(here, replace)
    with pytest.raises(WrongUse, match=r"the trained parameter linear\.weight was replaced by"):
        here.train()
    assert here.steps() == [6]


def test_numbers_of_numpy_in_groups_are_not_refused(here: Here) -> None:
    def build_optimizer(_task: Tiny, model: nn.Module, *_: Any) -> torch.optim.Optimizer:
        scales = 0.75 ** numpy.arange(2)
        groups = [
            {"params": [p], "lr_scale": s, "lr": 0.01 * s}
            for p, s in zip(model.parameters(), scales, strict=True)
        ]
        return torch.optim.AdamW(
            groups, betas=tuple(numpy.array([0.9, 0.95])), weight_decay=numpy.float64(0.05)
        )

    here.plant(build_optimizer=build_optimizer)
    here.train("whole")
    here.stopped(7)
    here.train()
    assert here.digest() == here.digest("whole")


def test_an_optimizer_with_another_form_of_state_is_refused(here: Here) -> None:
    class Slow(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"base": super().state_dict(), "param_groups": []}

    here.plant(build_optimizer=lambda _task, model, *_: Slow(model.parameters(), 0.1))
    with pytest.raises(WrongUse, match=r"Slow.state_dict\(\) has base, param_groups instead of"):
        here.train()


def test_random_numbers_at_the_import_of_a_task_are_seeded(here: Here) -> None:
    source = f"""
import random
from dataclasses import dataclass
import numpy, torch
from {Tiny.__module__} import Tiny as Base
DRAWN = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
@dataclass(frozen=True)
class Tiny(Base):
    def losses(self, model, batch):
        return {{n: v * (1 + sum(DRAWN)) for n, v in super().losses(model, batch).items()}}
"""
    for run in ("one", "other"):
        random.seed(run)
        numpy.random.seed(len(run))
        torch.manual_seed(len(run))
        Path(f"drawing_{run}.py").write_text(source)
        here.train(run, task=f"drawing_{run}.py:Tiny", max_steps=3)
    assert here.digest("one") == here.digest("other")


def test_totals_that_a_method_changes_stay_in_the_records(here: Here) -> None:
    def figures(_task: Tiny, _model: nn.Module, _batch: Any, totals: Any) -> dict[str, Any]:
        totals["table"].zero_()
        return {} if "loss" in totals else {"none": None}

    here.plant(
        statistics=lambda task, model, batch: {
            "loss": task.losses(model, batch)["squared_error"].sum(),
            "table": torch.ones(2) * len(batch[0]),
        },
        metrics=lambda t, x: {"loss": float(x["loss"])},
    )
    here.train("pure")
    here.plant(
        figures=figures,
        metrics=lambda _t, x: {"loss": float(x.pop("loss") + x["table"].zero_().sum())},
    )
    out = here.train()
    assert "note" not in out
    tables = [[e["table"] for e in here.entries("validation", run)] for run in ("pure", "r")]
    assert tables[0] == tables[1] == 3 * [[20.0, 20.0]]


def test_a_buffer_may_begin_with_nan(here: Here) -> None:
    def build_model(_task: Tiny) -> nn.Module:
        model = StepCounter()
        model.register_buffer("unset", torch.full((3,), torch.nan))
        return model

    here.plant(build_model=build_model)
    here.train("whole", shards=2, threads=1)
    here.stopped(7, shards=2, threads=1)
    here.train(shards=2, threads=1)
    assert here.steps()[-1] == _END


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_a_function_of_torch_jit_has_the_same_bits_in_each_call(here: Here) -> None:
    swish = torch.jit.script(_swish)

    class Net(StepCounter):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(192, 16)
            self.linear = nn.Linear(16, 1)

        def forward(self, inputs_B4: Tensor) -> Tensor:
            return super().forward(swish(self.first(inputs_B4.repeat(1, 48))))

    here.plant(build_model=lambda _task: Net())
    here.train("skipped", threads=1, batch_size=32, max_steps=6, rehearses=False)
    here.train("rehearsed", threads=1, batch_size=32, max_steps=6)  # after many calls
    assert here.digest("rehearsed") == here.digest("skipped")


def _swish(values: Tensor) -> Tensor:
    return values * torch.sigmoid(values)


@pytest.mark.parametrize("method", ["metrics", "finished"])
def test_a_validation_that_writes_a_buffer_is_refused(here: Here, method: str) -> None:
    """Each checkpoint after it would count as damaged."""
    models: list[nn.Module] = []

    def build_model(_task: Tiny) -> nn.Module:
        models[:] = [StepCounter()]
        models[0].register_buffer("waits", torch.zeros(()))
        return models[0]

    plain = getattr(Tiny, method)

    def counted(task: Tiny, given: Any) -> Any:
        if int(models[0].forwards) >= first:  # type: ignore[call-overload]
            models[0].waits += 1  # type: ignore[operator]
        return plain(task, given)

    first = 0
    here.plant(build_model=build_model, **{method: counted})
    text = rf"task Tiny: {method}\(\) changes waits of the model, whose digest is recorded before"
    with pytest.raises(WrongUse, match=text):
        here.train()
    first = 12
    with pytest.raises(WrongUse, match=text):
        here.train("late")
    assert here.steps("late") == [6]
    assert here.command("evaluate", "runs/late")[0] == 0


def test_a_list_that_metrics_empties_is_noted(here: Here) -> None:
    plain = Tiny.metrics

    def metrics(task: Tiny, totals: Any) -> dict[str, float]:
        vars(task).setdefault("hits", []).clear()
        return plain(task, totals)

    def losses(task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        if model.training:
            vars(task).setdefault("hits", []).append(len(batch[0]))
        return of_batch(task, model, batch)

    of_batch = Tiny.losses
    here.plant(metrics=metrics, losses=losses)
    here.train("whole")
    here.stopped(8)
    here.train()
    assert here.digest() == here.digest("whole")


def test_a_buffer_of_another_type_and_a_new_group_are_refused_at_the_save(here: Here) -> None:
    def cast(_task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        if int(model.forwards) == 8:
            model.register_buffer("scale", model.scale.double())
        return plain(_task, model, batch)

    def build_model(_task: Tiny) -> nn.Module:
        model = StepCounter()
        model.register_buffer("scale", torch.ones(2))
        return model

    plain = Tiny.losses
    here.plant(build_model=build_model)
    here.plant(losses=cast)
    with pytest.raises(WrongUse, match=r"\(scale: torch.float32 -> torch.float64\), so a "):
        here.train("cast")
    here.plant(losses=plain)
    made: list[torch.optim.Optimizer] = []

    def build_optimizer(_task: Tiny, model: nn.Module, *_: Any) -> torch.optim.Optimizer:
        made[:] = [torch.optim.SGD(model.parameters(), 0.05)]
        return made[0]

    def schedule(_task: Tiny, step: int, *_: Any) -> float:
        if step == 8 and len(made[0].param_groups) == 1:
            made[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        return 1.0

    here.plant(build_optimizer=build_optimizer, schedule=schedule)
    with pytest.raises(WrongUse, match="a parameter group was added to the optimizer"):
        here.train()
