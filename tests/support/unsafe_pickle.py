"""A value whose unpickling runs code."""

import os
from pathlib import Path
from typing import Any


class MakesFolder:
    """A value that makes the folder `marker` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)
