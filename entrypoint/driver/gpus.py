"""GPUs as values, and how people name them: pure, no driver."""

from collections.abc import Sequence
from dataclasses import dataclass

from entrypoint.errors import HardwareMissing, InvalidRequest


@dataclass(frozen=True)
class Gpu:
    """One device that a process can compute on: a whole GPU, or a MIG slice of one.

    `index` is NVML's, which is the order of the PCI bus and of nvidia-smi; `memory_mib` is the
    total. A slice carries its own `uuid`, its position `mig_index` on its GPU, and the GPU's uuid
    as `mig_parent`. `fault` says why a GPU that the driver lists cannot be used; `fault_code` is
    NVML's number for it, if it has one.
    """

    index: int
    uuid: str
    name: str
    memory_mib: int
    mig_index: int | None = None
    mig_parent: str | None = None
    fault: str | None = None
    fault_code: int | None = None

    @property
    def label(self) -> str:
        """The short name people may use for it: `2`, or `2:1` for the second slice of GPU 2."""
        return f"{self.index}" if self.mig_index is None else f"{self.index}:{self.mig_index}"


def labels(gpus: Sequence[Gpu]) -> str:
    return " ".join(gpu.label for gpu in gpus) or "none"


def select(gpus: Sequence[Gpu], ids: str, source: str) -> tuple[Gpu, ...]:
    """The GPUs that `ids` names, in its order: indices, slices as `0:1`, UUIDs or unique beginnings
    of them.

    `source` is what the list came from (`--gpu-ids`), for the message.

    Raises:
        InvalidRequest: malformed, named twice or ambiguous; torch would use fewer GPUs silently.
        HardwareMissing: well-formed, but no such GPU here.
    """
    chosen: list[Gpu] = []
    for position, word in enumerate(ids.split(","), start=1):
        gpu = _find(gpus, word.strip(), f"{source}={ids}", position)
        if gpu in chosen:
            raise InvalidRequest(f"{source}={ids} names GPU {gpu.label} twice: name each GPU once")
        chosen.append(gpu)
    return tuple(chosen)


def _find(gpus: Sequence[Gpu], word: str, asked: str, position: int) -> Gpu:
    if not word:
        raise InvalidRequest(
            f"{asked}: entry {position} is empty: write indices or UUIDs with single "
            "commas, as in 0,2"
        )
    if word.startswith(("GPU-", "MIG-")):
        matches = [gpu for gpu in gpus if gpu.uuid.startswith(word)]
        if len(matches) > 1:
            raise InvalidRequest(
                f"{asked}: {word} fits {len(matches)} GPUs ({labels(matches)}): write "
                "more of the UUID"
            )
    elif all(part.isascii() and part.isdigit() for part in word.split(":", 1)):
        matches = [gpu for gpu in gpus if word in (gpu.label, f"{gpu.index}")]
        if len(matches) > 1:
            raise InvalidRequest(
                f"{asked}: GPU {word} is cut into MIG slices {labels(matches)}: name one "
                f"slice, as in {matches[0].label}"
            )
    else:
        raise InvalidRequest(
            f"{asked}: '{word}' is no GPU: write indices or UUIDs separated by commas, as "
            "in 0,2 or GPU-8f3a"
        )
    if not matches:
        raise HardwareMissing(f"{asked}: no GPU {word} here; found {len(gpus)}: {labels(gpus)}")
    return matches[0]


def visible_gpus(gpus: Sequence[Gpu], cuda_visible_devices: str | None) -> tuple[Gpu, ...]:
    """The GPUs left by CUDA_VISIBLE_DEVICES: unset means all; empty, `-1` and SLURM's `NoDevFiles`
    mean none.

    Integers count in NVML's order; the plan therefore also sets CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Raises:
        InvalidRequest, HardwareMissing: as `select`.
    """
    if cuda_visible_devices is None:
        return tuple(gpus)
    if cuda_visible_devices.strip() in ("", "-1", "NoDevFiles", "none", "void"):
        return ()
    return select(gpus, cuda_visible_devices, "CUDA_VISIBLE_DEVICES")
