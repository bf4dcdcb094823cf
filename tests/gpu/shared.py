"""Start several ranks of one training on one GPU."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.gpu.check import Check
from tests.support.commands import Ended
from trainbox.processes.environment import Internal, LaunchFacts

# Of NCCL 2.30 and later: several ranks may use one GPU, without NVLink SHARP and with few blocks,
# so that the kernels of all ranks fit on the GPU at the same time.
NCCL = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}
NCCL_SINCE = (2, 30)


def rank_environment(
    rank: int, ranks: int, store: Path, strategy: str, device: str, backend: str
) -> dict[str, str]:
    """Return the variables of one rank, as the launcher and torchrun set them."""
    common = {
        **LaunchFacts(device, strategy).variable(),
        "OMP_NUM_THREADS": "1",
        "SHARED_BACKEND": backend,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        Internal.STORE: str(store),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    return common | (NCCL if backend == "nccl" and ranks > 1 else {})


def start(
    check: Check,
    ranks: int,
    *words: str,
    backend: str = "gloo",
    strategy: str = "ddp",
    of_rank: Mapping[int, Mapping[str, str]] | None = None,
    env: Mapping[str, str] | None = None,
) -> list["subprocess.Popen[str]"]:
    """Start `trainer train ARGUMENTS` on each rank; `of_rank` has further variables by rank."""
    store = check.folder / f"store-{len(list(check.folder.glob('store-*')))}"
    store.touch()
    store.unlink()
    (check.folder / f"{store.name}.made").touch()
    return [
        check.start(
            *("-m", "tests.gpu.programs.rank", "train", *words),
            env=rank_environment(rank, ranks, store, strategy, check.device, backend)
            | dict(env or {})
            | dict((of_rank or {}).get(rank, {})),
            name=f"rank-{rank}",
        )
        for rank in range(ranks)
    ]


def run(check: Check, ranks: int, *words: str, **options: object) -> list[Ended]:
    """Train on `ranks` ranks, which must all succeed."""
    return [check.finish(process) for process in start(check, ranks, *words, **options)]  # type: ignore[arg-type]


def killed(check: Check, processes: Sequence["subprocess.Popen[str]"], first: int) -> list[int]:
    """Return the exit codes of ranks of which rank `first` kills itself.

    torchrun would kill the other ranks, so this does.
    """
    check.finish(processes[first], codes=(-9,))
    for process in processes:
        process.kill()
    return [process.wait() for process in processes]


def nccl_shares_a_gpu(version: str) -> bool:
    """Return whether NCCL of this version accepts several ranks on one GPU."""
    return tuple(int(part) for part in version.split(".")[:2]) >= NCCL_SINCE
