"""A folder of a user never replaces an installed package, also not one without __init__.py."""

import importlib
import sys
from pathlib import Path

import pytest

from trainbox.task_names.task_spec import keep_namespaces


@pytest.mark.parametrize("own", ["namespace_of_many.py", "namespace_of_many/__init__.py"])
def test_an_installed_namespace_is_kept_before_a_module_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    installed, users = tmp_path / "installed", tmp_path / "users"
    (installed / "namespace_of_many").mkdir(parents=True)
    (installed / "namespace_of_many" / "part.py").write_text("WIDTH = 7\n")
    (users / own).parent.mkdir(parents=True)
    (users / own).write_text("raise SystemExit('a module of the user shadows a package')\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed), str(users)])
    monkeypatch.delitem(sys.modules, "namespace_of_many", raising=False)
    keep_namespaces(users)
    try:
        assert importlib.import_module("namespace_of_many.part").WIDTH == 7
    finally:
        for name in ("namespace_of_many", "namespace_of_many.part"):
            sys.modules.pop(name, None)
