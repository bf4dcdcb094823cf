"""Settings that contradict each other, settings that a resume may change, and config.json."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.here import Here
from tests.support.tiny import TINY
from trainbox.errors import WrongUse
from trainbox.options.config import (
    FREE_AT_RESUME,
    Config,
    check,
    config_in,
    differences,
    scaled_learning_rate,
    split_metric,
    warmup_then_cosine,
)
from trainbox.options.run_name import short_digest
from trainbox.options.types import NamedPath

# Another valid value for each setting.
OTHER: dict[str, Any] = {
    "task": "mnist",
    "fields": {"width": 3},
    "epochs": 4,
    "max_steps": 5,
    "batch_size": 6,
    "batch_size_per_gpu": 7,
    "learning_rate": 0.25,
    "lr_scaling": "linear",
    "base_batch_size": 8,
    "warmup_epochs": 0.5,
    "weight_decay": 0.125,
    "optimizer": "sgd",
    "init": "runs/a",
    "freeze": ["layer1"],
    "accumulation": 9,
    "precision": "bf16",
    "clip_norm": 10.0,
    "skip_nonfinite": 22,
    "eval_every": 11,
    "early_stopping": "loss",
    "patience": 12,
    "best_by": "min:loss",
    "checkpoint_steps": 13,
    "checkpoint_minutes": 14.0,
    "keep": 15,
    "log_steps": 16,
    "digest_steps": 21,
    "workers": 17,
    "seed": 18,
    "deterministic": False,
    "compile": True,
    "capture": "auto",
    "memory_format": "channels_last",
    "shards": 19,
    "threads": 20,
}


def test_each_setting_has_another_valid_value_here() -> None:
    assert list(OTHER) == [f.name for f in dataclasses.fields(Config)]


@pytest.mark.parametrize("name", OTHER)
def test_settings_that_are_free_at_a_resume_change_neither_the_name_nor_the_comparison(
    name: str,
) -> None:
    other = dataclasses.replace(Config(), **{name: OTHER[name]})
    free = name in {
        "workers",
        "checkpoint_steps",
        "checkpoint_minutes",
        "keep",
        "log_steps",
        "digest_steps",
        "capture",
    }
    assert free == (name in FREE_AT_RESUME)
    assert (Config().identity() == other.identity()) == free
    old = getattr(Config(), name)
    assert differences(Config(), other) == ([] if free else [f"{name}: {old} -> {OTHER[name]}"])
    assert differences(other, other) == []


def test_the_identity_is_the_same_for_the_same_settings() -> None:
    one, other = Config(fields={"a": 1, "b": 2}), Config(fields={"b": 2, "a": 1})
    assert one.identity() == other.identity()


def test_a_new_version_keeps_the_names_of_runs() -> None:
    """A start with another name would not resume a run of an earlier version."""
    assert short_digest(Config().identity()) == "23b0ac08"
    named = Config(task="mnist", epochs=3, workers=2)
    assert short_digest(named.identity()) == "bdf6c888"


# fmt: off
_SETTINGS = [
    ({"epochs": 3, "max_steps": 5}, "auto",
     "--epochs 3 and --max-steps 5 both set the length of the run: drop one"),
    ({"batch_size": 64, "batch_size_per_gpu": 32}, "auto",
     "--batch-size 64 (global) and --batch-size-per-gpu 32 both set the batch: drop one"),
    ({"precision": "fp16"}, "cpu",
     "--precision fp16 needs an NVIDIA GPU (the device is cpu): use fp32 or bf16"),
    ({"precision": "tf32"}, "mps", "--precision tf32 needs an NVIDIA GPU (the device is mps"),
    ({"best_by": "up:loss"}, "auto",
     "--best-by up:loss: write the name of a metric, or min:NAME or max:NAME"),
    ({"early_stopping": "min:"}, "auto", "--early-stopping min:: write the name of a metric"),
]
# fmt: on


@pytest.mark.parametrize(("settings", "device", "message"), _SETTINGS)
def test_contradictions_are_refused_with_a_remedy(
    settings: dict[str, Any], device: str, message: str
) -> None:
    with pytest.raises(WrongUse, match=re.escape(message)):
        check(Config(**settings), device)


@pytest.mark.parametrize(
    ("compiler", "triton", "device", "missing"),
    [
        (False, True, "cpu", "a C compiler, but PATH does not have one"),
        (True, False, "cuda", "the package triton on a GPU, but it is not installed"),
        (True, False, "cpu", ""),
        (True, True, "cuda", ""),
    ],
)
def test_compile_needs_its_compilers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiler: bool,
    triton: bool,
    device: str,
    missing: str,
) -> None:
    if compiler:
        (tmp_path / "gcc").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if triton else None)
    check(Config("digits"), device)
    if not missing:
        check(Config("digits", compile=True), device)
        return
    with pytest.raises(WrongUse) as refused:
        check(Config("digits", compile=True), device)
    assert str(refused.value).startswith(f"--compile needs {missing}: install it, build the im")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("accuracy", ("max", "accuracy")),
        ("loss", ("min", "loss")),
        ("squared_error", ("min", "squared_error")),
        ("perplexity", ("min", "perplexity")),
        ("val_rmse", ("min", "val_rmse")),
        ("min:accuracy", ("min", "accuracy")),
        ("max:loss", ("max", "loss")),
        ("lossless", ("max", "lossless")),
    ],
)
def test_a_metric_has_a_direction(text: str, expected: tuple[str, str]) -> None:
    assert split_metric(text, "--best-by") == expected


@pytest.mark.parametrize("text", ["", ":loss", "min:", "best:loss", "min:max:loss"])
def test_a_malformed_metric_is_refused(text: str) -> None:
    with pytest.raises(WrongUse, match="--best-by"):
        split_metric(text, "--best-by")


@pytest.mark.parametrize(
    ("scaling", "batch_size", "expected"),
    [
        ("none", 1024, 0.1),
        ("linear", 1024, 0.4),
        ("linear", 64, 0.025),
        ("sqrt", 1024, 0.2),
        ("sqrt", 64, 0.05),
    ],
)
def test_the_learning_rate_scales_with_the_batch(
    scaling: str, batch_size: int, expected: float
) -> None:
    assert scaled_learning_rate(0.1, scaling, batch_size, 256) == pytest.approx(expected)


def test_the_warm_up_is_linear_and_the_cosine_ends_at_0() -> None:
    factors = [warmup_then_cosine(step, 110, 10) for step in range(111)]
    assert factors[:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert factors[10] == 1.0
    assert factors[60] == pytest.approx(0.5)
    assert factors[35] == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert factors[110] == pytest.approx(0, abs=1e-12)
    assert all(a > b for a, b in zip(factors[10:], factors[11:], strict=False))
    assert warmup_then_cosine(0, 100, 0) == 1.0
    assert warmup_then_cosine(5, 5, 5) == 1.0  # only warm-up: no division by 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1, 2]", "is not a JSON object"),
        ('{"epoch": 3, "lr": 1}', "has an unknown setting (epoch): did you mean epochs?"),
        (
            '{"task": "digits", "train": {"epochs": 1}}',
            "is not like a run's config.json (train is an object): write an experiment as TOML",
        ),
        ('{"kind": "script", "script": "a.py"}', "is of a run of a script: the command in it"),
        ("\0", "is not JSON"),
    ],
)
def test_a_wrong_config_file_is_refused(here: Here, text: str, message: str) -> None:
    Path("c.json").write_text(text)
    assert f"--config c.json {message}" in here.refused("plan", "--config", "c.json", silent=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"fields": 5},
        {"shards": 0},
        {"learning_rate": float("nan")},
        {"optimizer": "adagrad"},
    ],
)
def test_a_config_file_with_a_wrong_value_exits_with_code_2_without_a_traceback(
    here: Here, settings: dict[str, Any]
) -> None:
    Path("c.json").write_text(json.dumps({"max_steps": 1} | settings))
    here.refused("train", TINY, "--config", "c.json", "--device", "cpu")


def test_config_on_a_runs_config_json_repeats_the_run(here: Here) -> None:
    arguments = ["--batch-size", "10", "--lr", "0.02", "--accumulation", "2", "--optimizer", "sgd"]
    arguments += ["--seed", "5", "--fast", "--set", "noise=0.5", "--epochs", "2"]
    arguments += ["--clip-norm", "1.5", "--device", "cpu"]
    here.succeeds("train", TINY, *arguments, "--run", "first")
    config = here.path("first") / "config.json"
    here.succeeds("train", "--config", str(config), "--device", "cpu", "--run", "second")
    assert (here.path("second") / "config.json").read_text() == config.read_text()
    assert here.digest("second") == here.digest("first")
    assert json.loads(config.read_text())["fields"] == {"noise": 0.5}


def test_the_folder_of_a_run_stands_for_its_config_json(here: Here) -> None:
    here.succeeds("train", TINY, "--max-steps", "3", "--device", "cpu", "--run", "first")
    again = ("--config", "runs/first", "--device", "cpu", "--run", "second")
    here.succeeds("train", *again)
    assert here.json("config.json", "second") == here.json("config.json", "first")
    Path("empty").mkdir()
    assert "--config empty/config.json does not exist: give an experiment" in here.refused(
        "plan", "--config", "empty", silent=True
    )
    assert "--config firs does not exist: did you mean runs/first?" in here.refused(
        "plan", "--config", "firs", silent=True
    )


def test_options_override_a_config_file(here: Here) -> None:
    first = ("--epochs", "1", "--set", "noise=0.5", "--device", "cpu", "--run", "first")
    here.succeeds("train", TINY, *first)
    config = ("--config", str(here.path("first") / "config.json"), "--device", "cpu")
    options = ("--epochs", "2", "--set", "noise=0.25", "--lr", "0.5", "--run", "second")
    here.succeeds("train", *config, *options)
    settings = here.json("config.json", "second")
    assert (settings["epochs"], settings["fields"], settings["learning_rate"]) == (
        2,
        {"noise": 0.25},
        0.5,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "0 is less than 1"),
        (["--lr", "inf"], "inf is not a finite number above 0"),
        (["--warmup-epochs", "-1"], "-1 is not a finite number from 0"),
        (["--seed", str(2**63)], f"is more than {2**63 - 1}"),
        (["--batch-size", "1e3"], "'1e3' is not a whole number"),
        (["--optimizer", "adagrad"], "'adagrad' is not one of"),
        (["--set", "noise"], "--set noise: write NAME=VALUE"),
        (["--set", "=3"], "--set =3: write NAME=VALUE"),
        (["--run", "../r"], "--run '../r' must be a folder name"),
        (["--epochs", "2", "--max-steps", "3"], "both set the length of the run"),
        (["--no-such-option"], "no such option --no-such-option"),
    ],
)
def test_a_wrong_option_exits_with_code_2_and_prints_one_line(
    here: Here, arguments: list[str], message: str
) -> None:
    assert message in here.refused("train", "digits", "--device", "cpu", *arguments, silent=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("keep", 3.5), ("keep", "3"), ("keep", None), ("workers", -1), ("log_steps", True)],
)
def test_a_wrong_number_in_a_stored_config_is_damage(name: str, value: Any) -> None:
    with pytest.raises(WrongUse) as failure:
        config_in({name: value}, Path("runs/r/config.json"))
    assert str(failure.value) == (
        f"runs/r/config.json is damaged ({name} is {value!r}, not a number from 0): restore it"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("workers", 0), ("workers", None), ("checkpoint_minutes", 0.5), ("checkpoint_minutes", 0)],
)
def test_a_stored_config_may_have_a_number_from_0(name: str, value: Any) -> None:
    config = config_in({name: value}, Path("runs/r/config.json"))
    assert getattr(config, name) == value


@pytest.mark.parametrize(
    ("given", "meant"), [("~/runs", "/home/me/runs"), ("~nobody-here/x", "~nobody-here/x")]
)
def test_a_tilde_in_a_path_is_the_home(
    monkeypatch: pytest.MonkeyPatch, given: str, meant: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert NamedPath("folder").convert(given, None, None) == Path(meant)
