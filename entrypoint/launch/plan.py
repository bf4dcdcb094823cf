"""The launch decision, a pure function from a request, the GPUs and the cluster to a plan."""

import ipaddress
import json
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from entrypoint.driver.gpus import Gpu, labels, select
from entrypoint.errors import HardwareMissing, InvalidRequest
from entrypoint.launch.cluster import DEFAULT_PORT, RDZV_TIMEOUT_S, Cluster
from entrypoint.system.architectures import without_code
from entrypoint.system.commands import command_of

_BY_TORCHRUN = ("ddp", "fsdp")


@dataclass(frozen=True)
class LaunchRequest:
    """The user's launch options; None for each that was not given.

    Attributes:
        argv: the module that each process runs and its arguments, such as `trainer train digits`.
        cpus: the number of CPUs that this container may use.
        gpus: a count, or "all".
        architectures: the GPU architectures that torch is built for; empty if they are not known.
    """

    argv: tuple[str, ...]
    python: str = "python"
    cpus: int = 1
    gpus: int | str | None = None
    gpu_ids: str | None = None
    strategy: str | None = None
    processes: int | None = None
    device: str | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_timeout_s: int = RDZV_TIMEOUT_S
    omp_num_threads: int | None = None
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaunchPlan:
    """The command to start: `argv`, with `env` added to the environment.

    `reason` explains the plan in one line.
    """

    strategy: str
    gpus: tuple[Gpu, ...]
    nnodes: int
    nproc_per_node: int
    argv: tuple[str, ...]
    reason: str
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Nodes:
    """The nodes of the training. With one node, `rank` is 0 and `endpoint` is empty."""

    count: int
    rank: int
    endpoint: str
    job_id: str
    # Under a scheduler, the endpoint's name may become known only later. Elsewhere, an unknown name
    # is an error.
    await_name: bool = False


def plan_launch(request: LaunchRequest, gpus: Sequence[Gpu], cluster: Cluster) -> LaunchPlan:
    """Return the plan for one training on the visible GPUs `gpus`.

    Raises:
        InvalidRequest: the request contradicts itself or cannot be launched.
        HardwareMissing: requested GPUs are missing. The plan never falls back to the CPU.
    """
    nodes = _nodes(request, cluster)
    chosen, choice = _choose_gpus(request, gpus, cluster)
    nproc = _processes(request, chosen, cluster)
    strategy = _strategy(request, chosen, nproc, nodes)
    _refuse_faults(chosen)
    _refuse_architectures(chosen, request.architectures)
    _refuse_mig_groups(chosen)
    return LaunchPlan(
        strategy=strategy,
        gpus=chosen,
        nnodes=nodes.count,
        nproc_per_node=1 if strategy == "dp" else nproc,
        argv=_argv(request, strategy, nproc, nodes),
        reason=(reason := _reason(strategy, chosen, gpus, choice, nproc, nodes, request)),
        env=_env(request, strategy, chosen, nproc, reason),
    )


def plan_sweep(request: LaunchRequest, gpus: Sequence[Gpu], per_gpu: int) -> LaunchPlan:
    """Return the plan for a sweep, whose slots each train one trial at a time.

    A slot is a CPU slot or one of the `per_gpu` slots of a GPU.

    Raises:
        InvalidRequest: the request contradicts itself.
        HardwareMissing: requested GPUs are missing or cannot be used.
    """
    if request.gpus is None and request.gpu_ids is None and request.device != "cpu" and gpus:
        request = replace(request, gpus="all")
    chosen, choice = _choose_gpus(request, gpus, Cluster())
    _refuse_faults(chosen)
    _refuse_architectures(chosen, request.architectures)
    if chosen:
        if request.processes is not None:
            raise InvalidRequest(
                f"--processes {request.processes} is for CPU slots, and {len(chosen)} GPU(s) are "
                "in use: use --per-gpu"
            )
        slots = [(f"GPU {gpu.label}", gpu.uuid) for gpu in chosen for _ in range(per_gpu)]
        shared = f", {per_gpu} trials on each" if per_gpu > 1 else ""
    else:
        if per_gpu > 1:
            raise InvalidRequest(
                f"--per-gpu {per_gpu}: no GPU is in use; --processes N sets the number of CPU slots"
            )
        kind, most = (
            ("Apple GPU", 1) if request.device == "mps" else ("CPU", request.cpus)
        )  # Several trials cannot share the one Apple GPU.
        slots = [(f"{kind} slot {number}", "") for number in range(request.processes or most)]
        shared = f", {len(slots)} slot{'s' if len(slots) > 1 else ''}"
    found = _found(chosen, gpus, choice, len(slots), request)
    reason = f"{found} -> sweep{shared}"
    cpus = max(1, request.cpus // len(slots))
    return LaunchPlan(
        strategy="sweep",
        gpus=chosen,
        nnodes=1,
        nproc_per_node=len(slots),
        argv=tuple(command_of(*request.argv, python=request.python)),
        reason=reason,
        env=_env(request, "single", chosen, 1, reason)
        | {
            "OMP_NUM_THREADS": str(request.omp_num_threads or cpus),
            "TRAINBOX_CPUS": str(cpus),
            "TRAINBOX_SLOTS": json.dumps(slots),
        },
    )


def _nodes(request: LaunchRequest, cluster: Cluster) -> _Nodes:
    count = cluster.nnodes if request.nnodes is None else request.nnodes
    rank = cluster.node_rank if request.node_rank is None else request.node_rank
    endpoint = request.rdzv_endpoint or cluster.rdzv_endpoint
    job_id = request.rdzv_id or cluster.rdzv_id or "trainbox"
    if count == 1:
        if request.node_rank:
            raise InvalidRequest(
                f"node rank {request.node_rank} of 1 node: add --nnodes with the number of machines"
            )
        # A scheduler may start a job of several nodes on one.
        if request.rdzv_endpoint and request.nnodes is None and cluster.kind == "local":
            raise InvalidRequest(
                f"--rdzv-endpoint {endpoint} and 1 node: add --nnodes with the number of machines"
            )
        return _Nodes(1, 0, "", job_id)
    if endpoint is None:
        raise InvalidRequest(
            f"{count} nodes requested without a rendezvous endpoint: give each node the address of "
            f"the first one, as in --rdzv-endpoint node0.example:{DEFAULT_PORT}"
        )
    _check_endpoint(endpoint)
    if rank is None:
        raise InvalidRequest(
            f"{count} nodes requested without a node rank: add --node-rank 0 here, 1 on the next "
            "node, and so on"
        )
    if rank >= count:
        raise InvalidRequest(
            f"node rank {rank} of {count} nodes: ranks count from 0, so the last is {count - 1}"
        )
    return _Nodes(count, rank, endpoint, job_id, cluster.kind != "local")


def _check_endpoint(endpoint: str) -> None:
    """Raise InvalidRequest unless `endpoint` is the address or name of one machine, and a port."""
    parts = re.fullmatch(
        r"(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[^\s\[\]/*:]+|[0-9A-Fa-f:]*:[0-9A-Fa-f:.%]*):([0-9]{1,5})",
        endpoint,
    )
    host = parts[1].strip("[]").partition("%")[0] if parts else ""
    if (
        not parts
        or not endpoint.isprintable()
        or not 0 < int(parts[2]) < 65536
        or not _is_host(host)
    ):
        raise InvalidRequest(
            f"--rdzv-endpoint {endpoint} is not HOST:PORT: write it as in "
            f"node0.example:{DEFAULT_PORT}"
        )
    try:
        # inet_aton also accepts the short forms of IPv4 that the system does: 0 is 0.0.0.0.
        address = ipaddress.ip_address(host if ":" in host else socket.inet_aton(host))
    except (OSError, ValueError):
        return  # a name
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_unspecified or address.is_multicast or str(address) == "255.255.255.255":
        raise InvalidRequest(
            f"--rdzv-endpoint {endpoint} is not the address of one machine: give the address by "
            f"which the other nodes reach node 0, as in 192.168.1.10:{DEFAULT_PORT}"
        )


def _is_host(host: str) -> bool:
    """Return whether the resolver accepts `host`.

    The resolver fails on a name with a part that is empty or too long.
    """
    if ":" not in host:
        return all(0 < len(part) < 64 for part in host.removesuffix(".").split("."))
    try:
        ipaddress.ip_address(host)
    except ValueError:  # for example the part of ::1 before its last colon
        return False
    return True


def _choose_gpus(
    request: LaunchRequest, gpus: Sequence[Gpu], cluster: Cluster
) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs to use, and how they were chosen: "requested", "named" or "visible"."""
    count = cluster.nproc_per_node if request.gpus is None and gpus else request.gpus
    if request.device in ("cpu", "mps"):
        if request.gpu_ids or request.gpus not in (None, 0):
            wanted = f"--gpu-ids {request.gpu_ids}" if request.gpu_ids else f"--gpus {request.gpus}"
            raise InvalidRequest(
                f"{wanted} and --device {request.device} contradict each other: drop one of them"
            )
        return (), "visible"
    if request.device == "cuda" and count == 0:
        raise InvalidRequest("--gpus 0 and --device cuda contradict each other: drop one of them")
    if request.gpu_ids:
        if count == 0:
            raise InvalidRequest(
                f"--gpus 0 and --gpu-ids {request.gpu_ids} contradict each other: drop one of them"
            )
        named = select(gpus, request.gpu_ids, "--gpu-ids")
        if isinstance(count, int) and count != len(named):
            raise InvalidRequest(
                f"--gpus {count} and --gpu-ids {request.gpu_ids} ({len(named)} GPUs) differ: drop "
                "one of them"
            )
        return named, "named"
    if isinstance(count, int) and count > 0:
        if count > len(gpus):
            raise HardwareMissing(
                f"{count} GPUs requested, found {len(gpus)} ({labels(gpus)}): request at most "
                f"{len(gpus)}, or use a host with {count}"
                if gpus
                else f"{count} GPU(s) requested, found none: run on a GPU host with its driver, "
                "or use --device cpu"
            )
        return tuple(gpus[:count]), "requested"
    if count == 0:
        return (), "visible"
    if not gpus and (count == "all" or request.device == "cuda"):
        wanted = "--gpus all" if count == "all" else "--device cuda"
        raise HardwareMissing(
            f"{wanted} requested, no GPU found: run on a GPU host with its driver, or use "
            "--device cpu"
        )
    if count is None and any(gpu.mig_parent for gpu in gpus):
        return tuple(gpus[:1]), "visible"  # a training can use only one MIG slice
    return tuple(gpus), "visible"


def _processes(request: LaunchRequest, chosen: Sequence[Gpu], cluster: Cluster) -> int:
    if chosen:
        if request.processes not in (None, len(chosen)):
            raise InvalidRequest(
                f"--processes {request.processes} is for CPU runs, and {len(chosen)} GPU(s) are in "
                "use here: choose GPUs with --gpus, or add --device cpu"
            )
        return len(chosen)
    if request.processes is not None:
        return request.processes
    return cluster.nproc_per_node or 1


def _strategy(request: LaunchRequest, chosen: Sequence[Gpu], nproc: int, nodes: _Nodes) -> str:
    wanted = request.strategy
    if wanted == "dp":
        if nodes.count > 1:
            raise InvalidRequest(
                f"--strategy dp works within one machine, and {nodes.count} nodes are requested: "
                "use --strategy ddp"
            )
        if request.device == "cpu" or request.gpus == 0:
            raise InvalidRequest(
                "--strategy dp splits batches over GPUs, and the CPU is requested: drop one of them"
            )
        if not chosen:
            raise HardwareMissing(
                "--strategy dp splits batches over GPUs, and none is in use: use a GPU host, or "
                "drop --strategy"
            )
        if len(chosen) == 1:
            raise InvalidRequest(
                "--strategy dp needs 2 GPUs or more, found 1: drop --strategy to train on the one"
            )
        return "dp"
    if wanted == "fsdp" and nproc * nodes.count == 1:
        found = "1 GPU" if chosen else "1 CPU process"
        raise InvalidRequest(
            f"--strategy fsdp splits a model over 2 processes or more, found {found}: drop "
            "--strategy to train on it"
        )
    if wanted in _BY_TORCHRUN:
        return wanted
    return "ddp" if nproc * nodes.count > 1 else "single"


def _refuse_faults(chosen: Sequence[Gpu]) -> None:
    for gpu in chosen:
        if gpu.fault:
            raise HardwareMissing(
                f"GPU {gpu.label} cannot be used ({gpu.fault}): name others with --gpu-ids, or fix "
                "it (reset, reboot)"
            )


def _refuse_architectures(chosen: Sequence[Gpu], architectures: Sequence[str]) -> None:
    for gpu in chosen:
        if gpu.capability and (reason := without_code(gpu.capability, architectures)):
            raise HardwareMissing(
                f"torch has no code for GPU {gpu.label}, {gpu.name} ({reason}): use other GPUs, an "
                "image whose torch is built for this architecture, or --device cpu"
            )


def _refuse_mig_groups(chosen: Sequence[Gpu]) -> None:
    slices = [gpu for gpu in chosen if gpu.mig_parent]
    if slices and len(chosen) > 1:
        same = "of one GPU " if len({gpu.mig_parent for gpu in slices}) < len(slices) else ""
        raise InvalidRequest(
            f"{len(chosen)} devices requested, {len(slices)} of them MIG slices "
            f"{same}({labels(chosen)}): CUDA and NCCL let a process see one slice only; train on "
            "one with --gpus 1 or --gpu-ids"
        )


def _argv(request: LaunchRequest, strategy: str, nproc: int, nodes: _Nodes) -> tuple[str, ...]:
    if strategy not in _BY_TORCHRUN:
        return tuple(command_of(*request.argv, python=request.python))
    if nodes.count == 1:
        rendezvous = ["--standalone"]
    else:
        rendezvous = [
            f"--nnodes={nodes.count}",
            f"--node-rank={nodes.rank}",
            f"--rdzv-endpoint={nodes.endpoint}",
            f"--rdzv-id={nodes.job_id}",
            f"--rdzv-conf=join_timeout={request.rdzv_timeout_s},await_name={int(nodes.await_name)}",
        ]
    ranks = (f"--nproc-per-node={nproc}", "-m", "--", *request.argv)
    return tuple(command_of("trainer.launch.torchrun", *rendezvous, *ranks, python=request.python))


def _reason(
    strategy: str,
    chosen: Sequence[Gpu],
    visible: Sequence[Gpu],
    choice: str,
    nproc: int,
    nodes: _Nodes,
    request: LaunchRequest,
) -> str:
    found = _found(chosen, visible, choice, nproc, request)
    if strategy == "dp":
        return f"{found} -> DataParallel, 1 process"
    if strategy == "single":
        where = (
            f"GPU {chosen[0].label}"
            if chosen
            else "the Apple GPU"
            if request.device == "mps"
            else "the CPU"
        )
        return f"{found} -> 1 process on {where}"
    backend = "" if chosen else " over gloo"
    total = nproc * nodes.count
    reason = (
        f"{found} -> torchrun {strategy.upper()}{backend}, {total} "
        f"process{'es' if total > 1 else ''}"
    )
    if nodes.count > 1:
        reason += (
            f" on {nodes.count} nodes; this is node {nodes.rank}, rendezvous at {nodes.endpoint}"
        )
    return reason


def _found(
    chosen: Sequence[Gpu], visible: Sequence[Gpu], choice: str, nproc: int, request: LaunchRequest
) -> str:
    """Return the part of the reason with the requested and the found GPUs or processes."""
    if chosen:
        kind = "MIG slice" if chosen[0].mig_parent else "GPU"
        noun, named = (kind if len(some) == 1 else f"{kind}s" for some in (visible, chosen))
        of_them = f"{len(chosen)} of {len(visible)}"
        return {
            "requested": f"{of_them} visible {noun} requested",
            "named": f"{named} {labels(chosen)} named, of {len(visible)} visible",
            "visible": f"{of_them} {noun} visible",
        }[choice]
    if request.processes:
        return f"{nproc} CPU process{'es' if nproc > 1 else ''} requested"
    if visible:
        return f"{len(visible)} visible GPU(s) excluded by request"
    return "no NVIDIA GPU visible" if request.device == "mps" else "no GPU visible"


def _env(
    request: LaunchRequest, strategy: str, chosen: Sequence[Gpu], nproc: int, reason: str
) -> dict[str, str]:
    per_process = request.omp_num_threads or max(
        1, request.cpus // (nproc if strategy in _BY_TORCHRUN else 1)
    )
    return {
        # UUIDs are used because CUDA orders GPUs by speed and NVML by bus. An empty value hides the
        # GPUs from a CPU run.
        "CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in chosen),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": str(per_process),
        "TRAINBOX_CPUS": str(request.cpus),
        "TRAINBOX_DEVICE": "cuda" if chosen else request.device or "cpu",
        "TRAINBOX_STRATEGY": strategy,
        "TRAINBOX_REASON": reason,
    }
