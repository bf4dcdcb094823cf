"""A container that is removed takes its runs with it, unless they are in a mount."""

import json
from pathlib import Path

import pytest

from entrypoint.system import container
from entrypoint.system.container import lost_with_container
from tests.support.here import Here, here  # noqa: F401 - a fixture
from tests.support.tiny import TINY

_ROOT = "700 600 0:55 / / rw,relatime master:1 - overlay overlay rw,lowerdir=/a:/b"
_TMP = "710 700 0:60 / /tmp rw - tmpfs tmpfs rw"
_NAMED = "720 700 8:1 /volumes/v {} rw - ext4 /dev/sda1 rw"
_BOUND = "720 700 0:99 / {} rw - nfs4 server:/home rw,hard"


@pytest.mark.parametrize(
    ("mounts", "is_lost"),
    [
        ([_ROOT], True),
        ([_ROOT, _TMP], True),
        ([_ROOT, _TMP, _NAMED], False),
        ([_ROOT, _BOUND], False),
        (["700 600 8:1 / / rw - ext4 /dev/sda1 rw"], False),
        ([], False),
    ],
)
def test_runs_outside_of_a_mount_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounts: list[str], is_lost: bool
) -> None:
    runs = tmp_path / "workspace/runs"
    runs.mkdir(parents=True)
    file = tmp_path / "mountinfo"
    file.write_text("".join(f"{line.format(runs)}\n" for line in mounts))
    assert not lost_with_container(runs / "later", file)  # not in our image
    monkeypatch.setenv("TRAINBOX_BUILD_INFO", "/opt/trainbox/build-info.json")
    assert lost_with_container(runs / "later", file) == is_lost


def test_a_training_says_that_its_runs_are_lost(
    here: Here,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(container, "lost_with_container", lambda folder: folder.name == "runs")
    line = (
        f"trainbox: {here.folder}/runs is lost when this container is removed: keep the runs on "
        f'the host, as in `docker run -v "$PWD/runs:{here.folder}/runs" ...`\n'
    )
    code, _, err = here.command("train", "--device", "cpu", "--run", "r", TINY)
    assert (code, err.count(line)) == (0, 1)
    code, out, err = here.command("plan", "--device", "cpu", TINY)
    assert (code, err) == (0, "")
    json.loads(out)
