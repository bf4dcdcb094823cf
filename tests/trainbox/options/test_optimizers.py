"""One table of optimizers serves the option, the check of settings and the construction."""

from typing import Any

import pytest
import torch

from tests.support.here import Here
from tests.support.tiny import Tiny
from trainbox.errors import WrongUse
from trainbox.options.config import Config, check
from trainbox.options.optimizers import OPTIMIZERS, make_optimizer
from trainbox.task import Task
from trainer.cli.commands import sweep, train

_UNKNOWN = f"--optimizer lion does not exist: use {', '.join(OPTIMIZERS)}"


def test_the_option_has_the_names_of_the_table() -> None:
    for command in (train, sweep):
        (option,) = [option for option in command.params if option.name == "optimizer"]
        assert list(option.type.choices) == list(OPTIMIZERS) == ["adamw", "adam", "sgd"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_has_the_fused_kernel(name: str) -> None:
    built = make_optimizer(name, [torch.nn.Parameter(torch.zeros(2))], 0.5, None)
    assert built.defaults["fused"] is True


@pytest.mark.parametrize("name", ["lion", "", "AdamW", ["sgd"]])
def test_other_names_are_refused_by_the_check_and_the_construction(name: Any) -> None:
    with pytest.raises(WrongUse, match=f"does not exist: use {', '.join(OPTIMIZERS)}"):
        check(Config(optimizer=name), "cpu")
    with pytest.raises(WrongUse, match=f"does not exist: use {', '.join(OPTIMIZERS)}"):
        Task().build_optimizer(torch.nn.Linear(1, 1), name, 0.1, None)


def test_an_unknown_name_in_a_stored_config_is_refused_before_the_data_are_read(here: Here) -> None:
    """A sweep and verify use stored settings that no option has checked."""
    with pytest.raises(WrongUse, match=f"^{_UNKNOWN}$"):
        here.train(optimizer="lion")
    assert not (here.path() / "metrics.jsonl").exists()


def test_the_header_names_an_optimizer_that_the_task_builds_itself(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "\noptimizer " not in here.train("named", max_steps=1, optimizer="sgd")
    monkeypatch.setattr(
        Tiny,
        "build_optimizer",
        lambda _task, model, _name, rate, _decay: torch.optim.RMSprop(model.parameters(), rate),
    )
    out = here.train("own", max_steps=1, optimizer="sgd")
    assert "\noptimizer  RMSprop, which the task builds for --optimizer sgd\n" in out
