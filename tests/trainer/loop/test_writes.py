"""Forwards that write inputs, weights and buffers train as a loop by hand, or are refused."""

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from tests.support.here import Here
from tests.support.kinds import slow_but
from tests.support.ranks import Ranks
from tests.support.tiny import StepCounter, Tiny
from trainbox.errors import WrongUse

_WRITING = "tests.support.writing:Writing"
_SHARDS = {"shards": 4, "threads": 1}


def _of(kind: str, **settings: Any) -> dict[str, Any]:
    return {"task": _WRITING, "fields": {"kind": kind}, **settings}


@pytest.mark.parametrize(
    ("in_place", "copies"),
    [("inputs", "copies"), ("prepare", "prepare_copies"), ("statistics", "")],
)
def test_a_batch_is_a_copy_of_the_data(here: Here, in_place: str, copies: str) -> None:
    here.train("in_place", **_of(in_place))
    here.train("copies", **_of(copies))
    losses = [[e["loss"] for e in here.entries("validation", r)] for r in ("in_place", "copies")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3


def test_predictions_and_metrics_see_the_same_inputs(here: Here) -> None:
    here.train(**_of("inputs"))
    assert here.command("evaluate", "runs/r", "--intervals")[0] == 0


@pytest.mark.parametrize("kind", slow_but(["merge"], ["merge", "clamp_eval", "new_eval"]))
def test_an_evaluation_puts_back_the_weights(here: Here, kind: str) -> None:
    here.train("whole", **_of(kind))
    here.stopped(8, **_of(kind))
    here.train(**_of(kind))
    assert here.digest() == here.digest("whole")
    assert here.command("evaluate", "runs/r")[0] == 0
    assert here.command("verify", "runs/r", "runs/whole")[0] == 0


def test_each_batch_of_a_validation_begins_with_the_same_buffers(here: Here) -> None:
    here.train("counts", **_of("count_eval", shards=4, threads=1, accumulation=2))
    assert float(here.weights("counts")["seen"]) == 0
    # Each batch has seen itself alone, so the loss is the same as for a constant output.
    code, out, _ = here.command("evaluate", "runs/counts")
    assert code == 0
    assert f"{here.entries('validation', 'counts')[-1]['loss']:.4f}" in out


@pytest.mark.parametrize("kind", slow_but(["late"], ["late", "often", "rare"]))
def test_a_teacher_that_moves_late_has_the_same_bits_on_any_number_of_processes(
    here: Here, ranks: Ranks, kind: str
) -> None:
    here.train("alone", **_of(kind, **_SHARDS))
    words = ("--set", f"kind={kind}", "--shards", "4", "--threads", "1", "--run", "two")
    ended = ranks.train(2, _WRITING, *words)
    here.stopped(7, "resumed", **_of(kind, **_SHARDS))
    here.train("resumed", **_of(kind, **_SHARDS))
    assert here.digest("resumed") == here.digest("alone")
    assert here.digests("alone")[-1]["model"] == ended.digest
    weights = here.weights("alone")
    assert not torch.equal(
        weights["teacher.weight"], here.state(6, "alone")["model"]["rows.weight"]
    )


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "unseen",
            "a forward has changed the frozen parameter teacher.weight through .data, which",
        ),
        (
            "unseen_trained",
            "a forward changes the trained parameter linear.weight, and with shards",
        ),
    ],
)
def test_a_late_write_that_torch_does_not_record_is_found_after_the_next_digest(
    here: Here, kind: str, text: str
) -> None:
    with pytest.raises(WrongUse, match=f"^{text}"):
        here.train("sharded", **_of(kind, **_SHARDS))
    assert max(here.steps("sharded")) <= 12
    here.train("whole", **_of(kind))
    here.stopped(13, **_of(kind))
    here.train(**_of(kind))
    assert here.digest() == here.digest("whole")


@pytest.mark.parametrize("kind", ["prototype", "shared"])
def test_a_frozen_parameter_that_moves_on_one_process_moves_on_all(
    here: Here, ranks: Ranks, kind: str
) -> None:
    here.train("alone", **_of(kind, **_SHARDS))
    words = ("--set", f"kind={kind}", "--shards", "4", "--threads", "1", "--run", "two")
    ended = ranks.train(2, _WRITING, *words)
    assert here.digests("alone")[-1]["model"] == ended.digest
    start = here.digests("alone")[0]["tensors"]["teacher.weight"]
    assert here.digests("alone")[-1]["tensors"]["teacher.weight"] != start


@pytest.mark.parametrize("kind", ["decay", "data", "normal", "max_norm"])
def test_a_forward_that_changes_a_trained_weight_is_refused_with_shards(
    here: Here, kind: str
) -> None:
    name = "rows.weight" if kind == "max_norm" else "linear.weight"
    with pytest.raises(WrongUse, match=f"a forward changes the trained parameter {name}, and"):
        here.train(**_of(kind, **_SHARDS))
    assert here.steps() == []


@pytest.mark.parametrize("kind", slow_but(["data"], ["decay", "data", "normal", "max_norm"]))
def test_one_shard_trains_such_a_model_as_a_loop_by_hand(here: Here, kind: str) -> None:
    here.train("whole", **_of(kind))
    here.stopped(4, **_of(kind))
    here.train(**_of(kind))
    assert here.digest() == here.digest("whole")


def test_a_write_that_changes_nothing_is_not_refused(here: Here) -> None:
    here.train(**_of("clamp", **_SHARDS))
    assert here.steps()[-1] == 18


def test_a_buffer_that_begins_at_infinity_moves_with_shards(here: Here, ranks: Ranks) -> None:
    here.train("alone", **_of("least", **_SHARDS))
    words = ("--set", "kind=least", "--shards", "4", "--threads", "1")
    ended = ranks.train(2, _WRITING, *words)
    assert here.weights("alone")["least"].isfinite().all()
    assert here.digests("alone")[-1]["model"] == ended.digest


def test_an_unfrozen_parameter_is_refused_with_shards(here: Here) -> None:
    plain = Tiny.losses

    def losses(task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        model.linear.bias.requires_grad_(int(model.forwards) > 4)
        return plain(task, model, batch)

    def build_model(_task: Tiny) -> StepCounter:
        model = StepCounter()
        model.linear.bias.requires_grad_(False)
        return model

    here.plant(losses=losses, build_model=build_model)
    with pytest.raises(WrongUse, match=r"a forward unfreezes the parameter linear\.bias, whose"):
        here.train("sharded", **_SHARDS)
    here.train("whole")
    here.stopped(8)
    here.train()
    assert here.digest() == here.digest("whole")


def test_numbers_of_numpy_are_saved_as_plain_ones(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_optimizer(_task: Tiny, model: Any, *_: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        optimizer.param_groups[0]["scale"] = numpy.float32(2)
        optimizer.state[model.linear.bias]["count"] = numpy.int64(3)
        return optimizer

    here.plant(
        build_optimizer=build_optimizer,
        schedule=lambda _, step, total, *__: numpy.cos(step / total),
    )
    monkeypatch.setattr(StepCounter, "get_extra_state", lambda _: {"mean": numpy.float64(1.5)})
    monkeypatch.setattr(StepCounter, "set_extra_state", lambda *_: None)
    here.stopped(8)
    here.train()
    assert here.command("verify", "runs/r")[0] == 0
    state = here.state(8)["optimizer"]
    assert (state["param_groups"][0]["scale"], state["state"][1]["count"]) == (2.0, 3)
    assert here.state(8)["model"]["_extra_state"] == {"mean": 1.5}


def test_a_value_that_cannot_be_loaded_is_refused_before_an_older_checkpoint_goes(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def extra(model: StepCounter) -> Any:
        return numpy.ones(2) if int(model.forwards) >= 8 else 0

    monkeypatch.setattr(StepCounter, "get_extra_state", extra)
    monkeypatch.setattr(StepCounter, "set_extra_state", lambda *_: None)
    text = r"the model's _extra_state is a ndarray, which cannot be loaded"
    with pytest.raises(WrongUse, match=text):
        here.train(checkpoint_steps=4, keep=1)
    assert here.steps() == [6]


@pytest.mark.parametrize("in_place", [True, False])
def test_an_average_that_a_hook_of_the_optimizer_moves_is_the_same_on_any_number_of_processes(
    here: Here, in_place: bool
) -> None:
    """It changes between forwards, and each process moves it in the same way."""

    def build_optimizer(_task: Tiny, model: Any, *_: Any) -> torch.optim.Optimizer:
        def follow(*_: object) -> None:
            for mean, weight in zip(
                model.teacher.parameters(), model.linear.parameters(), strict=True
            ):
                if in_place:
                    mean.data.lerp_(weight.data, 0.1)
                else:
                    mean.data = mean.data.lerp(weight.data, 0.1)

        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        optimizer.register_step_post_hook(follow)
        return optimizer

    def build_model(_task: Tiny) -> StepCounter:
        model = StepCounter()
        model.teacher = torch.nn.Linear(4, 1).requires_grad_(False)
        return model

    here.plant(build_model=build_model, build_optimizer=build_optimizer)
    here.train("whole", **_SHARDS)
    here.stopped(8, **_SHARDS)
    here.train(**_SHARDS)
    assert here.digest() == here.digest("whole")
    digests = here.digests("whole")
    assert digests[0]["tensors"]["teacher.weight"] != digests[-1]["tensors"]["teacher.weight"]
