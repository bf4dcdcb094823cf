"""The import of Trainbox's package `trainer`, which only tasks need.

A project often has its own `trainer.py` beside its script. The functions for training scripts
therefore never import that name.
"""

import importlib.util
import sys
from pathlib import Path


def check_trainer() -> None:
    """Check that the name `trainer` is Trainbox's own package, without importing it.

    Raises:
        ImportError: it is another module, or it is missing.
    """
    module = sys.modules.get("trainer")
    spec = importlib.util.find_spec("trainer") if module is None else module.__spec__
    found = None if spec is None else spec.origin
    expected = Path(__file__).parents[1] / "trainer" / "__init__.py"
    if found is None and module is not None:
        found = getattr(module, "__file__", None)
    if found is None or Path(found).resolve() != expected.resolve():
        raise ImportError(
            f"{found or 'no file'} is imported as `trainer`, which is the name of Trainbox's own "
            "package with Task, Classification and pictures: rename your module, or do not use "
            "these names",
            name="trainer",
            path=found,
        )
