"""The scheduler that started this process, read from the environment. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainbox.contract.errors import WrongUse

DEFAULT_PORT = 29400


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


def first_host(nodelist: str) -> str:
    """Return the first host of SLURM's compressed list: `n[03-05,9],login` -> `n03`."""
    host = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodelist).partition(",")[0]
    if not host:
        raise WrongUse(
            f"SLURM_JOB_NODELIST={nodelist!r} has no host: set --rdzv-endpoint HOST:PORT"
        )
    return host


def _slurm(env: Mapping[str, str]) -> Cluster:
    job = env["SLURM_JOB_ID"]
    in_step = "SLURM_STEP_ID" in env
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
        "slurm", nnodes, _number(env, "SLURM_NODEID"), f"{first_host(nodelist)}:{port}", job
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
