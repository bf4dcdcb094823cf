"""The strategy that the launcher has set."""

import pytest

from trainbox.contract.errors import WrongUse
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
    variables = {
        "TRAINBOX_STRATEGY": requested,
        "LOCAL_RANK": "0" if by_torchrun else None,
        "WORLD_SIZE": "2" if by_torchrun else None,
    }
    for variable, value in variables.items():
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    assert launched_as() == (name, 2 if by_torchrun else 1)


def test_an_unknown_strategy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINBOX_STRATEGY", "zero")
    with pytest.raises(WrongUse, match="^TRAINBOX_STRATEGY=zero does not exist: use single, ddp"):
        launched_as()
