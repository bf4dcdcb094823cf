"""The fixtures that many tests use."""

from tests.support.commands import trainbox
from tests.support.forked import command_forks, forked
from tests.support.nvml_stub.build import library
from tests.support.ranks import forks, ranks

__all__ = ["command_forks", "forked", "forks", "library", "ranks", "trainbox"]
