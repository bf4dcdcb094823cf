"""The files around the code agree with pyproject.toml and the Makefile."""

import re
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
    assert headings[0] == "Unreleased"
    assert any(
        re.fullmatch(rf"{re.escape(_VERSION)} - \d{{4}}-\d\d-\d\d", line) for line in headings
    )


@pytest.mark.parametrize(
    "file", sorted((_ROOT / "deploy/kubernetes").glob("*/kustomization.yaml")), ids=str
)
def test_manifests_name_the_image_of_the_version(file: Path) -> None:
    images = yaml.safe_load(file.read_text()).get("images", [])
    assert {image["newTag"] for image in images} <= {_VERSION}


@pytest.mark.parametrize("file", _WORKFLOWS, ids=lambda file: file.name)
def test_workflows_pin_each_action_by_commit(file: Path) -> None:
    steps = [
        step for job in yaml.safe_load(file.read_text())["jobs"].values() for step in job["steps"]
    ]
    actions = [step["uses"] for step in steps if "uses" in step]
    assert actions
    assert [
        name for name in actions if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", name)
    ] == []


def test_workflows_call_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (_ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {
        target
        for file in _WORKFLOWS
        for target in re.findall(r"\bmake ([a-z-]+)", file.read_text())
    }
    assert called
    assert called <= targets


def test_a_release_reads_the_version_that_the_tag_must_have() -> None:
    """The command of the workflow, which runs without Python, finds the version."""
    assert 's/^version = "\\(.*\\)"/\\1/p' in (_ROOT / ".github/workflows/image.yml").read_text()
    lines = re.findall(r'^version = "(.*)"', (_ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert lines == [_VERSION]
