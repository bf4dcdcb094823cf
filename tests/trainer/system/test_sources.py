"""Find the source files that this process has loaded."""

import hashlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from trainer.system.sources import loaded_sources, located_sources


def test_a_class_can_change_during_the_search(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The thread that saves may import a module while the classes are searched."""

    class Searched:
        pass

    class AddsAnAttribute:
        @property
        def __class__(self) -> type:
            Searched.added = True  # type: ignore[attr-defined]
            return AddsAnAttribute

    Searched.first = AddsAnAttribute()  # type: ignore[attr-defined]
    module = ModuleType("searched_module")
    file = tmp_path / "searched_module.py"
    file.write_text("a file of the user's")
    vars(module).update(__file__=str(file), Searched=Searched)
    monkeypatch.setitem(sys.modules, module.__name__, module)

    assert loaded_sources()[module.__name__] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert vars(Searched)["added"]


def test_a_module_of_nested_namespace_packages_is_located_without_an_import(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "outer_space" / "inner_space" / "module.py"
    file.parent.mkdir(parents=True)
    file.write_text("COUNT = 1")
    monkeypatch.syspath_prepend(tmp_path)
    name = "outer_space.inner_space.module"
    assert located_sources([name]) == {name: hashlib.sha256(b"COUNT = 1").hexdigest()}
    assert "outer_space" not in sys.modules
