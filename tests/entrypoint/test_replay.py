"""The docker command that repeats a run."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from entrypoint.replay import docker_command, read_run
from tests.support.commands import Trainbox
from trainbox.contract.errors import WrongUse

_CONFINED = (
    "docker run --rm --user 1000:100 --read-only --cap-drop ALL --tmpfs "
    "/tmp:exec,mode=1777 --security-opt no-new-privileges "
    "--shm-size 8g --stop-timeout 60 "
)
_MOUNTS = "-v /w/runs:/workspace/runs -v /d:/workspace/data "
_AGAIN = (
    "-e TRAINBOX_IMAGE_DIGEST=sha256:abc sha256:abc train --config "
    "/workspace/runs/r/config.json --run r-replay"
)


@pytest.mark.parametrize(
    ("task", "device", "plan", "expected"),
    [
        (
            "digits",
            {"type": "cpu"},
            {"strategy": "ddp", "world_size": 2},
            _CONFINED + _MOUNTS + _AGAIN + " --device cpu --processes 2",
        ),
        (
            "digits",
            {"type": "cuda", "uuids": ["GPU-a", "GPU-b"]},
            {"strategy": "ddp", "world_size": 2},
            _CONFINED + "--gpus '\"device=GPU-a,GPU-b\"' " + _MOUNTS + _AGAIN,
        ),
        (
            "digits",
            {"type": "cuda", "uuids": ["GPU-a", "GPU-b"]},
            {"strategy": "dp", "world_size": 1},
            _CONFINED + "--gpus '\"device=GPU-a,GPU-b\"' " + _MOUNTS + _AGAIN + " --strategy dp",
        ),
        (
            "digits",
            {"type": "cpu"},
            {"strategy": "fsdp", "world_size": 2},
            _CONFINED + _MOUNTS + _AGAIN + " --strategy fsdp --device cpu --processes 2",
        ),
        (
            "my_tasks/gestures.py:Gestures",
            {"type": "cpu"},
            {"strategy": "single", "world_size": 1},
            _CONFINED
            + _MOUNTS
            + "-v /w/my_tasks:/workspace/my_tasks:ro "
            + _AGAIN
            + " --device cpu --processes 1",
        ),
        (
            "/home/u/my/t.py:T",
            {"type": "cpu"},
            {"strategy": "single", "world_size": 1},
            _CONFINED
            + _MOUNTS
            + "-v /home/u/my:/home/u/my:ro "
            + _AGAIN
            + " --device cpu --processes 1",
        ),
        (
            "../t.py:T",
            {"type": "cpu"},
            {"strategy": "single", "world_size": 1},
            _CONFINED + _MOUNTS + "-v /t.py:/t.py:ro " + _AGAIN + " --device cpu --processes 1",
        ),
        (
            "t.py:T",
            {"type": "cpu"},
            {"strategy": "single", "world_size": 1},
            _CONFINED
            + _MOUNTS
            + "-v /w/t.py:/workspace/t.py:ro "
            + _AGAIN
            + " --device cpu --processes 1",
        ),
    ],
)
def test_the_command(
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    device: dict[str, Any],
    plan: dict[str, Any],
    expected: str,
) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/w")
    manifest = {"device": device, "plan": plan, "image_digest": "sha256:abc"}
    assert (
        shlex.join(docker_command(Path("runs/r"), {"task": task}, manifest, Path("/d"), "1000:100"))
        == expected
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("manifest.json", b"[]", "manifest.json is damaged (not a JSON object)"),
        ("manifest.json", b"{}", "manifest.json is damaged (it has no plan)"),
        (
            "manifest.json",
            b'{"plan": {}, "device": []}',
            "manifest.json is damaged (it has no device)",
        ),
        ("manifest.json", b'{"a": "\xff"}', "manifest.json is damaged ('utf-8' codec"),
        ("config.json", b"[" * 99_999, "config.json is damaged (nested too deeply"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, text: bytes, message: str) -> None:
    for file in ("config.json", "manifest.json"):
        (tmp_path / file).write_bytes(text if file == name else b"{}")
    with pytest.raises(WrongUse) as refused:
        read_run(tmp_path)
    assert message in str(refused.value)


def test_the_command_is_printed_and_a_run_without_an_image_is_refused(trainbox: Trainbox) -> None:
    folder = trainbox.folder / "runs" / "r"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"task": "digits"}')
    manifest = {
        "device": {"type": "cpu"},
        "plan": {"strategy": "single", "world_size": 1},
        "image_digest": "sha256:abc",
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    printed = trainbox("verify", "runs/r", "--print-docker", "--data-dir", "/d")
    assert (printed.code, printed.err) == (0, "")
    arguments = shlex.split(printed.out)
    assert arguments[:3] == ["docker", "run", "--rm"]
    assert arguments[arguments.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    assert "/d:/workspace/data" in arguments
    (folder / "manifest.json").write_text(json.dumps(manifest | {"image_digest": None}))
    refused = trainbox("verify", "runs/r", "--print-docker")
    assert refused.code == 2
    assert refused.err.endswith("repeat it without docker with `trainbox verify runs/r`\n")
    (folder / "manifest.json").write_text(json.dumps(manifest | {"image_digest": "sif:abc"}))
    refused = trainbox("verify", "runs/r", "--print-docker")
    assert refused.code == 2
    assert "the Apptainer image sif:abc" in refused.err
    assert refused.err.endswith("deploy/apptainer/trainbox.sh verify runs/r\n")
    assert trainbox("verify", "runs/none", "--print-docker").code == 2
