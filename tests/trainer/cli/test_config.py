"""The command `config`, and the way of a run through its file of an experiment."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.here import Here
from tests.support.tiny import TINY
from tests.trainbox.contract.test_config import OTHER
from trainbox.contract.config import Config
from trainbox.contract.errors import WrongUse
from trainer.sweep.experiment_file import as_experiment, sweep_as_experiment
from trainer.sweep.grid import Sweep
from trainer.sweep.script import Script


def _written(config: Config, plan: Any = None) -> str:
    return as_experiment(config, Path("runs/r"), plan or {})


def test_the_file_of_a_run_trains_the_same_run_again(here: Here) -> None:
    arguments = (
        *("--set", "noise=0.5", "--epochs", "2", "--lr", "0.02", "--batch-size", "10", "--fast"),
        *("--accumulation", "2", "--optimizer", "sgd", "--weight-decay", "1e-05", "--seed", "5"),
        *("--early-stopping", "min:loss", "--checkpoint-minutes", "7.5", "--shards", "2"),
    )
    assert here.command("train", TINY, *arguments, "--run", "first", "--device", "cpu")[0] == 0
    text = here.succeeds("config", "runs/first", "--toml")
    Path("x.toml").write_text(text)
    here.succeeds("train", "--config", "x.toml", "--run", "other", "--device", "cpu")
    config = (here.path("first") / "config.json").read_text()
    assert (here.path("other") / "config.json").read_text() == config
    assert here.digest("other") == here.digest("first")
    assert here.command("config", "runs/first") == (0, config, "")


def test_each_setting_has_a_key(here: Here) -> None:
    """A run at a limit of steps, with values that differ from the defaults."""
    # fmt: off
    fields = {"width": 8, "noise": 1.0, "tiny": 1e-300, "most": float("inf"), "deep": True,
              "name": 'a "quoted" \\ text', "set": False, "größe": "ü"}
    # fmt: on
    own = {"task": "my tasks/é.py:\"T'", "fields": fields, "freeze": ["body", '"*.bias']}
    config = Config(**OTHER | own | {"epochs": None, "batch_size": None, "seed": 2**62})
    found = tomllib.loads(_written(config))
    names = {"lr": "learning_rate"}
    settings = {names.get(key, key.replace("-", "_")): v for key, v in found["train"].items()}
    task = found["task"]
    fields = {key: v for key, v in task.items() if key not in ("name", "set")} | task["set"]
    assert Config(task=task["name"], fields=fields, **settings) == config
    default = Config()
    same = {"epochs", "batch_size"}  # the alternatives of two settings above
    assert {name for name in vars(config) if vars(config)[name] == vars(default)[name]} == same


def test_the_file_names_the_launch_and_a_strategy_that_was_chosen() -> None:
    plan = {"reason": "2 GPUs\n-> fsdp", "strategy": "fsdp", "world_size": 2}
    text = _written(Config(), plan)
    assert text.startswith(
        "# The settings of runs/r.\n# It was launched with: 2 GPUs\\n-> fsdp\n\n[task]\n"
    )
    assert tomllib.loads(text)["launch"] == {"strategy": "fsdp"}
    assert "launch" not in tomllib.loads(_written(Config(), {"strategy": "ddp"}))


@pytest.mark.parametrize("value", ["a\nb", "\udc80", None])
def test_a_value_that_the_file_cannot_have_is_refused(value: Any) -> None:
    with pytest.raises(WrongUse) as failure:
        _written(Config(fields={"width": value}))
    shown = f"width is {value!r}, which the file cannot have: use config.json"
    assert str(failure.value) == f"config runs/r --toml: {shown}"


# fmt: off
_FILES = [
    ({}, "r/config.json cannot be read (No such file or directory): name the folder of a run"),
    ({"config.json": "[]"}, "r/config.json is damaged (not a JSON object): restore it"),
    ({"config.json": '{"kind": "script"}'}, "config r: a script has no settings that Trainbox"),
    ({"config.json": "{}"}, "r/manifest.json cannot be read (No such file or directory): name the"),
]
# fmt: on


@pytest.mark.parametrize(("files", "message"), _FILES)
def test_a_folder_without_settings_is_refused(
    here: Here, files: dict[str, str], message: str
) -> None:
    (here.folder / "r").mkdir()
    for name, text in files.items():
        (here.folder / "r" / name).write_text(text)
    for arguments in ((), ("--toml",)):
        err = here.refused("config", "r", *arguments, silent=True)
        assert err.startswith(f"trainbox: {message}")


def test_a_sweep_has_only_a_file_of_an_experiment(here: Here) -> None:
    (here.folder / "s").mkdir()
    (here.folder / "s/study.journal").touch()
    err = here.refused("config", "s", silent=True)
    assert "config s: this is a sweep: add --toml, or name one of its trials" in err


def test_the_sweep_of_a_script_is_refused() -> None:
    script = Script("train.py", False, ("--seed", "{seed}"), 0)
    with pytest.raises(WrongUse, match="a script has no settings that Trainbox knows: give the"):
        sweep_as_experiment(Sweep(script), 1, Path("s"))


def test_edited_settings_are_refused(here: Here) -> None:
    here.train(max_steps=1)
    config = here.path() / "config.json"
    config.write_text(config.read_text().replace('"seed": 0', '"seed": 1'))
    for arguments in ((), ("--toml",)):
        err = here.refused("config", "runs/r", *arguments, silent=True)
        assert "config.json was edited after the run was started (settings.seed: 0 -> 1)" in err
