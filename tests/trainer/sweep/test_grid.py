"""The definition of a sweep, and the options that give it."""

import math
from typing import Any

import pytest

from trainbox.errors import WrongUse
from trainbox.options.config import Config
from trainer.sweep.grid import Range, Sweep, Value, check, from_identity
from trainer.sweep.request import Convert, parse_grid, parse_range


def _as(*values: Value) -> Convert:
    """Return what converts each text to these values."""
    return lambda _given, name, _texts: (name, [*values])


_GRID = {"width": [4, 8], "learning_rate": [0.1, 0.2, 0.3]}


def test_each_combination_is_in_the_sweep_once_with_each_seed() -> None:
    sweep = Sweep(Config(seed=5), _GRID, seeds=4)
    assert sweep.total == 24
    trials = [(*sweep.point(number).values(), sweep.seed(number)) for number in range(sweep.total)]
    assert len(set(trials)) == 24
    assert {seed for *_, seed in trials} == {5, 6, 7, 8}
    # A quarter of the trials is the whole grid with one seed.
    assert {seed for *_, seed in trials[:6]} == {5}


def test_a_name_is_a_field_of_the_task_or_a_setting() -> None:
    config = Sweep(Config(fields={"noise": 0.5}), _GRID).trial_config(
        {"width": 8, "learning_rate": 0.2}, 7
    )
    assert (config.fields, config.learning_rate, config.seed) == (
        {"noise": 0.5, "width": 8},
        0.2,
        7,
    )


def test_more_seeds_resume_a_sweep_and_other_settings_start_another() -> None:
    one = Sweep(Config(), _GRID, seeds=2)
    assert one.identity() == Sweep(Config(), _GRID, seeds=9).identity()
    assert one.identity() != Sweep(Config(epochs=3), _GRID, seeds=2).identity()
    drawn = Sweep(Config(), {}, {"width": Range(1, 9)}, sampler="tpe", trials=5, metric="max:f1")
    assert drawn.total == 5
    assert from_identity(drawn.identity()).ranges == {"width": Range(1, 9)}
    assert from_identity(one.identity()).point(5) == one.point(5)


@pytest.mark.parametrize("text", ["width", "width=", "=4", "width=4,,8"])
def test_a_malformed_grid_is_refused(text: str) -> None:
    with pytest.raises(WrongUse, match=f"--grid {text}: write NAME=VALUE,VALUE"):
        parse_grid(text, _as())


@pytest.mark.parametrize("values", ["1:2", "1e-4:1e-1:log"])
def test_a_range_as_a_grid_is_answered_with_the_range(values: str) -> None:
    def of_a_number(given: str, *_: object) -> Any:
        raise WrongUse(f"{given}: it is not a number")

    with pytest.raises(WrongUse, match=f"--grid lr={values}: did you mean --range lr={values}, "):
        parse_grid(f"lr={values}", of_a_number)
    with pytest.raises(WrongUse, match="not a number"):
        parse_grid("lr=a:b", of_a_number)


def test_a_value_given_twice_is_refused() -> None:
    with pytest.raises(WrongUse, match="--grid lr=0.1,0.10: a value is given twice"):
        parse_grid("lr=0.1,0.10", _as(0.1, 0.1))
    assert parse_grid("x=1,true", _as(1, True)) == ("x", [1, True])


def test_a_range_has_two_ends_and_a_scale() -> None:
    assert parse_range("a=1e-4:1:log", _as(1e-4, 1.0)) == ("a", Range(1e-4, 1.0, log=True))
    assert parse_range("a=-3:3", _as(-3, 3)) == ("a", Range(-3, 3))
    for text in ("a=1", "a", "a=1:2:exp", "=1:2", "a=1:log"):
        with pytest.raises(WrongUse, match=f"--range {text}: write NAME=LOW:HIGH"):
            parse_range(text, _as())


@pytest.mark.parametrize(
    ("low", "high", "log", "text"),
    [
        (2, 1, False, "is empty: give a low end that is below the high end"),
        (math.nan, 1.0, False, "is not finite: give ends that are closer to each other"),
        (-1e308, 1e308, False, "is not finite: give ends that are closer to each other"),
        (0.0, 1.0, True, "is empty: give a low end that is below the high end, and above 0"),
        ("a", "b", False, "an end is not a number"),
        (False, True, False, "an end is not a number"),
    ],
)
def test_an_empty_range_is_refused(low: Any, high: Any, log: bool, text: str) -> None:
    with pytest.raises(WrongUse, match=text):
        parse_range("a=low:high" + log * ":log", _as(low, high))


def test_settings_free_at_a_resume_and_default_values_do_not_change_the_identity() -> None:
    assert Sweep(Config(log_steps=7), _GRID).identity() == Sweep(Config(), _GRID).identity()
    assert set(Sweep(Config(epochs=3), _GRID).identity()["config"]) == {"task", "epochs"}


# fmt: off
_SWEEPS = [
    (Sweep(Config(), {"a": [1]}, {"a": Range(1, 2)}),
     "a is given in --grid and in --range: remove one"),
    (Sweep(Config(), ranges={"a": Range(1, 2)}),
     "--range and --trials are for samplers that draw: add --sampler random"),
    (Sweep(Config(), {"a": [1, 2]}, seeds=10**11),
     "the sweep has 200,000,000,000 trials, more than 100,000: lower --seeds"),
    (Sweep(Config(), trials=10**6, sampler="tpe"), "has 1,000,000 trials"),
    (Sweep(Config(), trials=3), "--range and --trials are for samplers that draw"),
    (Sweep(Config(), pruner="median"), "compares trials by a metric: add --metric"),
    (Sweep(Config(), metric="least:loss"), "--metric least:loss: write the name of a metric"),
    (Sweep(Config(), {"a": [1]}, seeds=3, sampler="tpe"), "with --sampler tpe, set --trials N"),
    (Sweep(Config(), {"a": [1]}, sampler="random", trials=3),
     "--sampler random needs --trials N, --metric NAME"),
    (Sweep(Config(), {"a": [1, 2]}, {"b": Range(3, 5)}, 1, "tpe", 7, "max:f1"),
     "--trials 7 is more than the 6 combinations to draw from: lower --trials"),
]
# fmt: on


@pytest.mark.parametrize(("sweep", "text"), _SWEEPS)
def test_contradictory_options_are_refused(sweep: Sweep, text: str) -> None:
    with pytest.raises(WrongUse, match=text):
        check(sweep)
