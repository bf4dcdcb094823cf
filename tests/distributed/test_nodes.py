"""Nodes that look for one another before they train."""

import socket
import subprocess
import sys

from tests.conftest import clean_environment

# torchrun's own part ends as it is told: what counts is what happens before, and what is made of its error.
_PROGRAM = """
import sys, time, torch.distributed.run as real
from trainer import torchrun
def run(arguments): {then}
def sleep(seconds): print("waits", flush=True); sys.stdin.readline()
real.run, torchrun.time.sleep = run, sleep
sys.argv = ["torchrun", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint={endpoint}",
            "--rdzv-conf=is_host={is_host},join_timeout={join_timeout_s}", "nothing.py"]
sys.exit(torchrun.main())
"""


def _start(endpoint: str, is_host: int, join_timeout_s: int, then: str = "print('met')") -> subprocess.Popen[str]:
    program = _PROGRAM.format(endpoint=endpoint, is_host=is_host, join_timeout_s=join_timeout_s, then=then)
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=clean_environment())


def _ended(node: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = node.communicate(timeout=120)
    return node.returncode, out.replace("waits\n", ""), err


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_node_waits_for_the_first_which_comes_late() -> None:
    port = _free_port()
    node = _start(f"127.0.0.1:{port}", 0, 60)
    assert node.stdout is not None
    assert node.stdout.readline() == "waits\n"
    with socket.create_server(("127.0.0.1", port)):
        assert _ended(node) == (0, "met\n", "")


def test_a_first_node_that_never_comes_is_named_after_the_join_timeout() -> None:
    endpoint = f"127.0.0.1:{_free_port()}"
    code, out, err = _ended(_start(endpoint, 0, 1))
    assert (code, out) == (7, "")
    assert err.startswith(f"trainbox: the nodes did not meet at {endpoint} ([Errno 111] Connection refused, for 1 s): ")
    assert len(err.splitlines()) == 1


def test_a_name_that_is_not_known_yet_is_waited_for_as_well() -> None:
    code, out, err = _ended(_start("nobody.invalid:29400", 0, 1))
    assert (code, out) == (7, "")
    assert "trainbox: the nodes did not meet at nobody.invalid:29400 ([Errno" in err


def test_the_first_node_waits_for_nobody() -> None:
    assert _ended(_start(f"127.0.0.1:{_free_port()}", 1, 60)) == (0, "met\n", "")


def test_a_node_that_comes_back_into_a_meeting_of_before_is_a_failure_of_the_network() -> None:
    """torch then waits in vain for what the others have said already, and ends with this error."""
    error = "torch.distributed.DistStoreError('wait timeout after 60000ms, keys: /torch.rendezvous.trainbox.1/MASTER_ADDR')"
    code, out, err = _ended(_start("127.0.0.1:1", 1, 60, f"import torch.distributed; raise {error}"))
    assert (code, out) == (7, "")
    assert err.startswith("trainbox: the nodes did not meet at 127.0.0.1:1 (wait timeout after 60000ms, keys: ")
    assert len(err.splitlines()) == 1
