"""Judge how a GPU is set up, and which programs use it."""

from entrypoint.driver.gpus import Unread
from entrypoint.health.limits import SOURCES, Limits
from entrypoint.health.rules.rule import USUAL, Judgement, Rule, Values, at_threshold
from entrypoint.health.verdict import Mode, Result


def _inforom(values: Values, _limits: Limits) -> Judgement:
    return Judgement(Result.PASS, f"version {values['inforom']}", "intact")


def _persistence(values: Values, _limits: Limits) -> Judgement:
    on = values["persistence"]
    read = "on" if on else "off: each start waits for the driver"
    return at_threshold(1 - on, 1, read, "on", Result.WARN, "change_mode")


def _compute_mode(values: Values, limits: Limits) -> Judgement:
    mode, per_gpu, pids = values["compute_mode"], values["per_gpu"], values["processes"]
    used = values["memory_used_mib"]
    processes = 0 if isinstance(pids, Unread) else len(pids)
    if not processes and isinstance(used, int):
        processes = int(used > limits.memory_in_use_mib)  # a PID namespace hides at least one
    name = {0: "DEFAULT", 1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}.get(
        mode, str(mode)
    )
    limit = "DEFAULT"
    if mode == 2:
        return Judgement(Result.CRITICAL, name, limit, "change_mode")
    if mode in (1, 3):
        wanted = f"{name}, {processes} program(s) on the GPU, {per_gpu} to start"
        crowded = processes + per_gpu > 1
        return Judgement(Result.CRITICAL if crowded else Result.WARN, wanted, limit, "change_mode")
    return Judgement(Result.PASS, name, limit)


def _switch(current: int, pending: int) -> str:
    names = ("off", "on")
    later = f", {names[pending]} after the next reset" if current != pending else ""
    return f"{names[current]}{later}"


def _mig(values: Values, _limits: Limits) -> Judgement:
    current, pending = values["mig"]
    read, limit = _switch(current, pending), "nothing pending"
    return at_threshold(int(current != pending), 1, read, limit, Result.WARN, "reset_gpu")


def _processes(values: Values, _limits: Limits) -> Judgement:
    pids = values["processes"]
    read = (
        f"{len(pids)} program(s) use the GPU: pid {', '.join(map(str, pids))}"
        if pids
        else "no program uses the GPU"
    )
    return at_threshold(len(pids), 1, read, "none", Result.WARN, "wait")


def _memory_in_use(values: Values, limits: Limits) -> Judgement:
    """Judge the GPU's memory, which shows programs that a PID namespace hides."""
    used, pids = values["memory_used_mib"], values["processes"]
    read, limit = f"{used:,} MiB in use", f"at most {limits.memory_in_use_mib:,} MiB"
    if used <= limits.memory_in_use_mib:
        return Judgement(Result.PASS, read, limit)
    known = "by the programs that use the GPU" if pids and not isinstance(pids, Unread) else ""
    hidden = "by programs that are not visible here, such as programs of another container"
    return Judgement(Result.WARN, f"{read} {known or hidden}", limit, "wait")


def _ecc_mode(values: Values, _limits: Limits) -> Judgement:
    """Judge ECC by the model's own default: it is on for data centers, off for workstations."""
    (current, pending), default = values["ecc_mode"], values["ecc_default"]
    read = _switch(current, pending)
    if current and pending:
        return Judgement(Result.PASS, read, "on")
    if default == 1:
        return Judgement(Result.WARN, read, "on, the default of this model", "enable_ecc")
    return Judgement(Result.PASS, read, "the default of this model")


RULES = (
    Rule("inforom", ("inforom",), _inforom),
    Rule("persistence", ("persistence",), _persistence, "NVIDIA"),
    Rule(
        "compute-mode",
        ("compute_mode", "per_gpu"),
        _compute_mode,
        "CUDA",
        also=("processes", "memory_used_mib"),
        modes=USUAL - {Mode.MONITOR},
    ),
    Rule("mig", ("mig",), _mig, "NVIDIA"),
    Rule("ecc-mode", ("ecc_mode",), _ecc_mode, "NVIDIA", also=("ecc_default",)),
    Rule(
        "memory-in-use",
        ("memory_used_mib",),
        _memory_in_use,
        SOURCES["memory_in_use_mib"],
        also=("processes",),
        modes=USUAL - {Mode.MONITOR},
    ),
    Rule("processes", ("processes",), _processes, "Trainbox", modes=USUAL - {Mode.MONITOR}),
)
