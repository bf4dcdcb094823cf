"""A mirror on a server of S3.

The test needs the packages s3fs and moto[server], which Trainbox does not have. Install both in a
folder of their own, and name it in PYTHONPATH.
"""

import importlib.util
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest

from tests.support.nodes import free_port
from tests.support.ranks import Ranks
from tests.support.tiny import TINY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("s3fs", "moto"))),
        reason="s3fs and moto are not installed",
    ),
]
KEY = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"


@pytest.fixture
def env(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> dict[str, str]:
    """Return the variables for a server that has the bucket `lab`."""
    port = free_port()
    with (tmp_path / "moto.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=log,
            stderr=log,
        )
    request.addfinalizer(server.wait)
    request.addfinalizer(server.kill)
    end_s = time.monotonic() + 60
    while not _listens(port):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    found = {
        "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
        "AWS_SECRET_ACCESS_KEY": KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("lab")
    return found


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_lost_run_resumes_from_its_mirror_on_s3(ranks: Ranks, env: dict[str, str]) -> None:
    words = ("train", TINY, "--run", "r", "--checkpoint-steps", "4", "--mirror", "s3://lab/runs")
    first = ranks(1, *words, env=env)
    assert first.code == 0, first
    assert "s3://lab/runs/r has the checkpoint of step 18" in first.out
    files = [path for path in (ranks.folder / "runs").rglob("*.*") if path.is_file()]
    assert not any(KEY.encode() in path.read_bytes() for path in files)
    shutil.rmtree(ranks.folder / "runs")
    storage = fsspec.filesystem("s3", skip_instance_cache=True)
    storage.rm("lab/runs/r/step-00000018/complete.json")
    second = ranks(1, *words, env=env)
    assert second.code == 0, second
    assert "restored the checkpoint of step 16 from s3://lab/runs/r" in second.out
    assert second.digest == first.digest
