"""Ask the driver for each value that Trainbox reads, and measure the time of each answer."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pynvml

from entrypoint.driver.nvml import Session
from entrypoint.driver.readers import READERS


def measure(device: str) -> Iterator[tuple[str, Any]]:
    """Yield (reading, {"value" or "code", "ms"}) for the first GPU."""
    found = Session().detect()
    yield "detection", {"value": str(found.broken or found.absent or found.driver_version)}
    if not found.gpus:
        return
    yield "gpu", {"value": repr(found.gpus[0])}
    whole = found.gpus[0].mig_parent or found.gpus[0].uuid
    handle = pynvml.nvmlDeviceGetHandleByUUID(whole)
    for name, read in READERS.items():
        yield name, _timed(lambda read=read: read(handle))  # type: ignore[misc]


def _timed(read: Callable[[], Any]) -> dict[str, Any]:
    begin = time.perf_counter()
    try:
        found: dict[str, Any] = {"value": str(read())}
    except pynvml.NVMLError as error:
        found = {"code": error.value, "value": str(error)}
    except Exception as error:  # noqa: BLE001 - the check reports it
        found = {"error": f"{type(error).__name__}: {error}"}
    return found | {"ms": round(1000 * (time.perf_counter() - begin), 2)}
