"""The cluster that an environment describes: SLURM, Kubernetes or none."""

import pytest

from entrypoint.launch.request import (
    Cluster,
    allocation_of,
    detect_cluster,
    first_host,
    hosts_of_job,
)
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

_IN_JOB, _IN_STEP = {"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
# Environment -> the variable that allocates GPUs, and how many must be here; None without one.
ALLOCATIONS: dict[str, tuple[dict[str, str], tuple[str, int] | None]] = {
    "none": ({}, None),
    "slurm counts": (_IN_JOB | {"SLURM_GPUS_ON_NODE": "4"}, ("SLURM_GPUS_ON_NODE=4", 4)),
    "slurm counts none": (_IN_JOB | {"SLURM_GPUS_ON_NODE": "0", "SLURM_GPUS": "2"}, None),
    "slurm has a batch script": (
        _IN_JOB | {"SLURM_JOB_GPUS": "0,3"}, ("SLURM_JOB_GPUS=0,3", 2)),
    "slurm names a shared GPU for each task": (
        _IN_STEP | {"SLURM_STEP_GPUS": "0,0,1"}, ("SLURM_STEP_GPUS=0,0,1", 2)),
    "slurm has a step": (
        _IN_STEP | {"SLURM_STEP_GPUS": "2", "SLURM_JOB_GPUS": "0,1"}, ("SLURM_STEP_GPUS=2", 1)),
    "a step may have no GPU of its job": (
        _IN_STEP | {"SLURM_JOB_GPUS": "0,1"}, ("SLURM_JOB_GPUS=0,1", 0)),
    "salloc on a login node": (
        _IN_JOB | {"SLURM_GPUS_PER_NODE": "h100:2"}, ("SLURM_GPUS_PER_NODE=h100:2", 0)),
    "a total": (_IN_JOB | {"SLURM_GPUS": "8"}, ("SLURM_GPUS=8", 0)),
    "no total": (_IN_JOB | {"SLURM_GPUS": "0"}, None),
    "gpus of a task": (
        _IN_JOB | {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=2"},
        ("SLURM_TRES_PER_TASK=cpu=4,gres/gpu=2", 0)),
    "cpus of a task": (_IN_JOB | {"SLURM_TRES_PER_TASK": "cpu=4"}, None),
    "without a job": ({"SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_GPUS": "0", "SLURM_GPUS": "1"}, None),
    "a container": ({"NVIDIA_VISIBLE_DEVICES": "0,1"}, ("NVIDIA_VISIBLE_DEVICES=0,1", 1)),
    "a container with a slice": (
        {"NVIDIA_VISIBLE_DEVICES": "0:1"}, ("NVIDIA_VISIBLE_DEVICES=0:1", 1)),
    "a container with a UUID": (
        {"NVIDIA_VISIBLE_DEVICES": "GPU-8f3a,MIG-1/2"},
        ("NVIDIA_VISIBLE_DEVICES=GPU-8f3a,MIG-1/2", 1)),
    **{
        f"an image with {value}": ({"NVIDIA_VISIBLE_DEVICES": value}, None)
        for value in ("all", "none", "void", "", "/var/run/nvidia-container-devices")
    },
    **{
        f"CUDA_VISIBLE_DEVICES={value}": (
            _IN_JOB
            | {"SLURM_GPUS_ON_NODE": "4", "NVIDIA_VISIBLE_DEVICES": "0", "SLURM_JOB_GPUS": "0"}
            | {"CUDA_VISIBLE_DEVICES": value},
            None)
        for value in ("", "1")
    },
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


@pytest.mark.parametrize("case", ALLOCATIONS)
def test_the_allocation_of_an_environment(case: str) -> None:
    env, expected = ALLOCATIONS[case]
    found = allocation_of(env)
    assert (found and (found.named, found.least)) == expected


@pytest.mark.parametrize(
    ("env", "node_file", "said"),
    [
        ({"PBS_JOBID": "7.srv"}, "h1\nh1\nh2\nh2\n", "PBS has 2 hosts"),
        ({"PBS_JOBID": "7.srv"}, "h1\nh1\n", ""),
        ({}, "h1\nh2\n", ""),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "h1 8 h2 8 h3 1"}, "", "LSF has 3 hosts"),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "h1 8"}, "", ""),
        ({"JOB_ID": "7", "NHOSTS": "2"}, "", "Grid Engine has 2 hosts"),
        ({"JOB_ID": "7", "NHOSTS": "1"}, "", ""),
        ({"NHOSTS": "many"}, "", ""),
    ],
)
def test_the_hosts_of_a_job(env: dict[str, str], node_file: str, said: str) -> None:
    assert hosts_of_job(env, node_file) == said


@pytest.mark.parametrize("value", ["x", "-1"])
def test_a_malformed_number_of_gpus_is_refused(value: str) -> None:
    with pytest.raises(Failure, match=rf"^SLURM_GPUS_ON_NODE='{value}' is not a whole number"):
        allocation_of(_IN_JOB | {"SLURM_GPUS_ON_NODE": value})


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


@pytest.mark.parametrize(
    ("env", "remedy"),
    [
        (
            {"NVIDIA_VISIBLE_DEVICES": "0,1"},
            "start the container with its GPUs (docker run --gpus), or use --device cpu",
        ),
        (
            _IN_JOB | {"SLURM_JOB_GPUS": "0,1"},
            "check the driver of this node, or request fewer with --gpus N, or --device cpu",
        ),
        (
            _IN_JOB | {"SLURM_GPUS_ON_NODE": "2", "NVIDIA_VISIBLE_DEVICES": "0"},
            "check the driver of this node, or request fewer with --gpus N, or --device cpu",
        ),
    ],
)
def test_the_remedy_for_missing_gpus_is_for_what_allocates_them(
    env: dict[str, str], remedy: str
) -> None:
    allocation = allocation_of(env)
    assert allocation is not None
    assert allocation.missing(0) == f"{allocation.named} and 0 GPU(s) found: {remedy}"
    assert allocation.missing(2) is None
