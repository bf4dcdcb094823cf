"""The files that a script opens, in the record of its run."""

import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from entrypoint.script.folder import ScriptFolder
from entrypoint.script.opened import is_reported
from entrypoint.script.sources import Sources
from entrypoint.script.target import Target
from tests.support.commands import Trainbox

# As nanoGPT does it.
_CONFIGURATOR = "import sys; exec(open(sys.argv[1]).read())\n"
_TRAIN = "exec(open('configurator.py').read())\nimport json, near\nprint(size)\n"


def _run(forked: Trainbox, *words: str, **env: str) -> tuple[dict[str, Any], str]:
    ended = forked("run", "--run", "r", *words, env=env)
    assert ended.code == 0, ended.err
    return json.loads((forked.folder / "runs/r/manifest.json").read_text()), ended.err


@pytest.fixture
def project(forked: Trainbox) -> Trainbox:
    """Return a `trainbox` in the folder of a project like nanoGPT."""
    (forked.folder / "train.py").write_text(_TRAIN)
    (forked.folder / "configurator.py").write_text(_CONFIGURATOR)
    (forked.folder / "config").mkdir()
    (forked.folder / "config/small.py").write_text("size = 3\n")
    (forked.folder / "near.py").write_text("")
    return forked


def _git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.example")
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def test_executed_files_are_recorded_with_their_text(project: Trainbox) -> None:
    manifest, _ = _run(project, "train.py", "config/small.py")
    names = ["config/small.py", "configurator.py", "near.py", "train.py"]
    assert sorted(manifest["sources"]) == names
    for name in names:
        text = (project.folder / name).read_bytes()
        assert manifest["sources"][name] == hashlib.sha256(text).hexdigest()
        assert (project.folder / "runs/r/sources" / name).read_bytes() == text


def test_the_copy_of_a_settings_file_has_no_secrets(project: Trainbox) -> None:
    settings = project.folder / "settings.yaml"
    settings.write_text(f"lr: 0.1\napi_key: abc-123-def\nids: {[*range(9000)]} api_key: abc-123\n")
    (project.folder / "train.py").write_text("open('settings.yaml').read()\n")
    manifest, _ = _run(project, "train.py")
    assert manifest["sources"]["settings.yaml"] == hashlib.sha256(settings.read_bytes()).hexdigest()
    copy = (project.folder / "runs/r/sources/settings.yaml").read_text()
    assert "lr: 0.1" in copy
    assert "abc-123-def" not in copy


@pytest.mark.parametrize("prefix", ["", "cache"])
def test_a_module_from_the_cache_of_python_is_recorded(
    project: Trainbox, tmp_path_factory: pytest.TempPathFactory, prefix: str
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    env = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache) if prefix else ""}
    for _ in range(2):
        shutil.rmtree(project.folder / "runs", ignore_errors=True)
        manifest, _ = _run(project, "train.py", "config/small.py", **env)
        assert "near.py" in manifest["sources"]
    assert list((cache if prefix else project.folder).rglob("near.*.pyc"))


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_an_untracked_source_makes_the_commit_dirty(project: Trainbox) -> None:
    folder = project.folder
    (folder / ".gitignore").write_text("runs\n__pycache__\n")
    _git(folder, "init", "-q")
    _git(folder, "add", ".gitignore", "train.py", "configurator.py", "near.py")
    _git(folder, "commit", "-q", "-m", "First")
    manifest, _ = _run(project, "train.py", "config/small.py")
    assert manifest["revision"].endswith("-dirty")
    assert set(manifest["sources"]) > {"train.py", "config/small.py"}
    found = [path for path in (folder / "runs/r/sources").rglob("*") if path.is_file()]
    assert found == [folder / "runs/r/sources/config/small.py"]  # the commit has the others
    _git(folder, "add", "config")
    _git(folder, "commit", "-q", "-m", "Second")
    manifest, _ = _run(project, "train.py", "config/small.py")
    assert len(manifest["revision"]) == 40


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize(
    ("library", "state"),
    [
        ("../library", ""),
        ("../library", "-dirty"),
        ("vendor/library", ""),  # such as a submodule
        ("../library", "no git"),
    ],
)
def test_each_repository_has_its_own_commit_and_state(
    project: Trainbox, tmp_path_factory: pytest.TempPathFactory, library: str, state: str
) -> None:
    folder, elsewhere = project.folder, tmp_path_factory.mktemp("elsewhere")
    other = folder / library if library.startswith("vendor") else elsewhere / "library"
    (other / "far").mkdir(parents=True)
    (other / "far/__init__.py").write_text("x = 1\n")
    (folder / "train.py").write_text("import far\n")
    (folder / ".gitignore").write_text("runs\nvendor\n__pycache__\n")
    for repository in [folder] if state == "no git" else [folder, other]:
        _git(repository, "init", "-q")
        _git(repository, "add", ".")
        _git(repository, "commit", "-q", "-m", f"The commit of {repository.name}")
    if state == "-dirty":
        (other / "far/__init__.py").write_text("x = 2\n")
    manifest, _ = _run(project, "train.py", PYTHONPATH=str(other))
    name = f"{library}/far/__init__.py" if other.parent.name == "vendor" else "far/__init__.py"
    assert set(manifest["sources"]) == {name, "train.py"}
    assert re.fullmatch("[0-9a-f]{40}", manifest["revision"])
    if state == "no git":
        assert "revisions" not in manifest
        assert (folder / "runs/r/sources" / name).exists()
    else:
        ((path, found),) = manifest["revisions"].items()
        assert (Path(path).name, found[40:]) == ("library", state)
        assert found[:40] != manifest["revision"]
        assert (folder / "runs/r/sources" / name).exists() == bool(state)


def test_a_file_that_was_changed_between_two_starts_is_named(project: Trainbox) -> None:
    _run(project, "train.py", "config/small.py")
    (project.folder / "config/small.py").write_text("size = 4\n")
    manifest, err = _run(project, "train.py", "config/small.py")
    assert "changed since the run's start: config/small.py\n" in err
    assert [start.get("changed") for start in manifest["starts"]] == [None, ["config/small.py"]]
    _, err = _run(project, "train.py", "config/small.py")
    assert "changed since" not in err
    path = project.folder / "runs/r/manifest.json"
    path.write_text(json.dumps(manifest | {"python": "3.8.0"}))
    manifest, err = _run(project, "train.py", "config/small.py")
    assert "changed since the run's start: python\n" in err
    assert manifest["starts"][-1]["changed"] == ["python"]


def test_what_a_child_process_opens_is_recorded(project: Trainbox) -> None:
    (project.folder / "go.sh").write_text('#!/bin/sh\nexec python3 train.py "$@"\n')
    (project.folder / "go.sh").chmod(0o755)
    manifest, _ = _run(project, "./go.sh", "config/small.py")
    assert set(manifest["sources"]) == {
        *("go.sh", "train.py", "configurator.py", "near.py", "config/small.py")
    }


def test_the_sitecustomize_of_the_user_still_runs(project: Trainbox) -> None:
    (project.folder / "lib").mkdir()
    (project.folder / "lib/sitecustomize.py").write_text("import sys; sys.first = 'custom'\n")
    code = "import sys, sitecustomize; print(sys.first, sitecustomize.__file__, *sys.path)"
    (project.folder / "train.py").write_text(code)
    ended = project("run", "train.py", env={"PYTHONPATH": str(project.folder / "lib")})
    first, file, *path = ended.out.split()
    assert (first, file) == ("custom", str(project.folder / "lib/sitecustomize.py"))
    assert path[:2] == [str(project.folder), str(project.folder / "lib")]
    assert not any("trainbox-script-" in folder for folder in path)


@pytest.mark.parametrize(
    ("path", "flags", "expected"),
    [
        ("/p/a.py", os.O_RDONLY, True),
        ("/p/conf/a.yaml", os.O_RDONLY | os.O_CLOEXEC, True),
        ("/p/a.yaml", os.O_WRONLY | os.O_CREAT, False),
        ("/p/data/a.bin", os.O_RDONLY, False),
        ("/p/.venv/lib/python3.9/json/__init__.py", os.O_RDONLY, False),
        ("/p/env/site-packages/x/a.py", os.O_RDONLY, False),
        ("/other/a.py", os.O_RDONLY, False),
        ("/other/events.out.tfevents.1", os.O_WRONLY | os.O_CREAT, True),
        ("/p/events.out.tfevents.1", os.O_RDONLY, False),
    ],
)
def test_which_files_are_reported(path: str, flags: int, expected: bool) -> None:
    assert is_reported(path, flags, ("/p/",)) == expected


def test_the_texts_are_limited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project, run, manifest = tmp_path / "p", tmp_path / "run", {"sources": dict[str, str]()}
    project.mkdir()
    for name, size in (("a.txt", 600_000), ("b.txt", 600_000), ("c.txt", 1), ("d.txt", 2_000_000)):
        (project / name).write_text("x" * size)
    folder = ScriptFolder(run, Target("a.py", ()), writes=True)
    sources = Sources(folder, [project, project], manifest)
    names = b"".join(f"{path}\0".encode() for path in sorted(project.iterdir()))
    sources.take(names[:20])
    sources.take(names[20:])
    sources.record()
    folder.close()
    assert sorted(manifest["sources"]) == ["a.txt", "b.txt", "c.txt"]  # d.txt is data
    assert [path.name for path in (run / "sources").iterdir()] == ["a.txt"]
    assert f"{run}/sources lacks b.txt and later files (more than 1 MiB)" in capsys.readouterr().err


def test_the_files_of_tensorboard_are_linked(project: Trainbox) -> None:
    (project.folder / "train.py").write_text("""
import os, pathlib
for folder in ("logs/version_0", os.environ["TRAINBOX_RUN"] + "/logs"):
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    pathlib.Path(folder, "events.out.tfevents.1.host").write_bytes(b"x")
""")
    _run(project, "train.py")
    link = project.folder / "runs/r/tensorboard/logs-version_0/events.out.tfevents.1.host"
    assert link.is_symlink() and not link.readlink().is_absolute()
    assert link.resolve() == project.folder / "logs/version_0/events.out.tfevents.1.host"
    # TensorBoard finds those in the run folder.
    assert [
        path.parent.name for path in (project.folder / "runs/r/tensorboard").rglob("*1.host")
    ] == ["logs-version_0"]
