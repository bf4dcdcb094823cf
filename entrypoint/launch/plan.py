"""The launch decision, a pure function from a request, the GPUs and the cluster to a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from entrypoint.driver.gpus import Gpu
from entrypoint.launch.choice import choose_gpus, count_of, processes_of, refuse_mig_groups
from entrypoint.launch.request import Cluster, LaunchRequest, Nodes, nodes_of
from trainbox.errors import DeviceMissing, WrongUse
from trainbox.options.strategies import STRATEGY_RULES
from trainbox.processes.environment import LaunchFacts
from trainbox.processes.programs import TORCHRUN, TRAINER, command_of

# docs/decisions/0013-speed.md has the figures. glibc keeps freed blocks of up to 32 MiB in the
# process: by default, it may return the gradients of a small model to the kernel in each step.
# Threads that wait for each other sleep: by default, each spins for a while, also on a core that
# another process needs.
_FOR_SPEED = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),  # bytes; the most that glibc allows
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
}


@dataclass(frozen=True)
class LaunchPlan:
    """The command to start: `argv`, with `env` added to the environment.

    `reason` explains the plan in one line. `settings` lists the settings from the environment and
    the file.
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


@dataclass(frozen=True)
class _Launch:
    """The nodes, the GPUs and the number of processes on this node.

    `found` is a text with the requested and the found GPUs or processes.
    """

    request: LaunchRequest
    nodes: Nodes
    chosen: tuple[Gpu, ...]
    found: str
    nproc: int = 1

    @property
    def device(self) -> str:
        return "cuda" if self.chosen else self.request.device or "cpu"

    @property
    def all_processes(self) -> int:
        """Return the number of processes on all nodes."""
        return self.nproc * self.nodes.count

    def torchrun(self, kind: str) -> list[str]:
        """Return the command of torchrun. With `kind` `-m`, the ranks run a module."""
        request, nodes = self.request, self.nodes
        rendezvous = ["--standalone"]
        if nodes.count > 1:
            rendezvous = [
                f"--nnodes={nodes.count}",
                f"--node-rank={nodes.rank}",
                f"--rdzv-endpoint={nodes.endpoint}",
                f"--rdzv-id={nodes.job_id}",
                f"--rdzv-conf=join_timeout={request.rdzv_timeout_s},"
                f"await_name={int(nodes.await_name)}",
            ]
        ranks = (f"--nproc-per-node={self.nproc}", kind, "--", *request.argv)
        return command_of(TORCHRUN, *rendezvous, *ranks)

    def reason(self, text: str) -> str:
        """Return why `text` is started, with the nodes if there are several."""
        nodes, reason = self.nodes, f"{self.found} -> {text}"
        if nodes.count > 1:
            reason += f" on {nodes.count} nodes; this is node {nodes.rank}, rendezvous at "
            reason += nodes.endpoint
            if self.chosen and self.request.network:
                reason += f"; NCCL over {self.request.network}"
        elif self.request.hosts and self.request.nnodes is None:
            reason += f"; the job of {self.request.hosts}, and only this one trains (--nnodes)"
        return reason

    def plan(
        self, strategy: str, argv: Sequence[str], reason: str, env: Mapping[str, str], cpus: int
    ) -> LaunchPlan:
        """Return the plan, in which each process gets `cpus` CPUs unless the user set a number."""
        return LaunchPlan(
            strategy=strategy,
            device=self.device,
            gpus=self.chosen,
            nnodes=self.nodes.count,
            nproc_per_node=self.nproc,
            argv=tuple(argv),
            reason=reason,
            settings=self.request.settings,
            env={
                # UUIDs are used because CUDA orders GPUs by speed and NVML by bus. An empty value
                # hides the GPUs from a CPU run.
                "CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in self.chosen),
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                "OMP_NUM_THREADS": str(self.request.omp_num_threads or max(1, cpus)),
                **env,
            },
            node_rank=self.nodes.rank,
        )

    def facts(self, strategy: str, reason: str) -> LaunchFacts:
        """Return what the trainer has to know of the launch."""
        request = self.request
        return LaunchFacts(
            device=self.device,
            strategy=strategy,
            reason=reason,
            settings=request.settings,
            config_file=request.config_file,
            cpus=request.cpus,
        )


def plan_launch(request: LaunchRequest, gpus: Sequence[Gpu], cluster: Cluster) -> LaunchPlan:
    """Return the plan for one training on the visible GPUs `gpus`.

    Raises:
        WrongUse: the request contradicts itself or cannot be launched.
        DeviceMissing: requested GPUs are missing. The plan never falls back to the CPU.
    """
    nodes = nodes_of(request, cluster)
    chosen, found = choose_gpus(request, gpus, cluster)
    launch = _Launch(request, nodes, chosen, found, processes_of(request, chosen, cluster))
    strategy = _strategy(launch)
    refuse_mig_groups(chosen)
    if STRATEGY_RULES[strategy].by_torchrun:
        argv, backend = launch.torchrun("-m"), "" if chosen else " over gloo"
        processes = count_of(launch.all_processes, "process")
        reason = launch.reason(f"torchrun {strategy.upper()}{backend}, {processes}")
    else:
        launch = replace(launch, nproc=1)
        argv = command_of(TRAINER, *request.argv[1:])
        where = "the Apple GPU" if request.device == "mps" else "the CPU"
        where = f"GPU {chosen[0].label}" if chosen else where
        reason = launch.reason(
            "DataParallel, 1 process" if strategy == "dp" else f"1 process on {where}"
        )
    env = {**launch.facts(strategy, reason).variable(), **_FOR_SPEED}
    return launch.plan(strategy, argv, reason, env, request.cpus // launch.nproc)


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
    chosen, found = choose_gpus(request, gpus, cluster)
    launch = _Launch(request, nodes, chosen, found)
    if torchrun is not False:
        launch = replace(launch, nproc=processes_of(request, chosen, cluster))
        torchrun = torchrun or request.processes is not None or launch.all_processes > 1
    elif nodes.count > 1 or request.processes is not None:
        wanted = f"{nodes.count} nodes" if nodes.count > 1 else f"--processes {request.processes}"
        raise WrongUse(f"--no-torchrun and {wanted} contradict each other: drop one of them")
    refuse_mig_groups(chosen)
    processes = count_of(launch.all_processes, "process")
    return launch.plan(
        "torchrun" if torchrun else "process",
        launch.torchrun("--no-python") if torchrun else request.argv,
        launch.reason(f"{'torchrun, ' if torchrun else ''}{processes}"),
        {"TRAINBOX_DEVICE": launch.device},
        request.cpus // launch.nproc,
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
    chosen, found = choose_gpus(request, gpus, Cluster())
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
    launch = _Launch(request, Nodes(1, 0, "", ""), chosen, found, len(slots))
    reason = launch.reason(f"sweep{shared}")
    cpus = max(1, request.cpus // len(slots))
    facts = replace(launch.facts("single", reason), cpus=cpus, slots=tuple(slots))
    argv = command_of(TRAINER, *request.argv[1:])
    return launch.plan("sweep", argv, reason, facts.variable(), cpus)


def _strategy(launch: _Launch) -> str:
    request, wanted = launch.request, launch.request.strategy
    if wanted == "dp":
        if launch.nodes.count > 1:
            raise WrongUse(
                f"--strategy dp works within one machine, and {launch.nodes.count} nodes are "
                "requested: use --strategy ddp"
            )
        if request.device == "cpu" or request.gpus == 0:
            raise WrongUse(
                "--strategy dp splits batches over GPUs, and the CPU is requested: drop one of them"
            )
        if not launch.chosen:
            raise DeviceMissing(
                "--strategy dp splits batches over GPUs, and none is in use: use a GPU host, or "
                "drop --strategy"
            )
        if len(launch.chosen) == 1:
            raise WrongUse(
                "--strategy dp needs 2 GPUs or more, found 1: drop --strategy to train on the one"
            )
        return "dp"
    if wanted is None:
        return "ddp" if launch.all_processes > 1 else "single"
    if launch.all_processes < (least := STRATEGY_RULES[wanted].least_processes):
        found = "1 GPU" if launch.chosen else "1 CPU process"
        raise WrongUse(
            f"--strategy {wanted} needs {least} processes or more, found {found}: drop --strategy "
            "to train on it"
        )
    return wanted
