from tests.support.here import here  # noqa: F401 - a fixture
from trainer.sweep.grid import Trial
from trainer.sweep.study import Study


def claimed(study: Study) -> Trial:
    """Claim the next trial, which must exist."""
    trial = study.claim()
    assert trial
    return trial
