"""Which Python runs a script, and what the manifest records of it."""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from entrypoint.script.python import Python, ask, choose_python
from tests.support.commands import Trainbox
from tests.support.kinds import slow_after
from trainbox.errors import WrongUse

_PRINTS = "import sys; print(sys.prefix)\n"


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a virtual environment with one package."""
    folder = tmp_path_factory.mktemp("other") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "only_here-1.2.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: only_here\nVersion: 1.2\n"
    (packages / "only_here-1.2.dist-info/METADATA").write_text(metadata)
    return folder


def _ran(forked: Trainbox, *words: str, **env: str) -> tuple[str, dict[str, Any]]:
    ended = forked("run", "--run", "r", *words, env=env)
    assert ended.code == 0, ended.err
    return ended.out.strip(), json.loads((forked.folder / "runs/r/manifest.json").read_text())


def test_a_first_line_changes_variables(forked: Trainbox, environment: Path) -> None:
    (forked.folder / "train.py").write_text(
        f"#!/usr/bin/env -S -u GONE SET=${{SEEN}}=1 {environment}/bin/python -X dev\n"
        "import os, sys; print(os.getenv('GONE'), os.getenv('SET'), sys.prefix, sys.flags.dev_mode)"
    )
    out, manifest = _ran(forked, "train.py", GONE="here", SEEN="x")
    assert out == f"None x=1 {environment} True"
    assert manifest["interpreter"] == {"path": "/usr/bin/env", "from": "first line"}
    assert manifest["packages"] == {"only_here": "1.2"}


@pytest.mark.parametrize("way", ["--python", "VIRTUAL_ENV", "first line"])
def test_the_python_of_the_user_runs_the_script_and_is_recorded(
    forked: Trainbox, environment: Path, way: str
) -> None:
    python = f"{environment}/bin/python"
    first_line = f"#!{python}\n" if way == "first line" else ""
    (forked.folder / "train.py").write_text(first_line + _PRINTS)
    options = ["--python", python] if way == "--python" else []
    env = {way: str(environment)} if way == "VIRTUAL_ENV" else {}
    out, manifest = _ran(forked, *options, "train.py", **env)
    assert out == str(environment)
    assert manifest["interpreter"] == {"path": python, "from": way}
    assert manifest["packages"] == {"only_here": "1.2"}
    assert manifest["python"] == ".".join(map(str, sys.version_info[:3]))


def test_the_python_of_a_shell_script_is_that_of_its_path(
    forked: Trainbox, environment: Path
) -> None:
    (forked.folder / "train.sh").write_text("#!/bin/sh\nexec python -c 'print(1)'\n")
    (forked.folder / "train.sh").chmod(0o755)
    path = f"{environment}/bin:{os.environ['PATH']}"
    _, manifest = _ran(forked, "./train.sh", PATH=path)
    assert manifest["interpreter"] == {"path": f"{environment}/bin/python", "from": "PATH"}
    assert manifest["packages"] == {"only_here": "1.2"}


@pytest.mark.slow
def test_several_processes_of_another_python_have_a_store_of_their_own(
    trainbox: Trainbox, environment: Path
) -> None:
    """The torch of the environment is this one, found through PYTHONPATH."""
    (trainbox.folder / "train.py").write_text("""
import torch, torch.distributed as dist, sys
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
print(int(total), sys.prefix)
dist.destroy_process_group()
""")
    (packages,) = Path(sys.prefix).glob("lib/python*/site-packages")
    ended = trainbox(
        *("run", "--processes", "2", "train.py"),
        env={"VIRTUAL_ENV": str(environment), "PYTHONPATH": str(packages)},
    )
    assert (ended.code, ended.out) == (0, f"3 {environment}\n" * 2), ended.err
    assert "did not call init_process_group" not in ended.err


@pytest.mark.parametrize("program", slow_after(1, ["train.py", "train.sh"]))
def test_processes_of_another_python_that_never_meet_are_named(
    trainbox: Trainbox, environment: Path, program: str
) -> None:
    (trainbox.folder / "train.py").write_text("print('trained')\n")
    (trainbox.folder / "train.sh").write_text(f"#!/bin/sh\nexec {environment}/bin/python train.py")
    (trainbox.folder / "train.sh").chmod(0o755)
    ended = trainbox("run", "--processes", "2", program, env={"VIRTUAL_ENV": str(environment)})
    assert (ended.code, ended.out) == (0, "trained\n" * 2), ended.err
    text = "the 2 processes did not call init_process_group, so each has trained alone: "
    assert ended.err.count(text) == 1


def test_the_order_of_the_choice(environment: Path, tmp_path: Path) -> None:
    python, line = f"{environment}/bin/python", f"#!{environment}/bin/python -X dev"
    (tmp_path / "python3").symlink_to(python)
    ours, path = Python(), {"PATH": str(tmp_path)}
    rows = [
        (choose_python(None, "", {}), ours),
        (choose_python(None, "", {"VIRTUAL_ENV": sys.prefix, "CONDA_PREFIX": "/conda"}), ours),
        (choose_python(None, line, {"VIRTUAL_ENV": sys.prefix}).command, (python, "-X", "dev")),
        (choose_python(None, "#!/usr/bin/env python3", path).command, (f"{tmp_path}/python3",)),
        (
            choose_python(None, "#!/usr/bin/env -S python3 -X name=1", path).command,
            (f"{tmp_path}/python3", "-X", "name=1"),
        ),
        (choose_python(None, line, {"CONDA_PREFIX": str(environment)}).origin, "CONDA_PREFIX"),
        (choose_python("python3", line, path | {"VIRTUAL_ENV": "/no"}).origin, "--python"),
        (choose_python(None, "#!/bin/sh", {}), ours),
    ]
    for found, expected in rows:
        assert found == expected


@pytest.mark.parametrize(
    ("wanted", "line", "env", "text"),
    [
        ("/no/python", "", {}, "--python /no/python: /no/python is not an executable file"),
        (None, "", {"VIRTUAL_ENV": "/no"}, "VIRTUAL_ENV /no: /no/bin/python is not an executable"),
        (None, "#!/no/python", {}, "the first line #!/no/python: /no/python is not an executable"),
        (
            None,
            '#!/usr/bin/python3 "x',
            {},
            'the first line #!/usr/bin/python3 "x names no program',
        ),
        (None, "#!/opt/python/env", {}, "the first line #!/opt/python/env names no program"),
    ],
)
def test_a_python_that_does_not_exist_is_refused(
    wanted: str | None, line: str, env: dict[str, str], text: str
) -> None:
    with pytest.raises(WrongUse) as refused:
        choose_python(wanted, line, env)
    assert text in str(refused.value)
    assert str(refused.value).endswith(": name a Python with --python")


def test_the_packages_are_those_that_python_finds(tmp_path: Path) -> None:
    def plain(packages: Mapping[str, str]) -> dict[str, str]:
        return {re.sub("[-_.]+", "-", name).lower(): packages[name] for name in packages}

    version, packages = ask(Python(), os.environ, None)
    assert version == platform.python_version()
    found = {found.name: found.version for found in importlib.metadata.distributions()}
    assert plain(packages) == plain(found)
    (tmp_path / "torch-0.1.dist-info").mkdir()
    _, packages = ask(Python(), {**os.environ, "PYTHONPATH": str(tmp_path)}, None)
    assert packages["torch"] == "0.1"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import os\n\nprint(\n", "line 3: '(' was never closed (Python "),
        ("x = 1\n  y = 2\n", "line 2: unexpected indent (Python "),
        (
            '"""A task."""\nimport os\nN: tuple = ("a", "b")\nclass Mine(int): ...\n',
            "only defines classes, such as Mine, so nothing would run: start a task with `train",
        ),
    ],
)
def test_a_script_that_would_not_run_is_not_started(
    forked: Trainbox, text: str, error: str
) -> None:
    (forked.folder / "train.py").write_text(text)
    ended = forked("run", "--processes", "2", "train.py")
    assert ended.code == 2
    assert error in ended.err and ended.err.startswith("trainbox: train.py")
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize(
    "last_line",
    ["Mine()", "if True: Mine()", "mine = Mine()", "@Mine\ndef main(): ...", "raise SystemExit"],
)
def test_a_script_with_a_class_runs(forked: Trainbox, last_line: str) -> None:
    begin = "class Mine:\n    def __init__(self, *_): print('ran')\n"
    (forked.folder / "train.py").write_text(f"{begin}{last_line}\n")
    assert forked("run", "train.py").code == 0


def test_a_python_that_does_not_answer_starts_the_script(forked: Trainbox) -> None:
    (forked.folder / "python").write_text(
        f'#!/bin/sh\ntest "$1" = -u && exec {sys.executable} "$@"'
    )
    (forked.folder / "python").chmod(0o755)
    (forked.folder / "train.py").write_text(_PRINTS)
    out, manifest = _ran(forked, "--python", "./python", "train.py")
    assert (out, manifest["python"], manifest["packages"]) == (sys.prefix, None, {})
