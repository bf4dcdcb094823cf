"""The health options of a launch, and the watch that they open."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import entrypoint.health.gate
from entrypoint.cli.planning import Checked
from trainbox.contract.errors import Failure


def test_the_health_options_are_taken_from_the_others() -> None:
    options = {"health": False, "health_limits": None, "gpus": 2}
    assert Checked.take_from(options) == Checked(health=False, health_limits=None)
    assert options == {"gpus": 2}


def test_a_wrong_file_of_limits_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"none\.toml cannot be read"):
        Checked.take_from({"health": True, "health_limits": tmp_path / "none.toml"})


@pytest.mark.parametrize(
    ("health", "gpus", "is_watched"),
    [(True, ("GPU",), True), (False, ("GPU",), False), (True, (), False)],
)
def test_gpus_are_watched_or_the_driver_process_ends(
    monkeypatch: pytest.MonkeyPatch, health: bool, gpus: tuple[str, ...], is_watched: bool
) -> None:
    opened: list[tuple[Any, ...]] = []
    monkeypatch.setattr(entrypoint.health.gate, "watched", lambda *given: opened.append(given))
    driver, plan, limits = Mock(), Mock(gpus=gpus), Path("limits.toml")
    watch = Checked(health, limits, driver).watch(plan)
    assert (watch is not None, driver.close.called) == (is_watched, not is_watched)
    assert opened == []
    if watch is not None:
        watch("telemetry")
        assert opened == [(plan, driver, limits, "telemetry")]


def test_a_cpu_run_has_no_driver_process() -> None:
    assert Checked(health=True, health_limits=None).watch(Mock(gpus=())) is None
