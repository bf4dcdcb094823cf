"""The default names of runs, which show their settings."""

from typing import Any

import pytest

from trainbox.options.config import Config
from trainer.session.default_name import name_of


@pytest.mark.parametrize(
    ("settings", "begin"),
    [
        ({}, "digits-"),
        ({"fields": {"width": 64}, "learning_rate": 0.003}, "digits-width64-lr0.003-"),
        ({"task": "my/tasks.py:Rings", "epochs": 3, "seed": 2}, "rings-epochs3-seed2-"),
        ({"precision": "bf16", "deterministic": False}, "digits-precisionbf16-deterministic=no-"),
        ({"freeze": ["stem", "layers.0"], "compile": True}, "digits-freezestem+layers.0-compile-"),
        ({"fields": {"folder": "/data/a b/c"}}, "digits-folder_data_a_b_c-"),
        ({"fields": {"text": "x" * 99, "n": 1}}, "digits-n1-"),
        ({"fields": {"api_key": "abc", "n": 1}}, "digits-n1-"),
    ],
)
def test_a_name_shows_the_settings(settings: dict[str, Any], begin: str) -> None:
    name = name_of(Config(**{"task": "digits", **settings}).identity())
    assert name.startswith(begin) and len(name) == len(begin) + 4


def test_a_name_is_never_long_and_differs_by_each_setting() -> None:
    fields = {f"field_{number}": number for number in range(20)}
    names = [name_of(Config(fields=fields | {"last": last}).identity()) for last in range(9)]
    assert len(set(names)) == 9
    assert max(map(len, names)) <= 52
