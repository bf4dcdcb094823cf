"""End a rank whose GPU waits for another process for too long.

gloo raises an error after its time limit, but only in a thread that waits for gloo. A thread that
waits for its own GPU learns nothing, and NCCL would abort the process without a message.
"""

import threading
import time
from collections.abc import Callable

import torch

from trainbox.errors import NetworkFailure
from trainer.system.report import end_with

_LOOKS = 60  # in the time limit


class GpuWatch:
    """A thread that exits with code 7 if work on a GPU does not end within a time limit.

    Attributes:
        stream: The stream of the training's work.
        recording: A lock that is held while a CUDA graph is recorded, so that the watch does not
            queue work on the stream of the recording.
    """

    def __init__(self, device: torch.device, limit_s: float) -> None:
        """Start to watch the default stream of `device`."""
        self.stream, self.recording = torch.cuda.default_stream(device), threading.Lock()
        self._device = device
        start_watch(self._record, limit_s)

    def _record(self) -> Callable[[], bool]:
        torch.cuda.set_device(self._device)
        event = torch.cuda.Event()
        with self.recording:
            event.record(self.stream)
        return event.query


def start_watch(record: Callable[[], Callable[[], bool]], limit_s: float) -> None:
    """Start a thread that exits with code 7 if recorded work does not end within `limit_s`.

    `record` marks the work that is queued now, and returns a function that returns whether this
    work is done.
    """
    threading.Thread(target=_watch, args=(record, limit_s), name="stalled", daemon=True).start()


def _watch(record: Callable[[], Callable[[], bool]], limit_s: float) -> None:
    try:
        while _ends(record(), limit_s):
            time.sleep(limit_s / _LOOKS)
    except RuntimeError:  # the GPU has failed, which the training itself reports
        return
    end_with(
        NetworkFailure(
            f"lost contact with another process: the GPU's work timed out after {limit_s:.0f} s, "
            "most likely because another process does not take part in an exchange"
        )
    )


def _ends(is_done: Callable[[], bool], limit_s: float) -> bool:
    """Return whether `is_done` becomes true within `limit_s`."""
    begin_s = time.monotonic()
    while not is_done():
        if time.monotonic() - begin_s > limit_s:
            return False
        time.sleep(limit_s / _LOOKS)
    return True
