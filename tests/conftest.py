"""The fixture that nearly every test uses."""

from tests.support.commands import trainbox

__all__ = ["trainbox"]
