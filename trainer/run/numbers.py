"""The numbers of an entry of metrics.jsonl, with the names that TensorBoard and trackers show."""

from collections.abc import Mapping
from typing import Any


def numbers(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among `values` as `kind/name`.

    The numbers of a list `name_each` are named `kind/name/0` and so on.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if name.endswith("_each") and isinstance(value, list):
            flat |= {f"{name.removesuffix('_each')}/{i}": each for i, each in enumerate(value)}
        else:
            flat[name] = value
    return {
        f"{kind}/{tag}": number for tag, number in flat.items() if isinstance(number, int | float)
    }
