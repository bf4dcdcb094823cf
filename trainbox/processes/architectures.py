"""Compare a GPU's compute capability with the architectures that torch is built for."""

from collections.abc import Sequence


def without_code(capability: tuple[int, int], architectures: Sequence[str]) -> str:
    """Return why torch has no code for a GPU, or an empty text.

    Args:
        capability: the GPU's compute capability (major, minor).
        architectures: as torch.cuda.get_arch_list() returns them, such as `sm_80` and `compute_90`.
            Nothing is known without them, so the text is then empty.
    """
    if not architectures or any(_runs(capability, name) for name in architectures):
        return ""
    major, minor = capability
    return (
        f"it has compute capability {major}.{minor}, and the installed torch is built for "
        f"{' '.join(architectures)}"
    )


def _runs(capability: tuple[int, int], name: str) -> bool:
    """Return whether a GPU runs the code of one architecture (CUDA Programming Guide).

    Binary code (`sm`) runs on the same major version from its own minor version on. PTX (`compute`)
    is compiled at its first use, for any later version. Code with an `a` runs only on its own
    version, and PTX with an `f` only on its own major version.
    """
    kind, _, number = name.partition("_")
    digits = number.rstrip("af")
    built = (int(digits[:-1]), int(digits[-1]))
    if number.endswith("a"):
        return capability == built
    later = capability >= built
    return later if kind == "compute" and number == digits else later and capability[0] == built[0]
