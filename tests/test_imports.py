"""Who may import whom: read from the sources, and from what fresh processes have loaded."""

import ast
import graphlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.commands import clean_environment

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for package in ("entrypoint", "trainbox", "trainer")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.stem != "__init__"
}
FILES["trainbox"] = ROOT / "trainbox/__init__.py"

# Each package imports only packages before it in its line. Both programs share the first folders of
# `trainbox`, which do not need torch.
SHARED = "errors processes files options disclosure task_names folders commands"
ORDER = {
    "entrypoint": ("system driver launch runs bench health doctor script drill cli __main__"),
    "trainbox": (
        f"{SHARED} found_files tensor_trees ranks folder task_metrics metrics order schedules "
        "batches stop pinned plain_state tensor_files stored_checkpoints checkpoint_writer "
        "checkpoints pictures task classification initial_weights __main__"
    ),
    "trainer": (
        "system task_remedies task_errors task_fields load_task data parallel programs records "
        "loop checks measure session use sweep cli __main__"
    ),
}


# What tasks import.
_API = {
    f"trainbox{name}" for name in ("", ".initial_weights", ".metrics", ".pictures", ".found_files")
}


@cache
def imports(module: str) -> frozenset[str]:
    """Dotted names that the module imports anywhere, with what it takes out of them: `a.b` and
    `a.b.c`.
    """
    return frozenset(_imports(ast.parse(FILES[module].read_text()), module))


def _imports(tree: ast.Module, module: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}: imports are written in full"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ):
            yield f"torch.{node.attr}"  # `import torch` brings in torch.distributed, too


def importers(name: str) -> set[str]:
    return {
        module
        for module in FILES
        if any(f"{found}.".startswith(f"{name}.") for found in imports(module))
    }


def test_the_programs_do_not_import_each_other_and_the_ground_imports_neither() -> None:
    """The project of a script often has a `trainer` of its own, so its library needs no other."""
    for program, others in (
        ("trainer", ("entrypoint", "trainbox")),
        ("entrypoint", ("trainer", "trainbox")),
    ):
        found = {module for module in importers(program) if _of(f"{module}.", others)}
        assert found == set()


def test_what_both_programs_share_imports_only_itself_and_not_torch() -> None:
    packages = tuple(f"trainbox.{name}" for name in SHARED.split())
    shared = {module for module in FILES if _of(f"{module}.", packages)}
    assert {name for module in shared for name in _ours(module)} <= shared
    assert not {name for module in shared for name in _at_the_top(module)} & {"torch", "numpy"}


def _at_the_top(module: str) -> set[str]:
    """Return the libraries that the module imports when it is imported itself."""
    body = ast.Module(ast.parse(FILES[module].read_text()).body, [])
    top = [node for node in body.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return {name.partition(".")[0] for name in _imports(ast.Module(list(top), []), module)}


def test_no_modules_import_each_other_in_a_circle() -> None:
    # The public names of `trainbox` are imported when they are first used.
    graph = {module: _ours(module) - {module, "trainbox"} for module in FILES}
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_the_entrypoint_decides_without_torch() -> None:
    heavy = importers("torch") | importers("numpy") | importers("torchvision")
    assert {module for module in heavy if module.startswith("entrypoint.")} == set()


def test_each_library_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[^\w.-]", requirement)[0] for requirement in project["dependencies"]}
    owners = importlib.metadata.packages_distributions()
    imported = {name.partition(".")[0] for module in FILES for name in imports(module)}
    libraries = (
        imported - sys.stdlib_module_names - {"entrypoint", "trainbox", "trainbox_start", "trainer"}
    )
    assert {"PIL", "numpy", "torch"} <= libraries
    libraries -= {"onnxruntime"}  # the user installs them
    undeclared = {
        name
        for name in libraries
        if not {owner.lower().replace("_", "-") for owner in owners.get(name, [])} & declared
    }
    assert undeclared == set()


def test_tasks_import_only_the_public_api() -> None:
    tasks = {module for module in FILES if module.startswith("trainer.tasks.")}
    used = {name for task in tasks for name in imports(task) if name in FILES} - tasks
    assert used <= _API


def _ours(module: str) -> set[str]:
    """Return the modules of Trainbox that `module` imports."""
    return {name for name in imports(module) if name in FILES}


def _package(module: str) -> str:
    """Return `loop` for `trainer.loop.fit`, and `task` for `trainbox.task`."""
    return module.split(".")[1]


@pytest.mark.parametrize("root", ORDER)
def test_packages_import_downwards(root: str) -> None:
    order = {package: place for place, package in enumerate(ORDER[root].split())}
    packages = {_package(name) for name in FILES if name.startswith(f"{root}.")}
    assert packages - {"tasks"} == order.keys()
    upwards = [
        f"{module} imports {name}"
        for module in FILES
        if module.startswith(f"{root}.") and _package(module) in order
        for name in imports(module)
        if name.startswith(f"{root}.") and _package(name) in order
        if order[_package(name)] > order[_package(module)]
    ]
    assert upwards == []


def _of(module: str, packages: str | tuple[str, ...]) -> bool:
    packages = (packages,) if isinstance(packages, str) else packages
    return module.startswith(tuple(f"{package}." for package in packages))


# Each takes milliseconds of each command. `secrets` loads OpenSSL.
SLOW_MODULES = {"asyncio", "difflib", "secrets", "socket", "tempfile"}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("entrypoint.cli.commands", {"torch", "numpy", "trainer", "pynvml", *SLOW_MODULES}),
        ("trainbox", {"torch", "numpy", "trainer", "entrypoint", "multiprocessing"}),
        ("trainer.cli.commands", {"torch", "numpy", "torchvision", "tensorboard", "entrypoint"}),
        ("trainer.sweep.call", {"torch", "scipy", "matplotlib", "tensorboard", "entrypoint"}),
    ],
)
def test_a_fresh_process_does_not_load(module: str, absent: set[str]) -> None:
    program = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    loaded = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=clean_environment(),
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert module.partition(".")[0] in loaded
    assert set(loaded) & absent == set()


def test_a_plan_imports_no_other_command_and_no_slow_module() -> None:
    """The list leaves out what `import_module` loads: the module of the verb `plan`."""
    ended = subprocess.run(
        [sys.executable, "-P", "-X", "importtime", "-m", "entrypoint", "plan"],
        cwd=ROOT,
        env=clean_environment(),
        check=True,
        capture_output=True,
        text=True,
    )
    loaded = set(re.findall(r"^import time:.*\|\s+([\w.]+)$", ended.stderr, re.MULTILINE))
    commands = {name for name in loaded if name.startswith(("entrypoint.cli.", "trainer"))}
    assert commands == {f"entrypoint.cli.{name}" for name in ("commands", "planning", "verb")}
    assert loaded & {"hashlib", "subprocess", *SLOW_MODULES} == set()
