"""Check the values of a task's fields, which `--set` gives."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from trainbox import Task, WrongUse

FROM_1 = "a number from 1"
FROM_0 = "a number from 0"
SHARE = "a number between 0 and 1"
FROM_0_BELOW_1 = "a number from 0 to below 1"
_RANGES: Mapping[str, Callable[[Any], bool]] = {
    FROM_1: lambda value: value >= 1,
    FROM_0: lambda value: 0 <= value < math.inf,
    SHARE: lambda value: 0 < value < 1,
    FROM_0_BELOW_1: lambda value: 0 <= value < 1,
}


def check_fields(task: Task, wanted: str, *names: str) -> None:
    """Raise WrongUse if a field of `names` is not in the range `wanted`, such as `FROM_1`."""
    for name in names:
        value = getattr(task, name)
        if not _RANGES[wanted](value):
            raise WrongUse(f"--set {name}={value}: use {wanted}")
