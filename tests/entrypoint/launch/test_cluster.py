"""The cluster that an environment describes: SLURM, Kubernetes or none."""

import pytest

from entrypoint.launch.request import Cluster, detect_cluster, first_host
from trainbox.errors import Failure

JOB = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[03-05]"}
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NODEID": "2",
}
SRUN = JOB | STEP | {"SLURM_STEP_NODELIST": "n[03-05]"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
PET = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-0.job",
    "PET_NPROC_PER_NODE": "auto",
}

# fmt: off
CLUSTERS: dict[str, tuple[dict[str, str], Cluster]] = {
    "none, with unrelated variables": (
        {"SLURM_CONF": "/x", "JOB_COMPLETION_INDEX": "1", "RANK": "1"},
        Cluster("local", 1, None, None, None, None)),
    "slurm: a batch script on one node": (
        JOB | {"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "4"},
        Cluster("slurm", 1, None, None, "123456")),
    "slurm: allocated GPUs": (
        JOB | {"SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "4"},
        Cluster("slurm", 1, None, None, "123456", gpus_per_node=4)),
    "slurm: some of the allocated GPUs": (
        JOB | {"SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "1"},
        Cluster("slurm", 1, None, None, "123456")),
    "slurm: srun on a part of the job's nodes": (
        SRUN | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_NODELIST": "n[04-05]", "SLURM_NODEID": "0"},
        Cluster("slurm", 2, 0, "n04:23456", "123456")),
    "slurm: srun on one node of several": (
        SRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"},
        Cluster("slurm", 1, None, None, "123456")),
    "slurm: without a list of the step": (
        JOB | STEP, Cluster("slurm", 3, 2, "n03:23456", "123456")),
    "slurm: before kubernetes": (SRUN | POD | PET, Cluster("slurm", 3, 2, "n03:23456", "123456")),
    "kubernetes: a port": (
        PET | {"PET_MASTER_PORT": "1234"}, Cluster("kubernetes", 2, 1, "job-0.job:1234")),
    "kubernetes: an endpoint overrides an address": (
        PET | {"PET_RDZV_ENDPOINT": "head:5000", "PET_RDZV_ID": "run7"},
        Cluster("kubernetes", 2, 1, "head:5000", "run7")),
    "kubernetes: four processes": (
        PET | {"PET_NPROC_PER_NODE": "4"},
        Cluster("kubernetes", 2, 1, "job-0.job:29400", None, 4)),
    "kubernetes: gpu processes": (
        PET | {"PET_NPROC_PER_NODE": "gpu"}, Cluster("kubernetes", 2, 1, "job-0.job:29400")),
    "kubernetes: an indexed job": (
        POD | {"JOB_COMPLETION_INDEX": "3"}, Cluster("kubernetes", 1, 3)),
    "kubernetes: the node rank overrides the index": (
        PET | {"JOB_COMPLETION_INDEX": "3"}, Cluster("kubernetes", 2, 1, "job-0.job:29400")),
    "kubernetes: empty is not set": (
        dict.fromkeys((*PET, "PET_RDZV_ENDPOINT", "PET_RDZV_ID", "JOB_COMPLETION_INDEX"), ""),
        Cluster("kubernetes")),
}

_NO_NUMBERS = [
    (JOB, "SLURM_JOB_NUM_NODES", "two"),
    (SRUN, "SLURM_JOB_ID", "x"),
    (PET, "PET_NNODES", "1:4"),
    (PET, "PET_NNODES", "\u0662"),
    (POD, "JOB_COMPLETION_INDEX", "-1"),
]
_BY_HAND = "correct it, or set the launch options yourself"
REFUSED: list[tuple[dict[str, str], str]] = [
    (JOB,
     "SLURM job 123456 has 3 nodes, and this is its batch script, which runs on the first only: "
     "start Trainbox with `srun --ntasks-per-node=1 trainbox ...`"),
    (SRUN | {"SLURM_STEP_NUM_TASKS": "12"},
     "SLURM started 12 tasks on 3 node(s), and each would train on all GPUs of its node: "
     "start one task per node with --ntasks-per-node=1"),
    (JOB | STEP | {"SLURM_JOB_NODELIST": ""},
     "SLURM_JOB_NODELIST='' has no host: set --rdzv-endpoint HOST:PORT"),
    *((env | {name: value}, f"{name}={value!r} is not a whole number: {_BY_HAND}")
      for env, name, value in _NO_NUMBERS),
    *((PET | {name: "0"}, f"{name}=0 is less than 1: {_BY_HAND}")
      for name in ("PET_NNODES", "PET_NPROC_PER_NODE")),
]
# fmt: on


@pytest.mark.parametrize("case", CLUSTERS)
def test_the_cluster_of_an_environment(case: str) -> None:
    env, expected = CLUSTERS[case]
    assert detect_cluster(env) == expected


@pytest.mark.parametrize(("env", "text"), REFUSED)
def test_a_refused_environment_and_its_message(env: dict[str, str], text: str) -> None:
    with pytest.raises(Failure) as refused:
        detect_cluster(env)
    assert (refused.value.exit_code, str(refused.value)) == (2, text)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n[03-05,9],login", "n03"),
        ("n[7,9-12]", "n7"),
        ("gpu-[003-010]-ib,gpu-020-ib", "gpu-003-ib"),
        ("rack[1-2]n[01-04]", "rack1n01"),
    ],
)
def test_the_first_host_of_a_compressed_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host
