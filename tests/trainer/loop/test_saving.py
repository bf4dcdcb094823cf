"""When checkpoints are saved, and the memory that is reserved for them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.here import Here
from trainbox.errors import Stopped, WrongUse
from trainer.loop.saving import Saving
from trainer.system.signals import StopRequest

_UNUSED: Any = None


class _Parts:
    """The parts of a job that saving uses, which note their calls."""

    def __init__(self, gathers_states: bool) -> None:
        self.calls: list[str] = []
        self.strategy = SimpleNamespace(
            gathers_states=gathers_states, check_optimizer=self._noted("check_optimizer")
        )
        self.state = SimpleNamespace(
            optimizer=None, capture=self._noted("capture"), progress=SimpleNamespace(step=0)
        )
        self.checkpoints = SimpleNamespace(prepare=self._noted("prepare"))

    def check_hidden_state(self) -> None:
        """Pass, as if nothing had changed."""

    def check_unchanged(self) -> None:
        """Pass, as if nothing had changed."""

    def is_unchanged(self) -> bool:
        return True

    def _noted(self, name: str) -> Any:
        return lambda *_: self.calls.append(name)


@pytest.mark.parametrize(
    ("gathers_states", "calls"), [(False, ["capture", "prepare"]), (True, ["check_optimizer"])]
)
def test_shares_are_not_gathered_to_reserve_memory(gathers_states: bool, calls: list[str]) -> None:
    """The whole weights of a large model would be copied to the host and dropped."""
    job: Any = _Parts(gathers_states)
    Saving(job, StopRequest(), _UNUSED, _UNUSED).prepare()
    assert job.calls == calls


def test_an_optimizer_that_cannot_be_restored_is_refused_after_the_first_step() -> None:
    def refuse(_optimizer: Any) -> None:
        raise WrongUse("use another optimizer")

    job: Any = _Parts(gathers_states=True)
    job.strategy.check_optimizer = refuse
    with pytest.raises(WrongUse, match="use another optimizer"):
        Saving(job, StopRequest(), _UNUSED, _UNUSED).prepare()


def test_a_start_that_is_stopped_in_its_first_validation_has_saved_nothing_new(here: Here) -> None:
    """The scheduler must not start it again without a limit."""
    here.stopped(6, epochs=2)  # at the end of an epoch, before its validation
    stop = StopRequest()
    stop.signal_name = "SIGTERM"
    with pytest.raises(Stopped, match="SIGTERM at step 6 of 12, where this start began") as caught:
        here.train(epochs=2, stop=stop)
    assert caught.value.exit_code == 143
    end = json.loads(Path("runs/r/manifest.json").read_text())["end"]
    assert end["code"] == 143
