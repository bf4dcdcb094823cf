"""The manifest has the digests of the locks."""

import hashlib
import sys
from pathlib import Path

import pytest

from trainer.records import manifest


def test_the_manifest_has_the_digest_of_the_lock_of_added_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(manifest.__file__).parents[2]
    locked = hashlib.sha256((root / "requirements.lock").read_bytes()).hexdigest()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    found = manifest._build.__wrapped__()
    assert (found["lock_sha256"], found["extra_lock_sha256"]) == (locked, None)
    (tmp_path / "extra.lock").write_text("einops==0.8.2")
    baked = tmp_path / "build-info.json"
    baked.write_text('{"revision": "r", "lock_sha256": "l"}')
    monkeypatch.setenv("TRAINBOX_BUILD_INFO", str(baked))
    assert manifest._build.__wrapped__() == {
        "revision": "r",
        "lock_sha256": "l",
        "extra_lock_sha256": hashlib.sha256(b"einops==0.8.2").hexdigest(),
    }
