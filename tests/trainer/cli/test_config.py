"""The command `config`, and a second run with the config.json of the first."""

import pytest

from tests.support.here import Here
from tests.support.tiny import TINY


def test_the_settings_of_a_run_train_the_same_run_again(here: Here) -> None:
    arguments = (
        *("--set", "noise=0.5", "--epochs", "2", "--lr", "0.02", "--batch-size", "10", "--fast"),
        *("--accumulation", "2", "--optimizer", "sgd", "--weight-decay", "1e-05", "--seed", "5"),
        *("--early-stopping", "min:loss", "--checkpoint-minutes", "7.5", "--shards", "2"),
    )
    assert here.command("train", TINY, *arguments, "--run", "first", "--device", "cpu")[0] == 0
    again = ("--config", "runs/first/config.json", "--run", "other", "--device", "cpu")
    here.succeeds("train", *again)
    config = (here.path("first") / "config.json").read_text()
    assert (here.path("other") / "config.json").read_text() == config
    assert here.digest("other") == here.digest("first")
    assert here.command("config", "runs/first") == (0, config, "")


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
    err = here.refused("config", "r", silent=True)
    assert err.startswith(f"trainbox: {message}")


def test_a_sweep_names_a_trial_whose_settings_are_there(here: Here) -> None:
    (here.folder / "s").mkdir()
    (here.folder / "s/study.journal").touch()
    err = here.refused("config", "s", silent=True)
    assert "config s: this is a sweep: name one of its trials, such as s/trial-00000" in err


def test_edited_settings_are_refused(here: Here) -> None:
    here.train(max_steps=1)
    config = here.path() / "config.json"
    config.write_text(config.read_text().replace('"seed": 0', '"seed": 1'))
    err = here.refused("config", "runs/r", silent=True)
    assert "config.json was edited after the run was started (settings.seed: 0 -> 1)" in err
