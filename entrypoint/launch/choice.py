"""Choose the GPUs and the number of processes of a launch. Pure."""

from collections.abc import Sequence

from entrypoint.driver.gpus import Gpu, labels, select
from entrypoint.launch.request import Cluster, LaunchRequest, wants_all_allocated
from trainbox.errors import DeviceMissing, WrongUse


def choose_gpus(
    request: LaunchRequest, gpus: Sequence[Gpu], cluster: Cluster
) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs to use, and a text with the requested and the found GPUs or processes.

    Raises:
        WrongUse: the request contradicts itself.
        DeviceMissing: requested GPUs are missing or cannot be used. The CPU never replaces them.
    """
    chosen, how = _choose(request, gpus, cluster)
    _refuse_unusable(chosen, request.architectures)
    return chosen, _described(chosen, gpus, how, request)


def _choose(
    request: LaunchRequest, gpus: Sequence[Gpu], cluster: Cluster
) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs to use, and how they were chosen: "requested", "named" or "visible"."""
    count = cluster.nproc_per_node if request.gpus is None and gpus else request.gpus
    wanted, instead = _wanted(request)
    if request.device in ("cpu", "mps"):
        if wanted:
            remedy = instead.removeprefix("or ")
            raise WrongUse(
                f"{wanted} and --device {request.device} contradict each other: {remedy}"
            )
        return (), "visible"
    if wanted and count == 0:
        raise WrongUse(f"--gpus 0 and {wanted} contradict each other: drop one of them")
    if wanted and not gpus:
        raise DeviceMissing(
            f"{wanted} requested, no GPU found: run on a GPU host with its driver, {instead}"
        )
    if count != 0:
        _refuse_smaller_job(request, len(gpus), cluster)
    if request.gpu_ids:
        named = select(gpus, request.gpu_ids, "--gpu-ids")
        if isinstance(count, int) and count != len(named):
            raise WrongUse(
                f"--gpus {count} and --gpu-ids {request.gpu_ids} ({len(named)} GPUs) differ: drop "
                "one of them"
            )
        return named, "named"
    if isinstance(count, int) and count > 0:
        if count > len(gpus):
            raise DeviceMissing(
                f"{count} GPUs requested, found {len(gpus)} ({labels(gpus)}): request at most "
                f"{len(gpus)}, or use a host with {count}"
            )
        return tuple(gpus[:count]), "requested"
    if count == 0:
        return (), "visible"
    if count is None and any(gpu.mig_parent for gpu in gpus):
        return tuple(gpus[:1]), "visible"  # a training can use only one MIG slice
    return tuple(gpus), "visible"


def _refuse_smaller_job(request: LaunchRequest, found: int, cluster: Cluster) -> None:
    """Raise DeviceMissing if a scheduler has given the job more GPUs than were found."""
    if found and (decided := cluster.nproc_per_node or 0) > found:
        raise DeviceMissing(
            f"PET_NPROC_PER_NODE={decided} and {found} GPU(s): set numProcPerNode of the TrainJob "
            "to the number of GPUs that each pod requests"
        )
    wants_all = wants_all_allocated(request.gpus, request.gpu_ids)
    if wants_all and request.allocation and (missing := request.allocation.missing(found)):
        raise DeviceMissing(missing)


def _wanted(request: LaunchRequest) -> tuple[str, str]:
    """Return the option that requests GPUs, if there is one, and what to do without GPUs."""
    if request.gpu_ids:
        return f"--gpu-ids {request.gpu_ids}", "or leave out --gpu-ids"
    if request.gpus == "all":
        return "--gpus all", "or leave out --gpus"
    if request.gpus:
        processes = f"--processes {request.gpus}"
        return f"--gpus {request.gpus}", f"leave out --gpus, or use {processes} for CPU processes"
    return ("--device cuda", "or use --device cpu") if request.device == "cuda" else ("", "")


def processes_of(request: LaunchRequest, chosen: Sequence[Gpu], cluster: Cluster) -> int:
    """Return the number of processes on this node: one for each GPU of `chosen`.

    Raises:
        WrongUse: CPU processes are requested, and GPUs are in use.
    """
    if chosen:
        if request.processes not in (None, len(chosen)):
            raise WrongUse(
                f"--processes {request.processes} is for CPU runs, and {len(chosen)} GPU(s) are in "
                "use here: leave out --processes, or use --device cpu without --gpus"
            )
        return len(chosen)
    if request.processes is not None:
        return request.processes
    return cluster.nproc_per_node or 1


def _refuse_unusable(chosen: Sequence[Gpu], architectures: Sequence[str]) -> None:
    """Raise DeviceMissing for a broken GPU, or if torch, built for `architectures`, has no code."""
    if chosen:
        from trainbox.processes.architectures import without_code  # takes a millisecond
    for gpu in chosen:
        if gpu.fault:
            raise DeviceMissing(
                f"GPU {gpu.label} cannot be used ({gpu.fault}): name others with --gpu-ids, or fix "
                "it (reset, reboot)"
            )
        if gpu.capability and (reason := without_code(gpu.capability, architectures)):
            raise DeviceMissing(
                f"torch has no code for GPU {gpu.label}, {gpu.name} ({reason}): use other GPUs, an "
                "image whose torch is built for this architecture, or --device cpu"
            )


def refuse_mig_groups(chosen: Sequence[Gpu]) -> None:
    """Raise WrongUse for several MIG slices: CUDA shows a process one slice only."""
    slices = [gpu for gpu in chosen if gpu.mig_parent]
    if slices and len(chosen) > 1:
        same = "of one GPU " if len({gpu.mig_parent for gpu in slices}) < len(slices) else ""
        raise WrongUse(
            f"{len(chosen)} devices requested, {len(slices)} of them MIG slices "
            f"{same}({labels(chosen)}): CUDA and NCCL let a process see one slice only; train on "
            "one with --gpus 1 or --gpu-ids"
        )


def _described(
    chosen: Sequence[Gpu], visible: Sequence[Gpu], how: str, request: LaunchRequest
) -> str:
    if chosen:
        kind = "MIG slice" if chosen[0].mig_parent else "GPU"
        noun, named = (kind if len(some) == 1 else f"{kind}s" for some in (visible, chosen))
        of_them = f"{len(chosen)} of {len(visible)}"
        return {
            "requested": f"{of_them} visible {noun} requested",
            "named": f"{named} {labels(chosen)} named, of {len(visible)} visible",
            "visible": f"{of_them} {noun} visible",
        }[how]
    if request.processes:
        return f"{count_of(request.processes, 'CPU process')} requested"
    if visible:
        return f"{len(visible)} visible GPU(s) excluded by request"
    if request.device is None and request.gpus is None and request.allocation:
        return f"no GPU visible, although {request.allocation.named}"
    return "no NVIDIA GPU visible" if request.device == "mps" else "no GPU visible"


def count_of(number: int, kind: str) -> str:
    """Return `1 process` or `2 processes`."""
    return f"{number} {kind}{'es' if number > 1 else ''}"
