"""What the user and the scheduler ask a launch for, and the nodes of the job. Pure."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainbox.errors import WrongUse
from trainbox.options.table import RDZV_TIMEOUT_S

DEFAULT_PORT = 29400


# A list of GPUs: indices, slices of a GPU, or UUIDs.
_GPU_LIST = re.compile(r"(\d+(:\d+)?|(GPU|MIG)-[^,\s]+)(,(\d+(:\d+)?|(GPU|MIG)-[^,\s]+))*")
# Variables of a job with GPUs that may be on other nodes, or in other steps of the job.
_OF_THE_JOB = (
    *("SLURM_JOB_GPUS", "SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK"),
    "SLURM_TRES_PER_TASK",
)


@dataclass(frozen=True)
class Allocation:
    """What a scheduler or a container runtime says of the GPUs that this job has here.

    Attributes:
        named: the variable with its value.
        least: the number of GPUs that must be here; 0 if they may be elsewhere.
        remedy: what to do if there are fewer.
    """

    named: str
    least: int = 0
    remedy: str = ""

    def missing(self, found: int) -> str | None:
        """Return that there are fewer than allocated if `found` are here, with a remedy, or None.

        An option with a number or a list may choose fewer.
        """
        if found >= self.least:
            return None
        return f"{self.named} and {found} GPU(s) found: {self.remedy}"


def allocation_of(env: Mapping[str, str]) -> Allocation | None:
    """Return the allocation that the environment describes, or None without one.

    CUDA_VISIBLE_DEVICES names the GPUs itself, or hides them.

    SLURM's daemon sets SLURM_GPUS_ON_NODE on the node, SLURM_JOB_GPUS for a batch script and a
    prolog, and SLURM_STEP_GPUS for a step (man sbatch, man srun, "Prolog and Epilog Guide"). A step
    inherits the variables of its job, also if it has no GPU, and `salloc` sets the requested
    numbers on the login node. NVIDIA's runtime makes the GPUs of a list visible; many images set
    the value `all` (NVIDIA Container Toolkit, "GPU Enumeration").

    Raises:
        WrongUse: a number is malformed.
    """
    if "CUDA_VISIBLE_DEVICES" in env:
        return None
    is_job = "SLURM_JOB_ID" in env
    if is_job:
        remedy = "check the driver of this node, or request fewer with --gpus N, or --device cpu"
        if env.get("SLURM_GPUS_ON_NODE"):
            number = _number(env, "SLURM_GPUS_ON_NODE")
            return Allocation(f"SLURM_GPUS_ON_NODE={number}", number, remedy) if number else None
        name = "SLURM_STEP_GPUS" if _in_step(env) else "SLURM_JOB_GPUS"
        if _GPU_LIST.fullmatch(gpus := env.get(name, "")):
            return Allocation(f"{name}={gpus}", len({*gpus.split(",")}), remedy)
    if _GPU_LIST.fullmatch(gpus := env.get("NVIDIA_VISIBLE_DEVICES", "")):
        # The runtime may show all slices of one GPU, and name a shared GPU twice.
        remedy = "start the container with its GPUs (docker run --gpus), or use --device cpu"
        return Allocation(f"NVIDIA_VISIBLE_DEVICES={gpus}", 1, remedy)
    for name in _OF_THE_JOB if is_job else ():
        value = env.get(name, "")
        if value.strip("0") and (name != "SLURM_TRES_PER_TASK" or "gpu" in value):
            return Allocation(f"{name}={value}")
    return None


def wants_all_allocated(gpus: int | str | None, gpu_ids: str | None) -> bool:
    """Return whether no option chooses fewer GPUs than are allocated: none, or --gpus all."""
    return gpus in (None, "all") and not gpu_ids


@dataclass(frozen=True)
class LaunchRequest:
    """The user's launch options; None for each that was not given.

    Attributes:
        argv: the module that each process runs and its arguments, such as `trainer train digits`.
        cpus: the number of CPUs that this container may use.
        gpus: a count, or "all".
        architectures: the GPU architectures that torch is built for; empty if they are not known.
        allocation: what the environment says of the GPUs that must be here.
        hosts: what a scheduler that starts only the first host says of several; else empty.
        network: the network that NCCL uses between nodes; empty if GPUs were not examined.
        settings: where the settings come from that are not on the command line, to be shown.
        config_file: the `name` and the `sha256` of the experiment's file.
    """

    argv: tuple[str, ...]
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
    allocation: Allocation | None = None
    hosts: str = ""
    network: str = ""
    settings: str = ""
    config_file: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Cluster:
    """The scheduler's decisions; None for each that it leaves open.

    `rdzv_endpoint` is HOST:PORT of node 0.
    """

    kind: str = "local"
    nnodes: int = 1
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    nproc_per_node: int | None = None


def detect_cluster(env: Mapping[str, str]) -> Cluster:
    """Return the cluster that the variables of a scheduler describe.

    SLURM sets SLURM_*. Kubeflow Trainer sets torchrun's PET_*. An Indexed Job sets
    JOB_COMPLETION_INDEX.

    Raises:
        WrongUse: a number is malformed, or a SLURM job has more than one task per node, or
            several nodes without srun.
    """
    if "SLURM_JOB_ID" in env:
        return _slurm(env)
    if "KUBERNETES_SERVICE_HOST" in env or any(name.startswith("PET_") for name in env):
        return _kubernetes(env)
    return Cluster()


def hosts_of_job(env: Mapping[str, str], node_file: str = "") -> str:
    """Return the number of hosts of a job of PBS, LSF or Grid Engine, or "" for one or none.

    Such a job runs its script on the first host. OpenPBS names its hosts only in the lines of the
    file $PBS_NODEFILE, of which `node_file` is the text (Altair, "PBS Professional Reference
    Guide"; IBM, "LSF Configuration Reference"; man qsub of Grid Engine).
    """
    words = env.get("LSB_MCPU_HOSTS", "").split()  # such as n1 8 n2 8
    hosts = {
        "PBS": {*node_file.split()} if env.get("PBS_JOBID") else (),
        "LSF": {*words[::2]} if env.get("LSB_JOBID") else (),
        "Grid Engine": range(int(number)) if (number := env.get("NHOSTS", "")).isdecimal() else (),
    }
    return next((f"{name} has {len(of)} hosts" for name, of in hosts.items() if len(of) > 1), "")


def first_host(nodelist: str) -> str:
    """Return the first host of SLURM's compressed list: `n[03-05,9],login` -> `n03`."""
    host = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodelist).partition(",")[0]
    if not host:
        raise WrongUse(
            f"SLURM_JOB_NODELIST={nodelist!r} has no host: set --rdzv-endpoint HOST:PORT"
        )
    return host


def _in_step(env: Mapping[str, str]) -> bool:
    """Return whether srun has started this process.

    A trial of a sweep has the number of nodes of its own launch.
    """
    return "SLURM_STEP_NUM_NODES" in env or "SLURM_STEP_ID" in env


def _slurm(env: Mapping[str, str]) -> Cluster:
    job = env["SLURM_JOB_ID"]
    in_step = _in_step(env)
    nnodes = _number(env, "SLURM_STEP_NUM_NODES" if in_step else "SLURM_JOB_NUM_NODES", default=1)
    ntasks = _number(env, "SLURM_STEP_NUM_TASKS", default=nnodes) if in_step else nnodes
    if ntasks > nnodes:
        raise WrongUse(
            f"SLURM started {ntasks} tasks on {nnodes} node(s), and each would train on all GPUs "
            "of its node: start one task per node with --ntasks-per-node=1"
        )
    if nnodes > 1 and not in_step:
        raise WrongUse(
            f"SLURM job {job} has {nnodes} nodes, and this is its batch script, which runs on the "
            "first only: start Trainbox with `srun --ntasks-per-node=1 trainbox ...`"
        )
    if nnodes == 1:
        return Cluster("slurm", rdzv_id=job)
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    # All nodes of a job compute the same port. It is above the ports of common services and below
    # the ephemeral range.
    port = 20000 + _number(env, "SLURM_JOB_ID") % 10000
    return Cluster(
        "slurm",
        nnodes,
        _number(env, "SLURM_NODEID"),
        f"{first_host(nodelist)}:{port}",
        job,
    )


def _kubernetes(env: Mapping[str, str]) -> Cluster:
    nnodes = _number(env, "PET_NNODES", default=1, least=1)
    rank_name = "PET_NODE_RANK" if env.get("PET_NODE_RANK") else "JOB_COMPLETION_INDEX"
    endpoint = env.get("PET_RDZV_ENDPOINT")
    if not endpoint and env.get("PET_MASTER_ADDR"):
        endpoint = f"{env['PET_MASTER_ADDR']}:{env.get('PET_MASTER_PORT') or DEFAULT_PORT}"
    nproc = env.get("PET_NPROC_PER_NODE", "")
    return Cluster(
        "kubernetes",
        nnodes,
        _number(env, rank_name) if env.get(rank_name) else None,
        endpoint or None,
        env.get("PET_RDZV_ID") or None,
        # With auto, gpu and cpu, the number of GPUs found here decides.
        None
        if nproc in ("", "auto", "gpu", "cpu")
        else _number(env, "PET_NPROC_PER_NODE", least=1),
    )


def _number(env: Mapping[str, str], name: str, default: int | None = None, least: int = 0) -> int:
    text = env.get(name) or ("" if default is None else str(default))
    if not (text.isascii() and text.isdigit()):
        raise WrongUse(
            f"{name}={text!r} is not a whole number: correct it, or set the launch options yourself"
        )
    if int(text) < least:
        raise WrongUse(
            f"{name}={text} is less than {least}: correct it, or set the launch options yourself"
        )
    return int(text)


@dataclass(frozen=True)
class Nodes:
    """The nodes of the training. With one node, `rank` is 0 and `endpoint` is empty."""

    count: int
    rank: int
    endpoint: str
    job_id: str
    # Under a scheduler, the endpoint's name may become known only later. Elsewhere, an unknown name
    # is an error.
    await_name: bool = False


def nodes_of(request: LaunchRequest, cluster: Cluster) -> Nodes:
    """Return the nodes of the job: the user's request comes before the scheduler's decision.

    Raises:
        WrongUse: the rank or the endpoint is missing, or contradicts the number of nodes.
    """
    count = cluster.nnodes if request.nnodes is None else request.nnodes
    rank = cluster.node_rank if request.node_rank is None else request.node_rank
    endpoint = request.rdzv_endpoint or cluster.rdzv_endpoint
    job_id = request.rdzv_id or cluster.rdzv_id or "trainbox"
    if count == 1:
        if request.node_rank:
            raise WrongUse(
                f"node rank {request.node_rank} of 1 node: add --nnodes with the number of machines"
            )
        # A scheduler may start a job of several nodes on one.
        if request.rdzv_endpoint and request.nnodes is None and cluster.kind == "local":
            raise WrongUse(
                f"--rdzv-endpoint {endpoint} and 1 node: add --nnodes with the number of machines"
            )
        return Nodes(1, 0, "", job_id)
    if endpoint is None:
        raise WrongUse(
            f"{count} nodes requested without a rendezvous endpoint: give each node the address of "
            f"the first one, as in --rdzv-endpoint node0.example:{DEFAULT_PORT}"
        )
    _check_endpoint(endpoint)
    if rank is None:
        raise WrongUse(
            f"{count} nodes requested without a node rank: add --node-rank 0 here, 1 on the next "
            "node, and so on"
        )
    if rank >= count:
        raise WrongUse(
            f"node rank {rank} of {count} nodes: ranks count from 0, so the last is {count - 1}"
        )
    return Nodes(count, rank, endpoint, job_id, cluster.kind != "local")


def _check_endpoint(endpoint: str) -> None:
    """Raise WrongUse unless `endpoint` is the address or name of one machine, and a port."""
    parts = re.fullmatch(
        r"(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[^\s\[\]/*:]+|[0-9A-Fa-f:]*:[0-9A-Fa-f:.%]*):([0-9]{1,5})",
        endpoint,
    )
    host = parts[1].strip("[]").partition("%")[0] if parts else ""
    if (
        not parts
        or not endpoint.isprintable()
        or not 0 < int(parts[2]) < 65536
        or (":" in host and not _is_ipv6(host))
    ):
        raise WrongUse(
            f"--rdzv-endpoint {endpoint} is not HOST:PORT: write it as in "
            f"node0.example:{DEFAULT_PORT}"
        )
    import socket  # a plan for one node does without it

    try:
        # inet_aton also accepts the short forms of IPv4 that the system does: 0 is 0.0.0.0.
        address = ipaddress.ip_address(host if ":" in host else socket.inet_aton(host))
    except (OSError, ValueError):
        return  # a name
    if address.is_unspecified or address.is_multicast or str(address) == "255.255.255.255":
        raise WrongUse(
            f"--rdzv-endpoint {endpoint} is not the address of one machine: give the address by "
            f"which the other nodes reach node 0, as in 192.168.1.10:{DEFAULT_PORT}"
        )


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:  # for example the part of ::1 before its last colon
        return False
    return True
