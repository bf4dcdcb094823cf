"""The packages in the manifest of a script."""

import importlib.metadata
import sys
from pathlib import Path

from entrypoint.script.python import packages


def test_the_packages_are_those_that_python_finds(tmp_path: Path) -> None:
    expected = {found.name: found.version for found in importlib.metadata.distributions()}
    assert packages(sys.path) == expected
    own = tmp_path / "torch-0.1.dist-info"
    own.mkdir()
    (own / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.1\n\nName: no\n")
    assert packages([str(tmp_path), *sys.path]) == expected | {"torch": "0.1"}
