"""Trainings that rehearse their resume, as users' trainings do."""

import pytest

from tests.support.here import Here


@pytest.fixture
def here(here: Here) -> Here:
    here.rehearses = True
    return here
