"""A mirror on a server of S3, over connections that are cut.

The tests need the packages s3fs and moto[server], which Trainbox does not have. Install both in a
folder of their own, and name it in PYTHONPATH.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from tests.support.faults import GATED, Gate, SignalGate
from tests.support.nodes import free_port
from tests.support.ranks import Ranks
from trainer.run.mirror_storage import Storage

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("s3fs", "moto"))),
        reason="s3fs and moto are not installed",
    ),
]
ARGUMENTS = (*GATED, "--max-steps", "60", "--checkpoint-steps", "10", "--keep", "1")
MIRROR = ("--mirror", "s3://lab/runs")
KEY = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"


class Wire:
    """A proxy of the server whose connections a test cuts or holds."""

    def __init__(self, server_port: int) -> None:
        self.cut = self.held = False
        self.held_bytes = 0
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, *, cut: bool = False, held: bool = False) -> None:
        """Close all connections, and cut or hold new ones, or neither."""
        self.cut, self.held = cut, held
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.set(cut=True)
        for connection in self._open:
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.cut:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._open += [client, server]
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(2**16):
                if self.held:
                    self.held_bytes += len(data)
                else:
                    other.sendall(data)
            other.shutdown(socket.SHUT_WR)


@pytest.fixture
def wire(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Wire]:
    """Return the wire to a server that has the bucket `lab`."""
    port = free_port()
    with (tmp_path / "moto.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=log,
            stderr=log,
        )
    request.addfinalizer(server.wait)
    request.addfinalizer(server.kill)
    until(lambda: _listens(port))
    wire = Wire(port)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
        "AWS_SECRET_ACCESS_KEY": KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{wire.port}",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("lab")
    yield wire
    wire.close()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def complete() -> list[int]:
    return sorted(
        step for step, whole in Storage(MIRROR[1], Path("runs/r")).steps().items() if whole
    )


ENVIRONMENT = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"),
    *("NO_PROXY", "no_proxy"),
)


@pytest.fixture
def env(wire: Wire) -> dict[str, str]:
    return {name: os.environ[name] for name in ENVIRONMENT}


def test_a_killed_upload_leaves_the_checkpoint_before(
    ranks: Ranks, wire: Wire, env: dict[str, str]
) -> None:
    digest = ranks.train(1, *ARGUMENTS).digest
    shutil.rmtree(ranks.folder / "runs")
    before, during = Gate(ranks.folder, 15), Gate(ranks.folder, 25)
    training = ranks.start(1, "train", *ARGUMENTS, *MIRROR, env=env)
    before.wait_for(training)
    until(lambda: complete() == [10])
    wire.set(held=True)
    before.release()
    during.wait_for(training)
    until(lambda: wire.held_bytes > 1000)
    assert (ranks.folder / "runs/r/checkpoints/step-00000020.json").exists()
    training.send_signal(signal.SIGKILL)
    training.wait()
    during.release()
    wire.set()
    assert complete() == [10]
    shutil.rmtree(ranks.folder / "runs")
    resumed = ranks(1, "train", *ARGUMENTS, *MIRROR, env=env)
    assert resumed.code == 0, resumed
    assert "restored the checkpoint of step 10 from s3://lab/runs/r" in resumed.out
    assert resumed.digest == digest
    assert complete()[-1] == 60
    files = (ranks.folder / "runs").rglob("*.*")
    assert not any(KEY.encode() in path.read_bytes() for path in files if path.is_file())


def test_cut_connections_are_logged_once_and_the_training_continues(
    ranks: Ranks, wire: Wire, env: dict[str, str]
) -> None:
    digest = ranks.train(1, *ARGUMENTS).digest
    shutil.rmtree(ranks.folder / "runs")
    gates = [Gate(ranks.folder, step) for step in (15, 55)]
    training = ranks.start(1, "train", *ARGUMENTS, *MIRROR, env=env)
    gates[0].wait_for(training)
    until(lambda: complete() == [10])
    wire.set(cut=True)
    gates[0].release()
    gates[1].wait_for(training)
    until(lambda: "could not be copied" in training.printed("out")[0])
    wire.set()
    gates[1].release()
    ended = training.wait()
    assert ended.code == 0, ended
    assert ended.digest == digest
    assert ended.out.count("could not be copied") == 1
    assert "s3://lab/runs/r has the checkpoint of step 60; " in ended.out.splitlines()[-1]
    assert complete()[-1] == 60


@pytest.mark.parametrize("held", [False, True])
def test_a_stop_copies_the_last_checkpoint_within_its_limit(
    ranks: Ranks, wire: Wire, env: dict[str, str], held: bool
) -> None:
    gate = SignalGate(ranks.folder, 25)
    training = ranks.start(1, "train", *ARGUMENTS, *MIRROR, env=env)
    gate.wait_for(training)
    until(lambda: complete()[-1:] == [20])
    if held:
        wire.set(held=True)
    stopped_at_s = time.monotonic()
    training.send_signal(signal.SIGTERM)
    ended = training.wait()
    assert ended.code == 75, ended
    assert time.monotonic() - stopped_at_s < 45
    gate.release()
    assert ("the last copy was not finished in time" in ended.out) == held
    wire.set()
    assert complete()[-1] == (20 if held else 25)
    shutil.rmtree(ranks.folder / "runs")
    resumed = ranks(1, "train", *ARGUMENTS, *MIRROR, env=env)
    assert f"resume     from step {20 if held else 25}, " in resumed.out
