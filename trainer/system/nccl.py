"""The version of NCCL."""


def nccl_version() -> str | None:
    """Return the version of NCCL, or None if torch is built without it, as NVIDIA's for Jetson."""
    import torch

    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except AttributeError:
        return None
