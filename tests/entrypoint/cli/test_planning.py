"""The health options of a launch, and the watch that they open."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import entrypoint.health.watch
from entrypoint.cli.planning import Launch, make_launch
from trainbox.contract.errors import Failure


def test_a_wrong_file_of_limits_is_refused_before_the_gpus_are_read(tmp_path: Path) -> None:
    values = {"health": True, "health_limits": tmp_path / "none.toml"}
    with pytest.raises(Failure, match=r"none\.toml cannot be read"):
        make_launch((), values, Mock(side_effect=AssertionError))


@pytest.mark.parametrize(
    ("health", "gpus", "is_watched"),
    [(True, ("GPU",), True), (False, ("GPU",), False), (True, (), False)],
)
def test_gpus_are_watched_or_the_driver_process_ends(
    monkeypatch: pytest.MonkeyPatch, health: bool, gpus: tuple[str, ...], is_watched: bool
) -> None:
    opened: list[tuple[Any, ...]] = []
    monkeypatch.setattr(entrypoint.health.watch, "watched", lambda *given: opened.append(given))
    driver, plan, limits = Mock(), Mock(gpus=gpus), Path("limits.toml")
    watch = Launch(plan, driver, health, limits).watch()
    assert (watch is not None, driver.close.called) == (is_watched, not is_watched)
    assert opened == []
    if watch is not None:
        watch("telemetry")
        assert opened == [(plan, driver, limits, "telemetry")]


def test_a_cpu_run_has_no_driver_process() -> None:
    assert Launch(Mock(gpus=()), None, health=True, health_limits=None).watch() is None
