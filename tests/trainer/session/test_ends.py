"""The end of a training in its manifest, as `trainbox runs` reads it."""

from typing import Any

import pytest

from entrypoint.runs.read import stored_runs
from tests.support.here import Here
from tests.support.tiny import Tiny
from trainbox.errors import StorageFailure


def test_the_ends_of_real_trainings(here: Here) -> None:
    here.train("whole", max_steps=4)
    here.stopped(3, max_steps=8)
    found = {run.name: run for run in stored_runs(here.folder / "runs", False)}
    assert (found["whole"].state, found["whole"].step, found["whole"].steps) == ("complete", 4, 4)
    assert (found["r"].state, found["r"].step, found["r"].steps) == ("stopped", 3, 8)
    assert found["whole"].metric is not None
    here.train("r", max_steps=8)
    assert {run.state for run in stored_runs(here.folder / "runs", False)} == {"complete"}


@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
def test_a_training_whose_record_was_removed_does_not_succeed(here: Here, name: str) -> None:
    losses = Tiny.losses

    def removing(task: Tiny, model: Any, batch: Any) -> Any:
        (here.path() / name).unlink(missing_ok=True)
        return losses(task, model, batch)

    here.plant(losses=removing)
    with pytest.raises(StorageFailure, match=f"runs/r/{name} was removed while the run was trai"):
        here.train("r", max_steps=4)
