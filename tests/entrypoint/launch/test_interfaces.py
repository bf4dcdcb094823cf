"""Interfaces that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name."""

import socket

import pytest

from entrypoint.launch.interfaces import refuse_unknown_interface
from tests.support.commands import Trainbox
from trainbox.errors import WrongUse


@pytest.mark.parametrize(
    ("name", "given", "is_known"),
    [
        ("GLOO", "eth0", True),
        ("GLOO", "eth0,ib0", True),
        ("GLOO", "eth", False),
        ("GLOO", "eth1", False),
        ("GLOO", "eth0,eth1", False),
        ("GLOO", "", True),
        ("NCCL", "eth", True),
        ("NCCL", "=eth", False),
        ("NCCL", "=ib0", True),
        ("NCCL", "^docker,lo", True),
        ("NCCL", "ens,ib", True),
        ("NCCL", "bond", False),
    ],
)
def test_an_interface_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, name: str, given: str, is_known: bool
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])
    env = {f"{name}_SOCKET_IFNAME": given}
    if is_known:
        refuse_unknown_interface(env, uses_nccl=True)
        return
    with pytest.raises(WrongUse) as refused:
        refuse_unknown_interface(env, uses_nccl=True)
    assert str(refused.value) == (
        f"{name}_SOCKET_IFNAME={given} is no interface of this machine: set one of lo, eth0, ib0, "
        "or unset the variable"
    )
    if name == "NCCL":
        refuse_unknown_interface(env, uses_nccl=False)


def test_only_a_launch_whose_ranks_use_an_interface_is_refused(forked: Trainbox) -> None:
    env = {"GLOO_SOCKET_IFNAME": "no0"}
    (forked.folder / "train.py").write_text("")
    two = [
        "plan",
        "--device",
        "cpu",
        "--nnodes",
        "2",
        "--node-rank",
        "0",
        "--rdzv-endpoint",
        "localhost:29400",
    ]
    of_a_task = ["plan", "--device", "cpu", "--processes", "2"]
    for command in (two, of_a_task, ["plan", "run", *of_a_task[1:], "train.py"]):
        ended = forked(*command, env=env)
        assert (ended.code, ended.out) == (2, "")
        assert "GLOO_SOCKET_IFNAME=no0 is no interface of this machine: set one of lo" in ended.err
    assert forked("plan", "--device", "cpu", "--processes", "1", env=env).code == 0
