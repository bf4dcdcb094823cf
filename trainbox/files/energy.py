"""The energy of a run, from two readings of its GPUs' counters in each start."""

from collections.abc import Mapping
from typing import Any

ENERGY = "energy_kwh"  # in the manifest
_JOULES_PER_KWH = 3.6e6


def with_energy(manifest: Mapping[str, Any], begin_j: float, end_j: float) -> dict[str, Any]:
    """Return the manifest with the energy of this start added to the earlier starts' energy.

    The energy is None if it was not measured in each of them.

    Args:
        manifest: the manifest of the run.
        begin_j: the sum of all GPUs' counters at the begin of this start, or NaN.
        end_j: the sum at the end. It is smaller if a counter was reset.
    """
    earlier, used_j = manifest.get(ENERGY, 0.0), end_j - begin_j
    is_known = isinstance(earlier, int | float) and used_j >= 0
    return {**manifest, ENERGY: earlier + used_j / _JOULES_PER_KWH if is_known else None}


def energy_row(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the row for the end of a run, which has none on the CPU."""
    if ENERGY not in manifest:
        return {}
    kwh = manifest[ENERGY]
    return {"energy": f"{kwh:.4g} kWh" if isinstance(kwh, int | float) else "not measured"}
