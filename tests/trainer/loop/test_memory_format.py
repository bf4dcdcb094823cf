"""The memory format of a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.convolutions import Pictures
from tests.support.here import Here
from tests.support.ranks import Ranks
from tests.support.tiny import TINY
from trainbox.contract.config import Config, check_strategy
from trainbox.contract.errors import WrongUse
from trainer.data.schedule import Schedule, micro_batches
from trainer.loop.memory_format import memory_format, put_channels_last
from trainer.parallel.strategy import Strategy
from trainer.parallel.world import World

PICTURES = "tests.support.convolutions:Pictures"
BF16: dict[str, Any] = {"task": PICTURES, "precision": "bf16", "threads": 1}


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


@pytest.mark.parametrize(
    "settings",
    [
        {"task": TINY, "precision": "bf16"},
        {"task": PICTURES, "precision": "bf16", "fields": {"normed": True}},
    ],
    ids=["no convolution", "a model that has no copy"],
)
def test_other_runs_are_contiguous(here: Here, settings: dict[str, Any]) -> None:
    out = here.train(**settings, max_steps=2, threads=1)
    assert _format(here) == "contiguous"
    assert "channels last" not in out


@pytest.mark.parametrize(
    ("device", "precision", "chosen"),
    [
        *(("cuda", "bf16", "channels_last"), ("cuda", "fp16", "channels_last")),
        *(("cpu", "bf16", "channels_last"), ("mps", "bf16", "contiguous")),
        *(("cuda", "fp32", "contiguous"), ("cuda", "tf32", "contiguous")),
    ],
)
@pytest.mark.parametrize("views", [True, False])
def test_the_rule_of_each_device(device: str, precision: str, chosen: str, views: bool) -> None:
    """The trial does not use the device, so a wrong label cannot end the work on a GPU."""
    task = Pictures(views=views)
    world = World(0, 1, torch.device(device))
    job: Any = SimpleNamespace(
        task=task,
        config=Config(precision=precision),
        strategy=Strategy("single", world),
        world=world,
        model=task.build_model(),
        workers=0,
    )
    schedule = Schedule(0, 32, 8, 4, micro_batches(8, 1, 1, range(1)))
    found = memory_format(job, task.train_dataset(Path()), schedule)
    assert found == ("contiguous" if views else chosen)


def test_the_trial_leaves_no_trace_in_the_task(here: Here) -> None:
    with pytest.raises(WrongUse, match="scale"):
        here.train(**{**BF16, "task": "tests.support.convolutions:Remembers"}, rehearses=True)


def test_two_processes_have_the_bits_of_one(ranks: Ranks) -> None:
    words = (PICTURES, "--precision", "bf16", "--threads", "1", "--shards", "2", "--device", "cpu")
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
