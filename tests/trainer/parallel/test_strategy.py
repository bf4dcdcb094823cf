"""The strategy that the launcher has set."""

import pytest

from trainbox.processes.environment import Internal, LaunchFacts
from trainer.parallel.strategy import launched_as


@pytest.mark.parametrize(
    ("requested", "by_torchrun", "name"),
    [
        (None, False, "single"),
        (None, True, "ddp"),
        ("single", True, "ddp"),
        ("dp", False, "dp"),
        ("dp", True, "ddp"),
        ("ddp", True, "ddp"),
        ("fsdp", True, "fsdp"),
    ],
)
def test_ranks_of_torchrun_use_no_strategy_of_one_process(
    monkeypatch: pytest.MonkeyPatch, requested: str | None, by_torchrun: bool, name: str
) -> None:
    variables = LaunchFacts(strategy=requested).variable() if requested else {}
    if by_torchrun:
        variables |= {"LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    for variable in (Internal.LAUNCH, "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert launched_as() == (name, 2 if by_torchrun else 1)
