"""Who may import whom: read from the sources, and from what fresh processes have loaded."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import clean_environment

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for package in ("entrypoint", "trainbox", "trainer")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.stem != "__init__"
}
FILES["trainbox"] = ROOT / "trainbox/__init__.py"

# A module imports from its own line and those above it. A new file needs a place here.
LAYERS = {
    "entrypoint": [
        "errors temporary streams hints children gpus cluster cgroup cpus options bench "
        "health.readings health.verdict health.secret_rule health.redaction",
        "nvml plan supervise replay health.limits health.xids",
        "driver drill bench_runs suggest health.rules health.node health.screen health.surroundings health.deep_cases",
        "health.check health.watch health.deep health.doctor_report",
        "health.monitor health.gate health.doctor health.cli",
        "cli",
        "__main__",
    ],
    "trainer": [
        "temporary run_files sources seeding digest metrics stopping errors elapsed hints storage secret secret_rule line "
        "streams environment",
        "batches buffers config compare compiler grid hardware seen bench optimizers task task_source task_checks task_errors",
        "evidence",
        "sharding attributes",
        "study",
        "results",
        "checkpoint meeting run running manifest evaluate losses distributed pictures classification shipped",
        "reduction device_tests torchrun splitting",
        "state selftest guard",
        "build fit log meter report trial trial_labels trial_validation shared_memory",
        "session",
        "worker sweep",
        "cli",
        "__main__",
    ],
}

# What only these import.
SOLE_IMPORTERS: dict[str, set[str]] = {
    "pynvml": {"entrypoint.nvml"},
    "optuna": {"trainer.study"},
    "torch.distributed": {"trainer.distributed", "trainer.sharding", "trainer.torchrun"},
    "torch.utils.tensorboard": {"trainer.run"},
    "tensorboard": {"trainer.run"},
    "prometheus_client": {"entrypoint.health.monitor"},
    "click": {"entrypoint.cli", "entrypoint.health.cli", "entrypoint.options", "trainer.cli"},
}


_API = {"trainbox", "trainbox.metrics", "trainbox.pictures"}


@cache
def imports(module: str) -> frozenset[str]:
    """Dotted names that the module imports anywhere, with what it takes out of them: `a.b` and `a.b.c`."""
    return frozenset(_imports(ast.parse(FILES[module].read_text()), module))


def _imports(tree: ast.Module, module: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}: imports are written in full"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield f"torch.{node.attr}"  # `import torch` brings in torch.distributed, too


def importers(name: str) -> set[str]:
    return {module for module in FILES if any(f"{found}.".startswith(f"{name}.") for found in imports(module))}


def test_the_packages_do_not_know_each_other() -> None:
    assert {module for module in importers("trainer") if module.startswith("entrypoint.")} == set()
    assert {module for module in importers("entrypoint") if module.startswith("trainer.")} == set()


def test_both_packages_have_the_same_rule_of_what_is_a_secret() -> None:
    """Copy the file that you changed over the other one."""
    ours, theirs = (ROOT / folder / "secret_rule.py" for folder in ("entrypoint/health", "trainer"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_the_entrypoint_decides_without_torch() -> None:
    heavy = importers("torch") | importers("numpy") | importers("torchvision")
    assert {module for module in heavy if module.startswith("entrypoint.")} == set()


@pytest.mark.parametrize("name", SOLE_IMPORTERS)
def test_a_library_has_one_place(name: str) -> None:
    assert importers(name) == SOLE_IMPORTERS[name]


def test_each_library_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[^\w.-]", requirement)[0] for requirement in project["dependencies"]}
    owners = importlib.metadata.packages_distributions()
    imported = {name.partition(".")[0] for module in FILES for name in imports(module)}
    libraries = imported - sys.stdlib_module_names - {"entrypoint", "trainbox", "trainer"}
    assert {"PIL", "numpy", "scipy", "torch"} <= libraries
    undeclared = {
        name for name in libraries if not {owner.lower().replace("_", "-") for owner in owners.get(name, [])} & declared
    }
    assert undeclared == set()


def test_nothing_imports_the_tasks_but_tasks() -> None:
    assert {module for module in importers("trainer.tasks") if not module.startswith("trainer.tasks.")} == set()


def test_tasks_import_only_the_public_api() -> None:
    tasks = {module for module in FILES if module.startswith("trainer.tasks.")}
    used = {name for task in tasks for name in imports(task) if name in FILES} - tasks
    assert used <= _API


def test_only_tasks_import_the_public_api() -> None:
    assert {module for module in importers("trainbox") - _API if not module.startswith("trainer.tasks.")} == set()


def test_the_public_api_re_exports_what_a_task_needs() -> None:
    used = {name for module in _API for name in imports(module) if name in FILES} - _API
    assert used == {"trainer.classification", "trainer.errors", "trainer.metrics", "trainer.pictures", "trainer.task"}


@pytest.mark.parametrize("package", LAYERS)
def test_every_module_has_its_layer(package: str) -> None:
    placed = [f"{package}.{name}" for layer in LAYERS[package] for name in layer.split()]
    found = [name for name in FILES if name.startswith(f"{package}.") and not name.startswith("trainer.tasks.")]
    assert sorted(placed) == sorted(found)


@pytest.mark.parametrize("package", LAYERS)
def test_modules_import_downwards(package: str) -> None:
    layer_of = {f"{package}.{name}": depth for depth, layer in enumerate(LAYERS[package]) for name in layer.split()}
    upwards = [
        f"{module} imports {name}"
        for module, depth in layer_of.items()
        for name in imports(module)
        if layer_of.get(name, 0) > depth
    ]
    assert upwards == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("entrypoint.cli", {"torch", "numpy", "trainer"}),
        ("trainbox", {"torch", "numpy", "torchvision", "tensorboard", "entrypoint", "PIL"}),
        ("trainer.cli", {"torch", "numpy", "torchvision", "tensorboard", "entrypoint"}),
    ],
)
def test_a_fresh_process_does_not_load(module: str, absent: set[str]) -> None:
    program = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=clean_environment(), check=True, capture_output=True, text=True
    ).stdout.split()
    assert module.partition(".")[0] in loaded
    assert set(loaded) & absent == set()
