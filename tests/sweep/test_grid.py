"""What a sweep consists of, from its options."""

import pytest

from trainer.config import Config
from trainer.errors import WrongUse
from trainer.grid import Range, Sweep, check, from_identity, parse_grid, parse_range

_GRID = {"width": [4, 8], "learning_rate": [0.1, 0.2, 0.3]}


def test_every_combination_comes_once_with_each_seed() -> None:
    sweep = Sweep(Config(seed=5), _GRID, seeds=4)
    assert sweep.total == 24
    trials = [(*sweep.point(number).values(), sweep.seed(number)) for number in range(sweep.total)]
    assert len(set(trials)) == 24
    assert {seed for *_, seed in trials} == {5, 6, 7, 8}
    assert {seed for *_, seed in trials[:6]} == {5}  # what is there after a quarter of the time is the whole grid


def test_fields_and_settings_land_where_they_belong() -> None:
    config = Sweep(Config(fields={"noise": 0.5}), _GRID).trial_config({"width": 8, "learning_rate": 0.2}, 7)
    assert (config.fields, config.learning_rate, config.seed) == ({"noise": 0.5, "width": 8}, 0.2, 7)


def test_more_seeds_go_on_in_the_same_sweep_and_other_settings_begin_another() -> None:
    one = Sweep(Config(), _GRID, seeds=2)
    assert one.fingerprint() == Sweep(Config(), _GRID, seeds=9).fingerprint()
    assert one.fingerprint() != Sweep(Config(epochs=3), _GRID, seeds=2).fingerprint()
    drawn = Sweep(Config(), {}, {"width": Range(1, 9)}, sampler="tpe", trials=5, metric="max:f1")
    assert drawn.total == 5
    assert from_identity(drawn.identity()).ranges == {"width": Range(1, 9)}
    assert from_identity(one.identity()).point(5) == one.point(5)


@pytest.mark.parametrize("text", ["width", "width=", "=4", "width=4,,8"])
def test_a_grid_of_another_form_is_told(text: str) -> None:
    with pytest.raises(WrongUse, match=f"--grid {text}: write NAME=VALUE,VALUE"):
        parse_grid(text)


def test_a_value_given_twice_is_told() -> None:
    with pytest.raises(WrongUse, match="a value stands there twice"):
        parse_grid("width=4,8,4")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a=1:9", Range(1, 9)), ("a=-3:3", Range(-3, 3)), ("a=1e-4:1:log", Range(1e-4, 1, True)), ("a=0.5:2", Range(0.5, 2))],
)
def test_ranges(text: str, expected: Range) -> None:
    assert parse_range(text) == ("a", expected)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a=1", "write NAME=LOW:HIGH"),
        ("a=1:x", "write NAME=LOW:HIGH"),
        ("a=1:2:exp", "write NAME=LOW:HIGH"),
        ("a=2:1", "the low end must be below the high one"),
        ("a=nan:1", "the low end must be below the high one"),
        ("a=0:1:log", "the low end must be below the high one, and above 0"),
    ],
)
def test_a_range_that_holds_nothing_is_told(text: str, words: str) -> None:
    with pytest.raises(WrongUse, match=words):
        parse_range(text)


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        (Sweep(Config(), {"a": [1]}, {"a": Range(1, 2)}), "a stands in --grid and in --range: drop one"),
        (Sweep(Config(), ranges={"a": Range(1, 2)}), "--range and --trials are for --sampler random or tpe"),
        (Sweep(Config(), trials=3), "--range and --trials are for --sampler random or tpe"),
        (Sweep(Config(), pruner="median"), "--pruner median compares trials: say by what"),
        (Sweep(Config(), {"a": [1]}, seeds=3, sampler="tpe"), "--sampler tpe takes --trials N"),
        (Sweep(Config(), {"a": [1]}, sampler="random", trials=3), "--sampler random needs --trials N, --metric NAME"),
    ],
)
def test_contradictions_are_told(sweep: Sweep, words: str) -> None:
    with pytest.raises(WrongUse, match=words):
        check(sweep)
