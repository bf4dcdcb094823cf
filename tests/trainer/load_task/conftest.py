"""The fixture that writes task files."""

from tests.support.task_files import write

__all__ = ["write"]
