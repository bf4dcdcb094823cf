"""The fixtures that many tests use."""

from tests.support.commands import trainbox
from tests.support.ranks import forks, ranks

__all__ = ["forks", "ranks", "trainbox"]
