from collections.abc import Callable

import pytest

from tests.support.faults import GATED
from tests.support.here import here  # noqa: F401 - a fixture
from tests.support.ranks import Forks, ranks_in

DigestOf = Callable[..., str]


@pytest.fixture(scope="session")
def digest_of(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> DigestOf:
    """Return the digest of a training without a fault: `digest_of(PROCESSES, *ARGUMENTS)`."""

    def run(processes: int, *words: str) -> str:
        with ranks_in(forks, tmp_path_factory.mktemp("clean")) as ranks:
            return ranks.train(processes, *words).digest

    return run


@pytest.fixture(scope="session")
def clean(digest_of: DigestOf) -> str:
    """Return the digest of `GATED` without a fault on one process."""
    return digest_of(1, *GATED)


@pytest.fixture(scope="session")
def clean_on_two(digest_of: DigestOf) -> str:
    """Return the digest of `GATED` without a fault on two processes."""
    return digest_of(2, *GATED)
