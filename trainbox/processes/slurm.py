"""The variables that SLURM sets for each process of a step."""

from collections.abc import Mapping


def as_slurm_task(
    env: Mapping[str, str],
    rank: int = 0,
    local_rank: int = 0,
    node_rank: int = 0,
    world_size: int = 1,
    local_world_size: int = 1,
    nnodes: int = 1,
) -> dict[str, str]:
    """Return `env` with the variables that srun would set for this process of a launch.

    Outside of a SLURM job, nothing changes. The variables of the job and of its array stay, and so
    does the number of a step, which MPI reads. Lightning and other libraries take the rank and the
    number of processes from these variables, or compare them with their own settings.
    """
    if not {"SLURM_JOB_ID", "SLURM_PROCID"} & env.keys():
        return dict(env)
    first = rank - local_rank
    values: dict[str, int | str | None] = {
        "PROCID": rank,
        "LOCALID": local_rank,
        "NODEID": node_rank,
        "NTASKS": world_size,
        "NPROCS": world_size,
        "NTASKS_PER_NODE": local_world_size,
        "NNODES": nnodes,
        "STEP_NUM_NODES": nnodes,
        "STEP_NUM_TASKS": world_size,
        "GTIDS": ",".join(map(str, range(first, first + local_world_size))),
    }
    each = f"{local_world_size}(x{nnodes})" if nnodes > 1 else local_world_size
    is_known = world_size == local_world_size * nnodes  # another node may have more GPUs
    values |= dict.fromkeys(("TASKS_PER_NODE", "STEP_TASKS_PER_NODE"), each if is_known else None)
    named = {f"SLURM_{name}": value for name, value in values.items()}
    kept = {name: value for name, value in env.items() if name not in named}
    return kept | {name: str(value) for name, value in named.items() if value is not None}
