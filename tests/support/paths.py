"""The paths of the checkout and of the files that tests share."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parent


def files_of(folder: Path) -> list[Path]:
    """Return the files in `folder`, without Python's bytecode."""
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
