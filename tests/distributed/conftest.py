"""The fixtures of several files of this folder."""

from tests.support.here import here
from tests.support.nodes import often, party

__all__ = ["here", "often", "party"]
