"""The network that NCCL uses between nodes, from stand-ins for /dev and /sys."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from entrypoint.system import infiniband
from entrypoint.system.infiniband import InfiniBand, read_infiniband

ACTIVE, DOWN = "4: ACTIVE\n", "1: DOWN\n"
TCP = "TCP, or over a plugin (no active port of InfiniBand or RoCE)"
MISSING = "libnone.so.1: cannot open shared object file: No such file or directory"


def add_port(root: Path, number: int, link_layer: str, state: str = ACTIVE) -> None:
    files = {
        f"dev/infiniband/uverbs{number}": "",
        f"sys/class/infiniband_verbs/uverbs{number}/ibdev": f"mlx5_{number}\n",
        f"sys/class/infiniband/mlx5_{number}/ports/1/link_layer": f"{link_layer}\n",
        f"sys/class/infiniband/mlx5_{number}/ports/1/state": state,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


# fmt: off
_NETWORKS = [
    ([("InfiniBand", ACTIVE)], {}, "InfiniBand (mlx5_0)"),
    ([("Ethernet", ACTIVE), ("Ethernet", ACTIVE)], {}, "RoCE (mlx5_0 mlx5_1)"),
    ([("InfiniBand", ACTIVE), ("Ethernet", ACTIVE), ("InfiniBand", DOWN)],
     {"NCCL_NET": "IB", "NCCL_IB_DISABLE": "0"}, "InfiniBand and RoCE (mlx5_0 mlx5_1)"),
    ([("Unspecified", ACTIVE)], {}, TCP),
    ([("InfiniBand", ACTIVE)], {"NCCL_IB_DISABLE": "1"}, "TCP (NCCL_IB_DISABLE=1)"),
    ([("InfiniBand", ACTIVE)], {"NCCL_NET": "Socket"}, "TCP (NCCL_NET=Socket)"),
    ([], {"NCCL_NET": "AWS Libfabric"}, "a plugin (NCCL_NET=AWS Libfabric)"),
]
# fmt: on


@pytest.mark.parametrize(("ports", "env", "network"), _NETWORKS)
def test_the_network_between_nodes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ports: list[tuple[str, str]],
    env: Mapping[str, str],
    network: str,
) -> None:
    monkeypatch.setattr(infiniband, "_LIBRARY", "libc.so.6")
    for number, port in enumerate(ports):
        add_port(tmp_path, number, *port)
    found = read_infiniband(env, tmp_path)
    assert (found.network, found.fault) == (network, "")
    # The devices of the host are visible in /sys of a container, also if it does not have them.
    for node in tmp_path.glob("dev/infiniband/*"):
        node.unlink()
    assert read_infiniband({}, tmp_path).network == TCP


def test_without_the_library_nccl_uses_tcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infiniband, "_LIBRARY", "libnone.so.1")
    assert read_infiniband({}, tmp_path) == InfiniBand()
    add_port(tmp_path, 0, "InfiniBand")
    found = read_infiniband({}, tmp_path)
    assert found.fault == MISSING
    assert found.network == f"TCP instead of InfiniBand (mlx5_0): {MISSING}"
    assert read_infiniband({"NCCL_IB_DISABLE": "1"}, tmp_path).fault == ""
