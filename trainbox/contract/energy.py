"""The energy of a run's GPUs: that of its earlier starts, from its manifest, and of this one."""

import math
from collections.abc import Mapping
from typing import Any

_JOULES_PER_KWH = 3.6e6


class Energy:
    """Adds the rise of each GPU's counter to the energy of earlier starts. NaN is unknown."""

    def __init__(self, earlier_j: Mapping[str, float]) -> None:
        self._earlier_j = earlier_j
        self._first_j: dict[str, float] = {}
        self._newest_j: dict[str, float] = {}
        self.used_j: dict[str, float] = {}  # in this start, by UUID

    def read(self, counters_j: Mapping[str, float]) -> None:
        """Follow the counters of the GPUs, by UUID."""
        for uuid, now in counters_j.items():
            first, newest = self._first_j.get(uuid, now), self._newest_j.get(uuid, now)
            # A counter that falls was reset, and what the GPU used before is not known.
            self._first_j[uuid] = math.nan if now < newest else first
            self._newest_j[uuid] = newest if math.isnan(now) else now
            self.used_j[uuid] = now - self._first_j[uuid]

    def recorded(self) -> dict[str, Any]:
        """Return the run's energy for its manifest. It is None if a start did not measure it."""
        joules = dict(self._earlier_j)
        for uuid, used_j in self.used_j.items():
            joules[uuid] = joules.get(uuid, 0.0) + used_j
        return {
            "kwh": _kwh(sum(joules.values())) if joules else None,
            "gpus": [{"uuid": uuid, "kwh": _kwh(value)} for uuid, value in joules.items()],
        }


def earlier_joules(manifest: Mapping[str, Any]) -> dict[str, float]:
    """Return the energy of the run's earlier starts by UUID, with NaN for what is not known.

    Raises:
        ValueError: The manifest has an energy that is not valid, as after an edit by hand.
    """
    try:
        gpus = manifest.get("energy", {"gpus": []})["gpus"]
        return {str(gpu["uuid"]): _joules(gpu["kwh"]) for gpu in gpus}
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError from error


def shown_kwh(kwh: float | None) -> str:
    return "not measured" if kwh is None else f"{kwh:.4g} kWh"


def _joules(kwh: Any) -> float:
    if kwh is None:
        return math.nan
    if type(kwh) not in (int, float) or not 0 <= (joules := kwh * _JOULES_PER_KWH) < math.inf:
        raise ValueError(kwh)
    return float(joules)


def _kwh(joules: float) -> float | None:
    return None if math.isnan(joules) else joules / _JOULES_PER_KWH
