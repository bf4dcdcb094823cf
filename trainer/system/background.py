"""Call what takes long or may never return, such as a broken driver or a server."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Call `work` in a thread with this name, which does not delay the end of the process."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer
