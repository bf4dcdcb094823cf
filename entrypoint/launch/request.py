"""What the user asks a launch for."""

from collections.abc import Mapping
from dataclasses import dataclass

from trainbox.contract.options import RDZV_TIMEOUT_S


@dataclass(frozen=True)
class LaunchRequest:
    """The user's launch options; None for each that was not given.

    Attributes:
        argv: the module that each process runs and its arguments, such as `trainer train digits`.
        cpus: the number of CPUs that this container may use.
        gpus: a count, or "all".
        architectures: the GPU architectures that torch is built for; empty if they are not known.
        network: the network that NCCL uses between nodes; empty if GPUs were not examined.
        settings: where the settings come from that are not on the command line, to be shown.
        config_file: the `name` and the `sha256` of the experiment's file.
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
    network: str = ""
    settings: str = ""
    config_file: Mapping[str, str] | None = None
