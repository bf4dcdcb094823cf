"""Raise an error as a library does."""

from concurrent.futures import Future
from typing import Any, NoReturn


def raise_in_library(error: BaseException) -> NoReturn:
    """Raise `error` in a file of Python's own library, and not in a file of a task."""
    future = Future[Any]()
    future.set_exception(error)
    future.result()
    raise AssertionError
