"""The end of a training in its manifest, as `trainbox runs` reads it."""

from entrypoint.runs.read import stored_runs
from tests.support.here import Here


def test_the_ends_of_real_trainings(here: Here) -> None:
    here.train("whole", max_steps=4)
    here.stopped(3, max_steps=8)
    found = {run.name: run for run in stored_runs(here.folder / "runs", False)}
    assert (found["whole"].state, found["whole"].step, found["whole"].steps) == ("complete", 4, 4)
    assert (found["r"].state, found["r"].step, found["r"].steps) == ("stopped", 3, 8)
    assert found["whole"].metric is not None
    here.train("r", max_steps=8)
    assert {run.state for run in stored_runs(here.folder / "runs", False)} == {"complete"}
