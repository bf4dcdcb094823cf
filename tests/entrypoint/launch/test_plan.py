"""The launch decision as tables: the plan of each request on each host, and each refusal."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest

from entrypoint.driver.gpus import Gpu, Unread, labels
from entrypoint.launch.plan import LaunchPlan, plan_launch, plan_script, plan_sweep
from entrypoint.launch.request import Allocation, Cluster, LaunchRequest
from trainbox.errors import DeviceMissing, Failure
from trainbox.processes.environment import Internal, LaunchFacts, launch_facts

# The hosts. A slice `0:1` has the UUID MIG-a1 and its GPU the UUID GPU-a.

NONE: tuple[Gpu, ...] = ()
FOUR = tuple(Gpu(index, f"GPU-{letter}", "H100", 81559) for index, letter in enumerate("abcd"))
ONE, TWO = FOUR[:1], FOUR[:2]
LOST = (FOUR[0], dataclasses.replace(FOUR[1], fault=Unread(15, "GPU is lost")), *FOUR[2:])
# A Hopper and a Volta GPU, and the architectures of a torch without code for Volta.
VOLTA = (
    dataclasses.replace(FOUR[0], capability=(9, 0)),
    dataclasses.replace(FOUR[1], name="Tesla V100", capability=(7, 0)),
)
BUILT = ("sm_75", "sm_90")
SLICES = tuple(
    Gpu(index, f"MIG-{letter}{mig}", "H100 MIG 1g.10gb", 9984, mig, f"GPU-{letter}")
    for index, letter in enumerate("ab")
    for mig in range(3)
)
MIXED = (FOUR[0], *SLICES[3:5])  # one GPU, and two slices of the next

LOCAL = Cluster()
SLURM = Cluster("slurm", rdzv_id="77")
SLURM_2 = Cluster("slurm", 2, 1, "n03:20077", "77")


def kube(nproc: int) -> Cluster:
    return Cluster("kubernetes", nproc_per_node=nproc)


# The arguments after the interpreter.

ALONE = "-P -m trainer train digits"


def standalone(nproc: int) -> str:
    return (
        f"-P -m trainer.programs.ranks.torchrun --standalone --nproc-per-node={nproc} -m -- "
        "trainer train digits"
    )


def meeting(
    rank: int, endpoint: str, job: str, nproc: int, timeout_s: int = 600, await_name: int = 0
) -> str:
    return (
        f"-P -m trainer.programs.ranks.torchrun --nnodes=2 --node-rank={rank} "
        f"--rdzv-endpoint={endpoint} --rdzv-id={job} "
        f"--rdzv-conf=join_timeout={timeout_s},await_name={await_name} "
        f"--nproc-per-node={nproc} -m -- trainer train digits"
    )


def ask(**options: Any) -> LaunchRequest:
    return LaunchRequest(argv=("trainer", "train", "digits"), **options)


def two(
    rank: int | None = 0, endpoint: str | None = "node0:29400", **options: Any
) -> LaunchRequest:
    return ask(nnodes=2, node_rank=rank, rdzv_endpoint=endpoint, **options)


# Request, GPUs of the host, cluster | strategy, GPUs, nodes x processes on each, the arguments if
# there are several nodes, reason.
# fmt: off
PLANS = [
    # Without a GPU in use.
    (ask(), NONE, LOCAL, "single", "none", (1, 1), "no GPU visible -> 1 process on the CPU"),
    (ask(gpus=0), FOUR, LOCAL, "single", "none", (1, 1),
     "4 visible GPU(s) excluded by request -> 1 process on the CPU"),
    (ask(device="cpu"), LOST, LOCAL, "single", "none", (1, 1),
     "4 visible GPU(s) excluded by request -> 1 process on the CPU"),
    (ask(processes=2), NONE, LOCAL, "ddp", "none", (1, 2),
     "2 CPU processes requested -> torchrun DDP over gloo, 2 processes"),
    (ask(strategy="ddp"), NONE, LOCAL, "ddp", "none", (1, 1),
     "no GPU visible -> torchrun DDP over gloo, 1 process"),
    (ask(device="mps"), NONE, LOCAL, "single", "none", (1, 1),
     "no NVIDIA GPU visible -> 1 process on the Apple GPU"),
    # One GPU.
    (ask(), ONE, LOCAL, "single", "0", (1, 1), "1 of 1 GPU visible -> 1 process on GPU 0"),
    (ask(strategy="ddp"), ONE, LOCAL, "ddp", "0", (1, 1),
     "1 of 1 GPU visible -> torchrun DDP, 1 process"),
    # Several GPUs.
    (ask(), FOUR, LOCAL, "ddp", "0 1 2 3", (1, 4),
     "4 of 4 GPUs visible -> torchrun DDP, 4 processes"),
    (ask(gpus=1), FOUR, LOCAL, "single", "0", (1, 1),
     "1 of 4 visible GPUs requested -> 1 process on GPU 0"),
    (ask(gpus=2), FOUR, LOCAL, "ddp", "0 1", (1, 2),
     "2 of 4 visible GPUs requested -> torchrun DDP, 2 processes"),
    (ask(gpu_ids="GPU-d, 0", gpus=2), FOUR, LOCAL, "ddp", "3 0", (1, 2),
     "GPUs 3 0 named, of 4 visible -> torchrun DDP, 2 processes"),
    (ask(strategy="fsdp"), TWO, LOCAL, "fsdp", "0 1", (1, 2),
     "2 of 2 GPUs visible -> torchrun FSDP, 2 processes"),
    (ask(strategy="dp"), TWO, LOCAL, "dp", "0 1", (1, 1),
     "2 of 2 GPUs visible -> DataParallel, 1 process"),
    # A lost GPU does not matter to a plan without it.
    (ask(gpu_ids="0,2,3"), LOST, LOCAL, "ddp", "0 2 3", (1, 3),
     "GPUs 0 2 3 named, of 4 visible -> torchrun DDP, 3 processes"),
    # MIG: a training uses one slice.
    (ask(), SLICES, LOCAL, "single", "0:0", (1, 1),
     "1 of 6 MIG slices visible -> 1 process on GPU 0:0"),
    (ask(gpu_ids="1:2"), SLICES, LOCAL, "single", "1:2", (1, 1),
     "MIG slice 1:2 named, of 6 visible -> 1 process on GPU 1:2"),
    (ask(), MIXED, LOCAL, "single", "0", (1, 1), "1 of 3 GPUs visible -> 1 process on GPU 0"),
    # Several nodes from options.
    (two(network="InfiniBand (mlx5_0)"), ONE, LOCAL, "ddp", "0", (2, 1),
     meeting(0, "node0:29400", "trainbox", 1),
     "1 of 1 GPU visible -> torchrun DDP, 2 processes on 2 nodes; this is node 0, rendezvous at "
     "node0:29400; NCCL over InfiniBand (mlx5_0)"),
    (two(1, rdzv_id="run7", rdzv_timeout_s=90), TWO, LOCAL, "ddp", "0 1", (2, 2),
     meeting(1, "node0:29400", "run7", 2, 90),
     "2 of 2 GPUs visible -> torchrun DDP, 4 processes on 2 nodes; this is node 1, rendezvous at "
     "node0:29400"),
    (two(1, "[fd00::1]:65535", processes=2, network="TCP"), NONE, LOCAL, "ddp", "none", (2, 2),
     meeting(1, "[fd00::1]:65535", "trainbox", 2),
     "2 CPU processes requested -> torchrun DDP over gloo, 4 processes on 2 nodes; this is node 1,"
     " rendezvous at [fd00::1]:65535"),
    # SLURM.
    (ask(), TWO, SLURM_2, "ddp", "0 1", (2, 2), meeting(1, "n03:20077", "77", 2, await_name=1),
     "2 of 2 GPUs visible -> torchrun DDP, 4 processes on 2 nodes; this is node 1, rendezvous at "
     "n03:20077"),
    (two(0, "x:1", rdzv_id="y"), ONE, SLURM_2, "ddp", "0", (2, 1),
     meeting(0, "x:1", "y", 1, await_name=1),
     "1 of 1 GPU visible -> torchrun DDP, 2 processes on 2 nodes; this is node 0, rendezvous at "
     "x:1"),
    (ask(rdzv_endpoint="n03:29400"), TWO, SLURM, "ddp", "0 1", (1, 2),
     "2 of 2 GPUs visible -> torchrun DDP, 2 processes"),
    (ask(nnodes=1), TWO, SLURM_2, "ddp", "0 1", (1, 2),
     "2 of 2 GPUs visible -> torchrun DDP, 2 processes"),
    # Kubernetes.
    (ask(), FOUR, kube(2), "ddp", "0 1", (1, 2),
     "2 of 4 visible GPUs requested -> torchrun DDP, 2 processes"),
    (ask(gpus=1), FOUR, kube(2), "single", "0", (1, 1),
     "1 of 4 visible GPUs requested -> 1 process on GPU 0"),
    (ask(gpu_ids="1,2"), FOUR, kube(2), "ddp", "1 2", (1, 2),
     "GPUs 1 2 named, of 4 visible -> torchrun DDP, 2 processes"),
    (ask(), NONE, kube(2), "ddp", "none", (1, 2),
     "no GPU visible -> torchrun DDP over gloo, 2 processes"),
]

_NOT_HOST_PORT = "is not HOST:PORT: write it as in node0.example:29400"
_NOT_ONE_MACHINE = (
    "is not the address of one machine: give the address by which the other nodes reach node 0, "
    "as in 192.168.1.10:29400"
)
_LOST = (
    "GPU 1 cannot be used (NVML 15: GPU is lost): name others with --gpu-ids, or fix it (reset, "
    "reboot)"
)
_NO_CODE = (
    "torch has no code for GPU 1, Tesla V100 (it has compute capability 7.0, and the installed "
    "torch is built for sm_75 sm_90): use other GPUs, an image whose torch is built for this "
    "architecture, or --device cpu"
)
_ONE_SLICE = (
    "CUDA and NCCL let a process see one slice only; train on one with --gpus 1 or --gpu-ids"
)

# Request, GPUs of the host, cluster | exit code, text.
REFUSALS = [
    # Contradictions about the CPU.
    (ask(gpus=0, gpu_ids="0"), ONE, LOCAL, 2,
     "--gpus 0 and --gpu-ids 0 contradict each other: drop one of them"),
    (ask(strategy="dp", device="cpu"), NONE, LOCAL, 2,
     "--strategy dp splits batches over GPUs, and the CPU is requested: drop one of them"),
    # Nodes.
    (ask(node_rank=1), ONE, LOCAL, 2,
     "node rank 1 of 1 node: add --nnodes with the number of machines"),
    (ask(rdzv_endpoint="node0:29400"), ONE, LOCAL, 2,
     "--rdzv-endpoint node0:29400 and 1 node: add --nnodes with the number of machines"),
    (ask(nnodes=2), ONE, LOCAL, 2,
     "2 nodes requested without a rendezvous endpoint: give each node the address of the "
     "first one, as in --rdzv-endpoint node0.example:29400"),
    *[
        (two(endpoint=given), ONE, LOCAL, 2, f"--rdzv-endpoint {given} {_NOT_HOST_PORT}")
        for given in (
            *("node0", "node0:port", "node0:0", "node0:65536", ":29400", "tcp://node0:29400"),
            *("node\x1b[31m:29400", "*:29400", "[::1:29400", "::1"),
        )
    ],
    *[
        (two(endpoint=f"{host}:70"), ONE, LOCAL, 2, f"--rdzv-endpoint {host}:70 {_NOT_ONE_MACHINE}")
        for host in (
            *("0", "0.0.0.0", "[::]", "::", "0x0.0", "255.255.255.255"),  # noqa: S104
            *("224.0.0.1", "[ff02::1%eth0]"),
        )
    ],
    (two(rank=None), ONE, LOCAL, 2,
     "2 nodes requested without a node rank: add --node-rank 0 here, 1 on the next node, and "
     "so on"),
    (two(rank=2), ONE, LOCAL, 2, "node rank 2 of 2 nodes: ranks count from 0, so the last is 1"),
    # Options that contradict each other.
    (ask(gpus=1, device="cpu"), ONE, LOCAL, 2,
     "--gpus 1 and --device cpu contradict each other: leave out --gpus, or use --processes 1 "
     "for CPU processes"),
    (ask(gpus="all", device="mps"), NONE, LOCAL, 2,
     "--gpus all and --device mps contradict each other: leave out --gpus"),
    *((ask(gpus=count, gpu_ids="0,1"), FOUR, LOCAL, 2,
       f"--gpus {count} and --gpu-ids 0,1 (2 GPUs) differ: drop one of them") for count in (1, 3)),
    (ask(processes=1), FOUR, LOCAL, 2,
     "--processes 1 is for CPU runs, and 4 GPU(s) are in use here: leave out --processes, or "
     "use --device cpu without --gpus"),
    (ask(strategy="dp"), TWO, SLURM_2, 2,
     "--strategy dp works within one machine, and 2 nodes are requested: use --strategy ddp"),
    (ask(strategy="dp"), ONE, LOCAL, 2,
     "--strategy dp needs 2 GPUs or more, found 1: drop --strategy to train on the one"),
    (ask(strategy="fsdp"), ONE, LOCAL, 2,
     "--strategy fsdp needs 2 processes or more, found 1 GPU: drop --strategy "
     "to train on it"),
    # Missing hardware, which is never replaced by the CPU.
    (ask(gpus=9), FOUR, LOCAL, 3,
     "9 GPUs requested, found 4 (0 1 2 3): request at most 4, or use a host with 9"),
    (ask(gpus=3), NONE, LOCAL, 3,
     "--gpus 3 requested, no GPU found: run on a GPU host with its driver, leave out --gpus, "
     "or use --processes 3 for CPU processes"),
    (ask(gpu_ids="0,1"), NONE, LOCAL, 3,
     "--gpu-ids 0,1 requested, no GPU found: run on a GPU host with its driver, or leave out "
     "--gpu-ids"),
    (ask(device="cuda"), NONE, LOCAL, 3,
     "--device cuda requested, no GPU found: run on a GPU host with its driver, or use "
     "--device cpu"),
    (ask(strategy="dp"), NONE, LOCAL, 3,
     "--strategy dp splits batches over GPUs, and none is in use: use a GPU host, or drop "
     "--strategy"),
    (ask(gpu_ids="9"), FOUR, LOCAL, 3,
     "--gpu-ids=9: GPU 9 was not found: choose from the GPUs found (0 1 2 3)"),
    # A lost GPU in the plan.
    (ask(), LOST, LOCAL, 3, _LOST),
    # A GPU that torch has no code for.
    (ask(architectures=BUILT), VOLTA, LOCAL, 3, _NO_CODE),
    # MIG: more than one slice, or a slice and a GPU.
    (ask(gpus="all"), SLICES, LOCAL, 2,
     "6 devices requested, 6 of them MIG slices of one GPU (0:0 0:1 0:2 1:0 1:1 "
     f"1:2): {_ONE_SLICE}"),
    (ask(gpu_ids="0,1:1"), MIXED, LOCAL, 2,
     f"2 devices requested, 1 of them MIG slices (0 1:1): {_ONE_SLICE}"),
]
# fmt: on


@pytest.mark.parametrize("row", PLANS, ids=lambda row: row[-1])
def test_the_plan_of_a_request(row: tuple[Any, ...]) -> None:
    request, gpus, cluster, strategy, used, shape, *argv, reason = row
    plan = plan_launch(request, gpus, cluster)
    assert (plan.strategy, labels(plan.gpus), (plan.nnodes, plan.nproc_per_node)) == (
        strategy,
        used,
        shape,
    )
    alone = standalone(shape[1]) if strategy in ("ddp", "fsdp") else ALONE
    assert " ".join(plan.argv) == f"{sys.executable} {''.join(argv) or alone}"
    assert plan.env["CUDA_VISIBLE_DEVICES"] == ",".join(gpu.uuid for gpu in plan.gpus)
    assert plan.reason == reason


def script(nproc: int, nodes: str = "--standalone") -> str:
    return (
        f"-P -m trainer.programs.ranks.torchrun {nodes} --nproc-per-node={nproc} --no-python -- "
        "trainer train digits"
    )


# A script: request, GPUs, cluster, torchrun | strategy, nodes x processes, argv,
# CUDA_VISIBLE_DEVICES, reason.
# fmt: off
SCRIPTS = [
    (ask(), NONE, LOCAL, True, "torchrun", (1, 1), script(1), "",
     "no GPU visible -> torchrun, 1 process"),
    (ask(), ONE, LOCAL, None, "process", (1, 1), "train digits", "GPU-a",
     "1 of 1 GPU visible -> 1 process"),
    (ask(), FOUR, LOCAL, None, "torchrun", (1, 4), script(4), "GPU-a,GPU-b,GPU-c,GPU-d",
     "4 of 4 GPUs visible -> torchrun, 4 processes"),
    (ask(gpus=2), FOUR, LOCAL, False, "process", (1, 1), "train digits", "GPU-a,GPU-b",
     "2 of 4 visible GPUs requested -> 1 process"),
    (ask(), ONE, SLURM_2, None, "torchrun", (2, 1),
     script(1, "--nnodes=2 --node-rank=1 --rdzv-endpoint=n03:20077 --rdzv-id=77 "
            "--rdzv-conf=join_timeout=600,await_name=1"),
     "GPU-a",
     "1 of 1 GPU visible -> torchrun, 2 processes on 2 nodes; this is node 1, rendezvous at "
     "n03:20077"),
]
SCRIPT_REFUSALS = [
    (ask(processes=2), NONE, LOCAL, False, 2,
     "--no-torchrun and --processes 2 contradict each other: drop one of them"),
    (two(), FOUR, LOCAL, False, 2,
     "--no-torchrun and 2 nodes contradict each other: drop one of them"),
    (ask(gpu_ids="0:0,1:0"), SLICES, LOCAL, None, 2,
     f"2 devices requested, 2 of them MIG slices (0:0 1:0): {_ONE_SLICE}"),
]
# fmt: on


@pytest.mark.parametrize("row", SCRIPTS, ids=lambda row: row[-1])
def test_the_plan_of_a_script(row: tuple[Any, ...]) -> None:
    request, gpus, cluster, torchrun, *expected = row
    plan = plan_script(request, gpus, cluster, torchrun)
    assert [
        plan.strategy,
        (plan.nnodes, plan.nproc_per_node),
        " ".join(plan.argv[1:]),
        plan.env["CUDA_VISIBLE_DEVICES"],
        plan.reason,
    ] == expected
    assert plan.node_rank == (cluster.node_rank or 0)
    assert Internal.LAUNCH not in plan.env  # it is the script's own


# A sweep: request, trials per GPU, GPUs | slots (name and CUDA_VISIBLE_DEVICES), threads per slot,
# device, reason.
# fmt: off
SWEEPS = [
    (ask(cpus=8, gpus=2), 2, FOUR,
     [["GPU 0", "GPU-a"], ["GPU 0", "GPU-a"], ["GPU 1", "GPU-b"], ["GPU 1", "GPU-b"]], "2", "cuda",
     "2 of 4 visible GPUs requested -> sweep, 2 trials on each"),
    (ask(cpus=2, gpu_ids="3"), 1, FOUR, [["GPU 3", "GPU-d"]], "2", "cuda",
     "GPU 3 named, of 4 visible -> sweep"),
    (ask(cpus=2), 1, SLICES[:2], [["GPU 0:0", "MIG-a0"], ["GPU 0:1", "MIG-a1"]], "1", "cuda",
     "2 of 2 MIG slices visible -> sweep"),
    (ask(cpus=3), 1, NONE, [["CPU slot 0", ""], ["CPU slot 1", ""], ["CPU slot 2", ""]], "1", "cpu",
     "no GPU visible -> sweep, 3 slots"),
    (ask(cpus=4, device="mps"), 1, NONE, [["Apple GPU slot 0", ""]], "4", "mps",
     "no NVIDIA GPU visible -> sweep, 1 slot"),
    (ask(cpus=4, processes=2), 1, NONE, [["CPU slot 0", ""], ["CPU slot 1", ""]], "2", "cpu",
     "2 CPU processes requested -> sweep, 2 slots"),
]
# Request, GPUs, trials per GPU | exit code, text.
SWEEP_REFUSALS = [
    (ask(processes=2), ONE, 1, 2,
     "--processes 2 is for CPU slots, and 1 GPU(s) are in use: use --per-gpu"),
    (ask(), NONE, 3, 2,
     "--per-gpu 3: no GPU is in use; --processes N sets the number of CPU slots"),
]
# fmt: on


@pytest.mark.parametrize("row", SWEEPS, ids=lambda row: row[-1])
def test_the_slots_of_a_sweep(row: tuple[Any, ...]) -> None:
    request, per_gpu, gpus, *expected = row
    plan = plan_sweep(request, gpus, per_gpu)
    env, facts = plan.env, launch_facts(plan.env)
    assert plan.argv == (sys.executable, "-P", "-m", "trainer", "train", "digits")
    assert [
        facts.slots,
        env["OMP_NUM_THREADS"],
        facts.device,
        plan.reason,
    ] == expected
    assert (str(facts.cpus), facts.strategy) == (env["OMP_NUM_THREADS"], "single")


@pytest.mark.parametrize(
    ("plan", "row"),
    [
        *((plan_launch, row) for row in REFUSALS),
        *((plan_script, row) for row in SCRIPT_REFUSALS),
        *((plan_sweep, row) for row in SWEEP_REFUSALS),
    ],
    ids=lambda value: value.__name__ if callable(value) else value[-1],
)
def test_a_refused_request_and_its_message(
    plan: Callable[..., LaunchPlan], row: tuple[Any, ...]
) -> None:
    *request, code, text = row
    with pytest.raises(Failure) as refused:
        plan(*request)
    assert (refused.value.exit_code, str(refused.value)) == (code, text)


@pytest.mark.parametrize(
    ("request_", "gpus", "threads", "device", "strategy"),
    [
        (ask(cpus=8), NONE, "8", "cpu", "single"),
        (ask(cpus=8), FOUR, "2", "cuda", "ddp"),
        (ask(cpus=3), FOUR, "1", "cuda", "ddp"),
        (ask(cpus=8, strategy="dp"), FOUR, "8", "cuda", "dp"),
        (ask(cpus=9, processes=2), NONE, "4", "cpu", "ddp"),
        (ask(cpus=8, omp_num_threads=5), FOUR, "5", "cuda", "ddp"),
        (ask(cpus=8, device="mps"), NONE, "8", "mps", "single"),
    ],
)
def test_the_environment_of_a_plan(
    request_: LaunchRequest, gpus: tuple[Gpu, ...], threads: str, device: str, strategy: str
) -> None:
    plan = plan_launch(request_, gpus, LOCAL)
    assert plan.env == {
        "CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in gpus),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
        "MALLOC_TRIM_THRESHOLD_": "2147483647",
        **LaunchFacts(device, strategy, plan.reason, cpus=request_.cpus).variable(),
    }


@pytest.mark.parametrize(
    "asked", [{"gpus": 1}, {"gpus": "all"}, {"gpu_ids": "0"}, {}], ids=["1", "all", "ids", "none"]
)
def test_a_scheduler_that_wants_more_processes_than_gpus_gets_no_smaller_job(
    asked: dict[str, Any],
) -> None:
    with pytest.raises(DeviceMissing, match="^PET_NPROC_PER_NODE=2 and 1 GPU"):
        plan_launch(ask(**asked), ONE, kube(2))


@pytest.mark.parametrize("gpus", [(), ONE])
def test_fewer_gpus_than_are_allocated_are_no_smaller_job(gpus: tuple[Gpu, ...]) -> None:
    given = {"allocation": Allocation("SLURM_GPUS_ON_NODE=2", 2, "check the driver")}
    with pytest.raises(DeviceMissing) as refused:
        plan_launch(ask(**given), gpus, SLURM)
    assert str(refused.value) == (
        f"SLURM_GPUS_ON_NODE=2 and {len(gpus)} GPU(s) found: check the driver"
    )
    assert plan_launch(ask(device="cpu", **given), (), SLURM).gpus == ()
    assert len(plan_launch(ask(gpus=len(gpus), **given), gpus, SLURM).gpus) == len(gpus)
    assert len(plan_launch(ask(**given), TWO, SLURM).gpus) == 2


def test_a_job_of_several_hosts_that_starts_only_here_is_named() -> None:
    text = "; the job of PBS has 2 hosts, and only this one trains (--nnodes)"
    asked = ask(hosts="PBS has 2 hosts")
    for plan in (plan_launch(asked, ONE, Cluster()), plan_sweep(asked, ONE, per_gpu=1)):
        assert plan.reason.endswith(text)
    assert text not in plan_launch(dataclasses.replace(asked, nnodes=1), ONE, Cluster()).reason


def test_all_gpus_are_all_that_are_allocated() -> None:
    of_two = Allocation("SLURM_GPUS_ON_NODE=2", 2)
    with pytest.raises(DeviceMissing, match=r"^SLURM_GPUS_ON_NODE=2 and 1 GPU\(s\) found"):
        plan_launch(ask(gpus="all", allocation=of_two), ONE, SLURM)
    assert len(plan_launch(ask(gpus="all", allocation=of_two), TWO, SLURM).gpus) == 2


@pytest.mark.parametrize("gpus", [(), ONE])
def test_a_sweep_does_not_use_fewer_gpus_than_are_allocated(gpus: tuple[Gpu, ...]) -> None:
    given = {"allocation": Allocation("SLURM_GPUS_ON_NODE=2", 2)}
    with pytest.raises(DeviceMissing, match=r"^SLURM_GPUS_ON_NODE=2 and . GPU\(s\) found"):
        plan_sweep(ask(**given), gpus, per_gpu=1)
    assert len(plan_sweep(ask(gpus=1, **given), ONE, per_gpu=1).gpus) == 1


def test_gpus_of_the_job_that_may_be_elsewhere_are_named() -> None:
    given = {"allocation": Allocation("SLURM_GPUS=8")}
    reason = "no GPU visible, although SLURM_GPUS=8 -> 1 process on the CPU"
    assert plan_launch(ask(**given), (), SLURM).reason == reason
    assert "SLURM_GPUS" not in plan_launch(ask(device="cpu", **given), (), SLURM).reason
    assert "SLURM_GPUS" not in plan_launch(ask(**given), ONE, SLURM).reason
