"""A pytest plugin that runs the collected tests in forks: `-p tests.support.forked_workers`.

The workers of pytest-xdist import torch and collect all tests, each for itself. These workers are
forked after one collection. A few more workers run the tests marked `waits`, which use little CPU.
"""

import itertools
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tests.support.fork_server import load_all
from trainbox.processes.process_tree import die_with_parent

_NUMBER = 2  # bytes of a group's number in a queue
_WAITING = 4  # forks at most for the tests that wait
_ENDED = "ended"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--forks", type=int, default=0, help="The number of forks for the tests that need a core."
    )


def groups(items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
    """Return the tests that stay together: the tests of a file, which share fixtures.

    The tests of a file that wait are another group than the rest. A slow test is its own group,
    so that no worker is left with several of them.
    """
    found: list[list[pytest.Item]] = []
    for _, tests in itertools.groupby(items, lambda item: item.path):
        quick: dict[bool, list[pytest.Item]] = {}
        for item in tests:
            if item.get_closest_marker("slow"):
                found.append([item])
            else:
                quick.setdefault(_waits(item), []).append(item)
        found += quick.values()
    return found


def _waits(item: pytest.Item) -> bool:
    return item.get_closest_marker("waits") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in forks, which take group after group from a queue.

    The workers for tests that wait have a queue of their own.
    """
    option = session.config.option
    if option.forks < 1 or option.collectonly or session.testsfailed:
        return None  # pytest's own loop
    found = groups(session.items)
    waiting = [number for number, group in enumerate(found) if _waits(group[0])]
    others = [number for number in range(len(found)) if number not in waiting]
    queues = [_queue(others), _queue(waiting)]
    forks = [queues[0]] * option.forks + [queues[1]] * min(_WAITING, len(waiting))
    # The files of the workers alternate, so the lines of dots do not name them.
    session.config.pluginmanager.getplugin("terminalreporter").showfspath = False  # type: ignore[union-attr]
    # The folder of each worker is in the folder of this process.
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    sys.stdout.flush()
    load_all()
    workers: dict[Connection, int] = {}
    for number, queue in enumerate(forks):
        reading, writing = Pipe(duplex=False)
        with writing:
            if (pid := os.fork()) == 0:
                _work(session, number, writing, _claimed(found, queue))
        workers[reading] = pid
    try:
        finished = _follow(session, workers, queues)
    except BaseException:
        for pid in workers.values():
            os.kill(pid, signal.SIGTERM)
        raise
    finally:
        for pid in workers.values():
            os.waitpid(pid, 0)
        for queue in queues:
            os.close(queue)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    selected = Counter(item.nodeid for item in session.items)
    if wrong := (selected - finished) + (finished - selected):
        session.shouldfail = (
            f"{len(wrong)} of {len(selected)} tests did not end exactly once: {next(iter(wrong))}"
        )
        raise session.Failed(session.shouldfail)
    return True


def _queue(numbers: Iterable[int]) -> int:
    """Return a pipe from which workers read these numbers of groups."""
    queue, filled = os.pipe()
    os.write(filled, b"".join(number.to_bytes(_NUMBER) for number in numbers))
    os.close(filled)
    return queue


def _follow(
    session: pytest.Session, workers: Iterable[Connection], queues: Sequence[int]
) -> Counter[str]:
    """Pass the reports of the workers on until all have ended; return how often each test ended."""
    finished: Counter[str] = Counter()
    hook = session.config.hook
    running: dict[Connection, tuple[str, tuple[str, int | None, str]]] = {}
    open_ = set(workers)
    while open_:
        for ready in wait(list(open_)):
            assert isinstance(ready, Connection)
            try:
                kind, value = ready.recv()
            except EOFError:
                kind, value = "lost", None
            if kind == "report":
                report = hook.pytest_report_from_serializable(config=session.config, data=value)
                hook.pytest_runtest_logreport(report=report)
                if session.shouldfail:
                    _empty(queues)  # so that no worker begins another group
            elif kind == "start":
                running[ready] = value
                hook.pytest_runtest_logstart(nodeid=value[0], location=value[1])
            elif kind == "finish":
                finished[value[0]] += 1
                hook.pytest_runtest_logfinish(nodeid=value[0], location=value[1])
            else:
                open_.remove(ready)
                if kind != _ENDED:
                    hook.pytest_runtest_logreport(report=_lost(running.get(ready)))
    return finished


def _lost(last: tuple[str, tuple[str, int | None, str]] | None) -> pytest.TestReport:
    nodeid, location = last or ("tests", ("tests", None, "no test"))
    message = f"the worker ended during or after {nodeid}; its stack is above, if it crashed"
    return pytest.TestReport(nodeid, location, {}, "failed", message, "call")


def _empty(queues: Iterable[int]) -> None:
    for queue in queues:
        while os.read(queue, 4096):
            pass


def _claimed(found: list[list[pytest.Item]], queue: int) -> Iterator[pytest.Item]:
    """Yield the tests of each group that this worker takes from its queue."""
    while number := os.read(queue, _NUMBER):
        yield from found[int.from_bytes(number)]


class _Reports:
    """Sends what a worker's pytest reports."""

    def __init__(self, config: pytest.Config, writing: Connection) -> None:
        self._config, self._writing = config, writing

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._writing.send(("start", (nodeid, location)))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._writing.send(("finish", (nodeid, location)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._writing.send(("report", data))


def _work(
    session: pytest.Session, number: int, writing: Connection, items: Iterator[pytest.Item]
) -> NoReturn:
    """Run the tests in this fork, and end it."""
    code, own = 1, os.getpid()
    try:
        die_with_parent()
        _become_worker(session.config, number, writing)
        for item, after in itertools.pairwise(itertools.chain(items, [None])):
            assert item is not None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if session.shouldfail or session.shouldstop:
                break
        session._setupstate.teardown_exact(None)
        if os.getpid() == own:  # not the fork of a test that returned into pytest
            writing.send((_ENDED, None))
            code = 0
    except KeyboardInterrupt:
        pass  # the parent gets a Ctrl-C as well
    except BaseException:  # noqa: BLE001 - a fork must not return into its parent's code
        traceback.print_exc()
    finally:
        os._exit(code)


def _become_worker(config: pytest.Config, number: int, writing: Connection) -> None:
    """Give this fork files of its own, and let it send its reports instead of printing them."""
    plugins = config.pluginmanager
    capture = plugins.getplugin("capturemanager")
    assert capture is not None
    capture.stop_global_capturing()
    capture.start_global_capturing()
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"fork-{number}"
    factory._basetemp.mkdir(mode=0o700)
    # pytest-timeout writes the stacks of a test that hangs with this writer.
    writer = config.get_terminal_writer()
    plugins.unregister(name="terminalreporter")
    plugins.register(SimpleNamespace(_tw=writer), "terminalreporter")
    plugins.register(_Reports(config, writing))
