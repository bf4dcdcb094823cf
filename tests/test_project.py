"""The files around the code agree with pyproject.toml and the Makefile."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

_ROOT = Path(__file__).parents[1]
_VERSION = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["version"]
_WORKFLOWS = sorted((_ROOT / ".github/workflows").glob("*.yml"))


def test_citation_has_the_version_of_the_project() -> None:
    assert yaml.safe_load((_ROOT / "CITATION.cff").read_text())["version"] == _VERSION


def test_changelog_has_a_section_for_the_version() -> None:
    headings = re.findall(r"^## (.*)", (_ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    form = rf"{re.escape(_VERSION)} - (unreleased|\d{{4}}-\d\d-\d\d)"
    assert any(re.fullmatch(form, line) for line in headings)


@pytest.mark.parametrize(
    "file", sorted((_ROOT / "deploy/kubernetes").glob("*/kustomization.yaml")), ids=str
)
def test_manifests_name_the_image_of_the_version(file: Path) -> None:
    images = yaml.safe_load(file.read_text()).get("images", [])
    assert {image["newTag"] for image in images} <= {_VERSION}


@pytest.mark.parametrize("file", _WORKFLOWS, ids=lambda file: file.name)
def test_workflows_pin_each_action_by_commit(file: Path) -> None:
    jobs = yaml.safe_load(file.read_text())["jobs"].values()
    actions = [step["uses"] for job in jobs for step in job.get("steps", []) if "uses" in step]
    assert actions
    assert [name for name in actions if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name)] == []


def test_workflows_call_targets_that_exist() -> None:
    files = (_ROOT / "Makefile", _ROOT / "deploy/development.mk")
    targets = set(re.findall(r"^([a-z-]+):", "".join(map(Path.read_text, files)), re.MULTILINE))
    called = {
        target
        for file in _WORKFLOWS
        for target in re.findall(r"\bmake ([a-z-]+)", file.read_text())
    }
    assert called
    assert called <= targets


@pytest.mark.parametrize(
    ("tag", "on_main", "error"),
    [
        (f"v{_VERSION}", True, ""),
        ("v9.9.9", True, f"tag v9.9.9 differs from the version {_VERSION}"),
        (f"v{_VERSION}", False, "is not on main: merge it first"),
    ],
)
def test_a_release_needs_the_tag_of_the_version_on_main(
    tmp_path: Path, tag: str, on_main: bool, error: str
) -> None:
    workflow = yaml.safe_load((_ROOT / ".github/workflows/image.yml").read_text())
    (script,) = (
        step["run"] for step in workflow["jobs"]["release"]["steps"] if step.get("id") == "project"
    )
    shutil.copy(_ROOT / "pyproject.toml", tmp_path)
    answer = "printf 'epoch=%s\\ncreated=%s\\n' 0 1970-01-01T00:00:00Z"
    (git := tmp_path / "git").write_text(
        f'#!/bin/sh\n[ "$1" != log ] || exec {answer}\nexit {0 if on_main else 1}\n'
    )
    git.chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_REF_NAME": tag,
        "GITHUB_REPOSITORY": "Some/Trainbox",
        "GITHUB_SHA": "abc",
    }
    ended = subprocess.run(
        ["bash", "-e", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert (ended.returncode, error in ended.stderr) == (1 if error else 0, True)
    if not error:
        assert (tmp_path / "output").read_text() == (
            f"version={_VERSION}\nimage=ghcr.io/some/trainbox\n"
            "epoch=0\ncreated=1970-01-01T00:00:00Z\n"
        )
