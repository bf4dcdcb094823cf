"""NVIDIA's Xid numbers, by what a training must do about them.

The texts and the grouping follow the immediate action of NVIDIA's Xid catalogue
(docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html), which is the second column below.
"""

from entrypoint.health.verdict import Result

RESET = {  # RESET_GPU, and the workflows of 48 and 74, which begin with a reset
    46: "the GPU stopped processing",
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    64: "row remapping or page retirement failed to be recorded",
    74: "NVLink error",
    95: "uncontained ECC error",
    109: "context switch timeout",
    110: "security fault",
    119: "the GPU's system processor did not answer",
    120: "error of the GPU's system processor",
    136: "NVLink training failed",
    140: "unrecovered ECC error",
    143: "the GPU did not initialize",
    155: "NVLink went down by software",
    156: "a resource of the GPU was retired, which needs a reset",
    158: "fatal timeout of the GPU",
}
REBOOT = {  # RESTART_BM, RESTART_VM
    79: "the GPU has fallen off the bus",
    151: "key rotation error of confidential computing",
}
# WORKFLOW_NVLINK5_ERR: the action depends on an error status that NVML does not report. So the
# state of the links decides.
LINK = {
    144: "NVLink error (SAW)",
    145: "NVLink error (RLW)",
    146: "NVLink error (TLW)",
    147: "NVLink error (TREX)",
    148: "NVLink error (NVLPW_CTRL)",
    149: "NVLink error (NETIR)",
    150: "NVLink error (MSE)",
}
PROGRAM = {  # RESTART_APP
    8: "the GPU stopped processing",
    11: "invalid or corrupted push buffer stream",
    13: "graphics engine exception",
    25: "invalid or illegal push buffer stream",
    31: "GPU memory page fault",
    32: "invalid or corrupted push buffer stream",
    **dict.fromkeys((39, 40, 41), "copy engine exception"),
    60: "security processor exception",
    68: "video decoder exception",
    69: "graphics engine class error",
    **dict.fromkeys((70, 71, 72, 75, 76, 77, 85, *range(126, 136)), "copy engine error"),
    80: "corrupted data sent to the GPU",
    **dict.fromkeys((82, *range(99, 105)), "JPEG decoder error"),
    **dict.fromkeys((83, 84, 88, 89, 96, 97, 98), "video decoder error"),
    **dict.fromkeys((86, 139), "optical flow error"),
    94: "contained ECC error",
}
INSPECT = {  # CHECK_MECHANICALS, CONTACT_SUPPORT, and failures that do not stop a program
    54: "auxiliary power is not connected",
    142: "video encoder error",
    157: "a resource of the GPU could not be retired",
    161: "a memory channel could not be retired",
}
NOTE = {  # IGNORE, and entries that only explain another Xid
    **dict.fromkeys((37, 38), "driver firmware error"),
    43: "the GPU stopped processing a program's work",
    44: "graphics engine fault during a context switch",
    45: "a program's work was cleaned up",
    63: "row remapping or page retirement recorded",
    **dict.fromkeys((66, 67), "illegal access by the driver"),
    92: "high rate of single-bit ECC errors",
    93: "wear limit of the InfoROM",
    **dict.fromkeys((106, 107), "test message"),
    121: "corrected errors of the link to the CPU",
    137: "NVLink privilege error of a program",
    141: "CUDA fast path error",
    154: "the recovery action has changed",
    160: "a memory channel was retired",
    **dict.fromkeys((171, 172), "details of Xid 48"),
}


def xid_result(xid: int, links_down: bool = False) -> tuple[Result, str, str]:
    """Return (result, meaning, action) of an Xid. An unknown Xid is a warning, never INFO.

    With `links_down`, an NVLink of the GPU is down.
    """
    if xid in LINK:
        if links_down:
            return Result.CRITICAL, f"{LINK[xid]}, and a link is down", "reset_gpu"
        return Result.WARN, f"{LINK[xid]}, and no link is known to be down", "inspect"
    groups = (
        (RESET, Result.CRITICAL, "reset_gpu"),
        (REBOOT, Result.CRITICAL, "reboot"),
        (PROGRAM, Result.WARN, "restart_app"),
        (INSPECT, Result.WARN, "inspect"),
        (NOTE, Result.INFO, ""),
    )
    for meanings, result, action in groups:
        if xid in meanings:
            return result, meanings[xid], action
    return Result.WARN, "not in Trainbox's list", "inspect"
