"""The numbers of an entry of metrics.jsonl, with the names that TensorBoard and trackers show."""

from collections.abc import Mapping
from typing import Any

_NOT_VALUES = {"kind", "step", "time_unix_s"}


def numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an entry as `kind/name`.

    The numbers of a list `name_each` are named `kind/name/0` and so on.
    """
    flat: dict[str, Any] = {}
    for name, value in entry.items():
        if name.endswith("_each") and isinstance(value, list):
            flat |= {f"{name.removesuffix('_each')}/{i}": each for i, each in enumerate(value)}
        elif name not in _NOT_VALUES:
            flat[name] = value
    kind = entry.get("kind", "train")
    return {
        f"{kind}/{tag}": number for tag, number in flat.items() if isinstance(number, int | float)
    }
