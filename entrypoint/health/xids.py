"""NVIDIA's Xid numbers, by their meaning for a training.

The numbers and texts are from NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors). The
grouping follows NVIDIA Health Validation and the list of the k8s-device-plugin.
"""

from entrypoint.health.verdict import Result

FATAL = {
    46: "the GPU stopped processing",
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    64: "row remapping or page retirement failed to be recorded",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "uncontained ECC error",
    119: "the GPU's system processor did not answer",
    120: "error of the GPU's system processor",
    140: "unrecovered ECC error",
    143: "the GPU did not initialize",
}
PROGRAM = {
    8: "the GPU stopped processing",
    11: "invalid or corrupted push buffer stream",
    13: "graphics engine exception",
    25: "invalid or illegal push buffer stream",
    31: "GPU memory page fault",
    32: "invalid or corrupted push buffer stream",
    39: "copy engine exception",
    40: "copy engine exception",
    41: "copy engine exception",
    69: "graphics engine class error",
    94: "contained ECC error",
}
NOTE = {
    43: "the GPU stopped processing a program's work",
    45: "a program's work was cleaned up",
    63: "row remapping or page retirement recorded",
    68: "video processor exception",
    92: "high rate of single-bit ECC errors",
    109: "context switch timeout",
    154: "the recovery action has changed",
}


def xid_result(xid: int) -> tuple[Result, str, str]:
    """Return (result, meaning, action) of an Xid. An unknown Xid is a warning."""
    if xid in FATAL:
        return Result.CRITICAL, FATAL[xid], "reset_gpu"
    if xid in PROGRAM:
        return Result.WARN, PROGRAM[xid], "restart_app"
    if xid in NOTE:
        return Result.INFO, NOTE[xid], ""
    return Result.WARN, "not in Trainbox's list", "inspect"
