"""The fixtures that many tests use, and the time that a slow test has."""

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.support.commands import HIDDEN_GPUS, trainbox
from tests.support.forked import command_forks, forked
from tests.support.nvml_stub.build import library
from tests.support.ranks import forks, ranks
from trainbox.processes.process_tree import STOP_SIGNALS

__all__ = [
    "command_forks",
    "forked",
    "forks",
    "library",
    "ranks",
    "trainbox",
]

os.environ |= HIDDEN_GPUS  # for trainings in the process of the tests
gc.disable()  # until the end of the collection, which only adds modules and tests
collect_ignore = ["gpu"]  # the checks of `make test-gpu`, which have their own configuration


@pytest.fixture(autouse=True)
def _no_working_folder_of_an_earlier_task() -> None:
    """Each test has a working folder of its own, which a process of Trainbox does not change."""
    if loaded := sys.modules.get("trainer.load_task"):
        loaded._STARTED_IN.clear()


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """A command in the process of a test sets handlers, which the next test must not have."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # With the slow tests at the start, short ones are left for the end, and the workers finish at
    # about the same time.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    # A collection of garbage would look at all modules and tests again, which takes longer than
    # many a test.
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries warn about objects that are left at the end
