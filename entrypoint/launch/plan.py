"""The launch decision, a pure function from a request, the GPUs and the cluster to a plan."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from entrypoint.driver.gpus import Gpu
from entrypoint.launch.choice import (
    choose_gpus,
    describe_choice,
    processes_of,
    refuse_architectures,
    refuse_faults,
    refuse_mig_groups,
)
from entrypoint.launch.cluster import Cluster
from entrypoint.launch.nodes import Nodes, nodes_of
from entrypoint.launch.request import LaunchRequest
from entrypoint.system.commands import command_of
from trainbox.contract.errors import DeviceMissing, WrongUse
from trainbox.contract.launch_facts import LaunchFacts

_BY_TORCHRUN = ("ddp", "fsdp")


@dataclass(frozen=True)
class LaunchPlan:
    """The command to start: `argv`, with `env` added to the environment.

    `reason` explains the plan in one line. `settings` lists those of the environment and the file.
    """

    strategy: str
    device: str
    gpus: tuple[Gpu, ...]
    nnodes: int
    nproc_per_node: int
    argv: tuple[str, ...]
    reason: str
    settings: str = ""
    env: dict[str, str] = field(default_factory=dict)
    node_rank: int = 0


def plan_launch(request: LaunchRequest, gpus: Sequence[Gpu], cluster: Cluster) -> LaunchPlan:
    """Return the plan for one training on the visible GPUs `gpus`.

    Raises:
        WrongUse: the request contradicts itself or cannot be launched.
        DeviceMissing: requested GPUs are missing. The plan never falls back to the CPU.
    """
    nodes = nodes_of(request, cluster)
    chosen, choice = choose_gpus(request, gpus, cluster)
    nproc = processes_of(request, chosen, cluster)
    strategy = _strategy(request, chosen, nproc, nodes)
    refuse_faults(chosen)
    refuse_architectures(chosen, request.architectures)
    refuse_mig_groups(chosen)
    return LaunchPlan(
        strategy=strategy,
        device=_device(request, chosen),
        gpus=chosen,
        nnodes=nodes.count,
        nproc_per_node=1 if strategy == "dp" else nproc,
        argv=_argv(request, strategy, nproc, nodes),
        reason=(reason := _reason(strategy, chosen, gpus, choice, nproc, nodes, request)),
        settings=request.settings,
        env=_env(request, strategy, chosen, nproc)
        | _facts(request, strategy, chosen, reason).variable(),
        node_rank=nodes.rank,
    )


def plan_script(
    request: LaunchRequest, gpus: Sequence[Gpu], cluster: Cluster, torchrun: bool | None
) -> LaunchPlan:
    """Return the plan for a user's own program, whose command is `request.argv`.

    A single process is started as a shell would start it, and several by torchrun. `torchrun` is
    true for torchrun in any case, and false for one process that sees all chosen GPUs.

    Raises:
        WrongUse: the request contradicts itself or cannot be launched.
        DeviceMissing: requested GPUs are missing or cannot be used.
    """
    nodes = nodes_of(request, cluster)
    chosen, choice = choose_gpus(request, gpus, cluster)
    if torchrun is False:
        if nodes.count > 1 or request.processes is not None:
            wanted = (
                f"{nodes.count} nodes" if nodes.count > 1 else f"--processes {request.processes}"
            )
            raise WrongUse(f"--no-torchrun and {wanted} contradict each other: drop one of them")
        nproc = 1
    else:
        nproc = processes_of(request, chosen, cluster)
        torchrun = torchrun or request.processes is not None or nproc * nodes.count > 1
    refuse_faults(chosen)
    refuse_architectures(chosen, request.architectures)
    refuse_mig_groups(chosen)
    found = describe_choice(chosen, gpus, choice, nproc, request)
    total = nproc * nodes.count
    processes = f"{total} process{'es' if total > 1 else ''}"
    reason = f"{found} -> {'torchrun, ' if torchrun else ''}{processes}"
    argv = list(request.argv)
    if torchrun:
        ranks = (f"--nproc-per-node={nproc}", "--no-python", "--", *request.argv)
        arguments = (*_rendezvous(request, nodes), *ranks)
        argv = command_of("trainer.launch.torchrun", *arguments, python=request.python)
    device = _device(request, chosen)
    return LaunchPlan(
        strategy="torchrun" if torchrun else "process",
        device=device,
        gpus=chosen,
        nnodes=nodes.count,
        nproc_per_node=nproc,
        argv=tuple(argv),
        reason=f"{reason}{_on_nodes(nodes, request, chosen)}",
        settings=request.settings,
        env=_env(request, "ddp", chosen, nproc) | {"TRAINBOX_DEVICE": device},
        node_rank=nodes.rank,
    )


def plan_sweep(request: LaunchRequest, gpus: Sequence[Gpu], per_gpu: int) -> LaunchPlan:
    """Return the plan for a sweep, whose slots each train one trial at a time.

    A slot is a CPU slot or one of the `per_gpu` slots of a GPU.

    Raises:
        WrongUse: the request contradicts itself.
        DeviceMissing: requested GPUs are missing or cannot be used.
    """
    if request.gpus is None and request.gpu_ids is None and request.device != "cpu" and gpus:
        request = replace(request, gpus="all")
    chosen, choice = choose_gpus(request, gpus, Cluster())
    refuse_faults(chosen)
    refuse_architectures(chosen, request.architectures)
    if chosen:
        if request.processes is not None:
            raise WrongUse(
                f"--processes {request.processes} is for CPU slots, and {len(chosen)} GPU(s) are "
                "in use: use --per-gpu"
            )
        slots = [(f"GPU {gpu.label}", gpu.uuid) for gpu in chosen for _ in range(per_gpu)]
        shared = f", {per_gpu} trials on each" if per_gpu > 1 else ""
    else:
        if per_gpu > 1:
            raise WrongUse(
                f"--per-gpu {per_gpu}: no GPU is in use; --processes N sets the number of CPU slots"
            )
        kind, most = (
            ("Apple GPU", 1) if request.device == "mps" else ("CPU", request.cpus)
        )  # Several trials cannot share the one Apple GPU.
        slots = [(f"{kind} slot {number}", "") for number in range(request.processes or most)]
        shared = f", {len(slots)} slot{'s' if len(slots) > 1 else ''}"
    found = describe_choice(chosen, gpus, choice, len(slots), request)
    reason = f"{found} -> sweep{shared}"
    cpus = max(1, request.cpus // len(slots))
    facts = replace(_facts(request, "single", chosen, reason), cpus=cpus, slots=tuple(slots))
    return LaunchPlan(
        strategy="sweep",
        device=facts.device,
        gpus=chosen,
        nnodes=1,
        nproc_per_node=len(slots),
        argv=tuple(command_of(*request.argv, python=request.python)),
        reason=reason,
        settings=request.settings,
        env=_env(request, "single", chosen, 1)
        | {"OMP_NUM_THREADS": str(request.omp_num_threads or cpus)}
        | facts.variable(),
    )


def _strategy(request: LaunchRequest, chosen: Sequence[Gpu], nproc: int, nodes: Nodes) -> str:
    wanted = request.strategy
    if wanted == "dp":
        if nodes.count > 1:
            raise WrongUse(
                f"--strategy dp works within one machine, and {nodes.count} nodes are requested: "
                "use --strategy ddp"
            )
        if request.device == "cpu" or request.gpus == 0:
            raise WrongUse(
                "--strategy dp splits batches over GPUs, and the CPU is requested: drop one of them"
            )
        if not chosen:
            raise DeviceMissing(
                "--strategy dp splits batches over GPUs, and none is in use: use a GPU host, or "
                "drop --strategy"
            )
        if len(chosen) == 1:
            raise WrongUse(
                "--strategy dp needs 2 GPUs or more, found 1: drop --strategy to train on the one"
            )
        return "dp"
    if wanted == "fsdp" and nproc * nodes.count == 1:
        found = "1 GPU" if chosen else "1 CPU process"
        raise WrongUse(
            f"--strategy fsdp splits a model over 2 processes or more, found {found}: drop "
            "--strategy to train on it"
        )
    if wanted in _BY_TORCHRUN:
        return wanted
    return "ddp" if nproc * nodes.count > 1 else "single"


def _argv(request: LaunchRequest, strategy: str, nproc: int, nodes: Nodes) -> tuple[str, ...]:
    if strategy not in _BY_TORCHRUN:
        return tuple(command_of(*request.argv, python=request.python))
    arguments = (
        *_rendezvous(request, nodes),
        f"--nproc-per-node={nproc}",
        "-m",
        "--",
        *request.argv,
    )
    return tuple(command_of("trainer.launch.torchrun", *arguments, python=request.python))


def _rendezvous(request: LaunchRequest, nodes: Nodes) -> list[str]:
    """Return torchrun's options for the nodes."""
    if nodes.count == 1:
        return ["--standalone"]
    return [
        f"--nnodes={nodes.count}",
        f"--node-rank={nodes.rank}",
        f"--rdzv-endpoint={nodes.endpoint}",
        f"--rdzv-id={nodes.job_id}",
        f"--rdzv-conf=join_timeout={request.rdzv_timeout_s},await_name={int(nodes.await_name)}",
    ]


def _reason(
    strategy: str,
    chosen: Sequence[Gpu],
    visible: Sequence[Gpu],
    choice: str,
    nproc: int,
    nodes: Nodes,
    request: LaunchRequest,
) -> str:
    found = describe_choice(chosen, visible, choice, nproc, request)
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
    return f"{reason}{_on_nodes(nodes, request, chosen)}"


def _on_nodes(nodes: Nodes, request: LaunchRequest, chosen: Sequence[Gpu]) -> str:
    if nodes.count == 1:
        return ""
    network = f"; NCCL over {request.network}" if chosen and request.network else ""
    return (
        f" on {nodes.count} nodes; this is node {nodes.rank}, rendezvous at {nodes.endpoint}"
        f"{network}"
    )


def _device(request: LaunchRequest, chosen: Sequence[Gpu]) -> str:
    return "cuda" if chosen else request.device or "cpu"


def _facts(
    request: LaunchRequest, strategy: str, chosen: Sequence[Gpu], reason: str
) -> LaunchFacts:
    return LaunchFacts(
        device=_device(request, chosen),
        strategy=strategy,
        reason=reason,
        settings=request.settings,
        config_file=request.config_file,
        cpus=request.cpus,
    )


def _env(
    request: LaunchRequest, strategy: str, chosen: Sequence[Gpu], nproc: int
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
    }
