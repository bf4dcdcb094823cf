"""Made-up texts for the task `text`."""

import random
from pathlib import Path

# The fields of the task `text` for a small training on the files of `write_texts`.
FIELDS = {"folder": "texts", "layers": 2, "heads": 2, "width": 16, "context": 16, "dropout": 0.1}
_WORDS = ("the", "model", "reads", "a", "byte", "and", "then", "it", "writes", "one")


def write_texts(folder: Path, count: int = 12) -> None:
    """Write `count` files of about 250 bytes in two folders; each depends only on its number."""
    for number in range(count):
        draw = random.Random(number)  # noqa: S311 - not a secret
        path = folder / "ab"[number % 2] / f"{number:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(" ".join(draw.choices(_WORDS, k=60)), encoding="utf-8")
