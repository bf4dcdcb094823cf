import pytest

from tests.support.faults import GATED, clean_digest
from tests.support.here import here  # noqa: F401 - a fixture


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of `GATED` when nothing happens to it, on one process."""
    return clean_digest(tmp_path_factory.mktemp("clean"), GATED)


@pytest.fixture(scope="session")
def clean_on_two(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same on two processes."""
    return clean_digest(tmp_path_factory.mktemp("clean-on-two"), (*GATED, "--processes", "2"))
