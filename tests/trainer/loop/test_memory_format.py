"""The memory format of a run."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.convolutions import Pictures
from tests.support.here import Here
from tests.support.kinds import slow_but
from tests.support.ranks import Ranks
from tests.support.tiny import TINY
from trainbox.errors import Failure, WrongUse
from trainbox.options.config import Config, check_strategy
from trainer.loop.memory_format import memory_format, put_channels_last
from trainer.parallel.strategy import Strategy
from trainer.parallel.world import World

PICTURES = "tests.support.convolutions:Pictures"
_LAST = "channels_last"
BF16: dict[str, Any] = {"task": PICTURES, "precision": "bf16", "threads": 1}


@dataclass(frozen=True)
class Mistaken(Pictures):
    """A mistake: a view of transposed pictures."""

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"error": batch[0].mT.view(-1)}


@dataclass(frozen=True)
class Asserting(Pictures):
    """Needs contiguous pictures, as operators of extensions do, and raises its own error."""

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        hidden = model.get_submodule("first")(batch[0])
        assert hidden.is_contiguous()
        return super().losses(model, batch)


def _format(here: Here, run: str = "r") -> str:
    config, manifest = here.json("config.json", run), here.json("manifest.json", run)
    assert config["memory_format"] == manifest["settings"]["memory_format"]
    return str(config["memory_format"])


def _strides(here: Here) -> tuple[int, ...]:
    return here.weights()["second.weight"].stride()


def test_convolutions_in_bf16_have_the_channels_last_and_a_stop_keeps_the_bits(here: Here) -> None:
    out = here.train("undisturbed", **BF16)
    assert "precision  bf16, deterministic, channels last, 1 CPU thread(s) a process" in out
    assert _format(here, "undisturbed") == "channels_last"
    here.stopped(5, **BF16)
    here.train(**BF16)
    assert _strides(here) == (72, 1, 24, 8)
    assert here.digest() == here.digest("undisturbed")
    here.succeeds("verify", "runs/r")
    here.train("contiguous", **BF16, memory_format="contiguous")
    assert here.digest("contiguous") != here.digest()


def test_a_model_without_convolutions_is_contiguous(here: Here) -> None:
    out = here.train(task=TINY, precision="bf16", max_steps=2, threads=1)
    assert _format(here) == "contiguous"
    assert "channels last" not in out


@pytest.mark.parametrize("rehearses", slow_but([True], [True, False]))
def test_a_model_that_needs_contiguous_pictures_gets_them_in_the_first_step(
    here: Here, rehearses: bool
) -> None:
    out = here.train(**BF16, fields={"views": True}, rehearses=rehearses)
    assert _format(here) == "contiguous"
    assert out.count("run        runs/r") == 1
    here.train("given", **BF16, fields={"views": True}, memory_format="contiguous")
    assert here.digest() == here.digest("given")
    # A stop before the first checkpoint changes nothing.
    here.stopped(5, run="stopped", **BF16, fields={"views": True}, rehearses=rehearses)
    here.train("stopped", **BF16, fields={"views": True})
    assert here.digest("stopped") == here.digest("given")
    here.succeeds("verify", "runs/r")


@pytest.mark.parametrize("rehearses", [True, False])
def test_a_task_that_checks_the_order_itself_gets_contiguous_pictures(
    here: Here, rehearses: bool
) -> None:
    here.train(**BF16 | {"task": f"{__name__}:Asserting"}, rehearses=rehearses)
    assert _format(here) == "contiguous"


@pytest.mark.parametrize("rehearses", [True, False])
def test_a_requested_format_in_which_a_model_fails_is_an_error(here: Here, rehearses: bool) -> None:
    with pytest.raises(Failure, match="losses.. raised RuntimeError: view size is not compatible"):
        here.train(**BF16, fields={"views": True}, rehearses=rehearses, memory_format=_LAST)


@pytest.mark.parametrize("rehearses", [True, False])
def test_a_view_that_fails_in_both_formats_is_an_error(here: Here, rehearses: bool) -> None:
    with pytest.raises(Failure, match="losses.. raised RuntimeError: view size is not compatible"):
        here.train(**BF16 | {"task": f"{__name__}:Mistaken"}, rehearses=rehearses)


@pytest.mark.parametrize(
    ("device", "precision", "chosen"),
    [
        *(("cuda", "bf16", "channels_last"), ("cuda", "fp16", "channels_last")),
        *(("cpu", "bf16", "channels_last"), ("mps", "bf16", "contiguous")),
        *(("cuda", "fp32", "contiguous"), ("cuda", "tf32", "contiguous")),
    ],
)
def test_the_rule_of_each_device(device: str, precision: str, chosen: str) -> None:
    strategy = Strategy("single", World(0, 1, torch.device(device)))
    model = Pictures().build_model()
    assert memory_format(Config(precision=precision), strategy, model) == chosen


@pytest.mark.parametrize("views", ["true", "false"])
def test_two_processes_have_the_bits_of_one(ranks: Ranks, views: str) -> None:
    words = (
        PICTURES,
        "--set",
        f"views={views}",
        "--precision",
        "bf16",
        "--threads",
        "1",
        "--shards",
        "2",
        "--device",
        "cpu",
    )
    digests = {ranks.train(count, *words, "--run", f"on{count}").digest for count in (1, 2)}
    assert len(digests) == 1


@pytest.mark.parametrize("name", ["dp", "fsdp"])
def test_strategies_that_lose_the_format_refuse_it(name: str) -> None:
    with pytest.raises(WrongUse, match="--memory-format channels_last is not kept"):
        check_strategy(Config(memory_format="channels_last"), name)
    check_strategy(Config(memory_format="channels_last"), "ddp")


def test_only_weights_of_pictures_change() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3), torch.nn.Conv3d(2, 2, 3), torch.nn.Linear(3, 3)
    )
    before = [parameter.clone() for parameter in model.parameters()]
    put_channels_last(model)
    after = list(model.parameters())
    assert after[0].stride() == (18, 1, 6, 2)
    assert all(new.is_contiguous() for new in after[1:])
    assert all(map(torch.equal, before, after))
