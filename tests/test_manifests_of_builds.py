"""The manifests of trainings and scripts have the digests of the locks."""

import hashlib
import sys
from pathlib import Path

import pytest

from deploy.extra.requirements import RECORD
from entrypoint.script import manifest as manifest_of_a_script
from entrypoint.script.target import Target
from trainer.records import manifest


def test_the_manifest_has_the_digest_of_the_lock_of_added_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(manifest.__file__).parents[2]
    locked = hashlib.sha256((root / "requirements.lock").read_bytes()).hexdigest()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    found = manifest._build.__wrapped__()
    assert (found["lock_sha256"], found["extra_lock_sha256"]) == (locked, None)
    (tmp_path / RECORD).write_text("einops==0.8.2")
    digest = hashlib.sha256(b"einops==0.8.2").hexdigest()
    baked = tmp_path / "build-info.json"
    baked.write_text('{"revision": "r", "lock_sha256": "l"}')
    monkeypatch.setenv("TRAINBOX_BUILD_INFO", str(baked))
    expected = {"revision": "r", "lock_sha256": "l", "extra_lock_sha256": digest}
    assert manifest._build.__wrapped__() == expected
    (tmp_path / "train.py").touch()
    script = Target(str(tmp_path / "train.py"), ())
    env = {"TRAINBOX_BUILD_INFO": str(baked)}
    assert manifest_of_a_script.describe(script, env)["build"] == expected
    (tmp_path / RECORD).unlink()
    build = manifest_of_a_script.describe(script, env)["build"]
    assert build == expected | {"extra_lock_sha256": None}
