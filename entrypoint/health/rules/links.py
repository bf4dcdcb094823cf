"""Judge a GPU's PCIe link, NVLinks and NVSwitch fabric."""

from entrypoint.health.limits import SOURCES, Limits
from entrypoint.health.rules.rule import USUAL, WATCHED, Judgement, Rule, Values, at_threshold
from entrypoint.health.verdict import Mode, Result

LOADED_PERCENT = 50  # of the time in which a program computes on the GPU


def _pcie_width(values: Values, _limits: Limits) -> Judgement:
    width, most = values["pcie_width"], values["pcie_max_width"]
    read, limit = f"{width} lanes", f"{most}, the device's and the slot's"
    return at_threshold(most - width, 1, read, limit, Result.WARN, "inspect")


def _pcie_generation(values: Values, _limits: Limits) -> Judgement:
    """Judge the generation under load: an idle GPU lowers it to save power."""
    now, most = values["pcie_generation"], values["pcie_max_generation"]
    load = values["utilization_percent"]
    missing = most - now if load >= LOADED_PERCENT else 0
    read = f"generation {now} at {load} % load"
    limit = f"{most}, the device's and the slot's, from {LOADED_PERCENT} % load"
    return at_threshold(missing, 1, read, limit, Result.WARN, "inspect")


def _pcie_replays(values: Values, limits: Limits) -> Judgement:
    rate, most = values["pcie_replays_per_minute"], limits.pcie_replays_per_minute
    read, limit = f"{rate:g} replays a minute", f"at most {most:g} a minute"
    return at_threshold(int(rate > most), 1, read, limit, Result.WARN, "inspect")


def _nvlink(values: Values, limits: Limits) -> Judgement:
    """Judge the links that are down: `nvlink_peers` has the links of the other GPUs in use."""
    active, peers = values["nvlink_active"], values["nvlink_peers"]
    used = [link for link, state in enumerate(active) if state >= 0]
    down = [link for link in used if not active[link]]
    read, limit = f"{len(used) - len(down)} of {len(used)} links active", "all"
    if not down:
        return Judgement(Result.PASS, read, limit)
    read += f": down {', '.join(map(str, down))}"
    if values["gpus_in_use"] == 1:
        read += "; a single GPU needs none"
        return Judgement(Result.WARN, read, limit, "inspect")
    if values["nvswitch"]:
        read += "; NVSwitch connects all"
        return Judgement(Result(limits.nvlink_inactive), read, limit, "reset_gpu")
    # A card without a bridge looks the same as a card whose links have all failed.
    if len(down) == len(used):
        read += "; no bridge, or all are down"
        return Judgement(Result.WARN, read, limit, "inspect")
    # Some machines do not connect all links of their GPUs.
    elsewhere = [link for link in down if any(peer[link : link + 1] == (1,) for peer in peers)]
    if not elsewhere:
        read += "; the same links are down on each GPU in use"
        return Judgement(Result.WARN, read, limit, "inspect")
    read += f"; up on another GPU in use: {', '.join(map(str, elsewhere))}"
    return Judgement(Result(limits.nvlink_inactive), read, limit, "reset_gpu")


def _nvlink_errors(values: Values, limits: Limits) -> Judgement:
    """Judge new errors by DCGM's limit; the total since the driver was loaded may be weeks old."""
    errors, risen = values["nvlink_errors"], values["nvlink_errors_risen"]
    worst = max(errors)
    where = f", {worst} on link {errors.index(worst)}" if worst else ""
    read = f"{risen} new replays and recoveries, {sum(errors)} since the driver was loaded{where}"
    limit = f"less than {limits.nvlink_errors} new on a link, none before"
    if risen >= limits.nvlink_errors:
        return Judgement(Result.CRITICAL, read, limit, "reset_gpu")
    return at_threshold(worst, 1, read, limit, Result.WARN, "inspect")


def _nvlink_crc(values: Values, limits: Limits) -> Judgement:
    rate, most = values["nvlink_crc_per_second"], limits.nvlink_crc_per_second
    read, limit = f"{rate:g} CRC errors a second on the worst link", f"less than {most:g} a second"
    return at_threshold(rate, most, read, limit, Result.CRITICAL, "reset_gpu")


def _fabric(values: Values, _limits: Limits) -> Judgement:
    state, status, mask, summary = values["fabric"]
    name = {1: "not started", 2: "in progress", 3: "completed"}.get(state, "unknown")
    if state == 0:  # also on healthy cards without NVSwitch
        return Judgement(Result.NA, "no NVSwitch fabric")
    found = _fabric_health(mask, summary)
    read = "; ".join((f"registration {state} ({name}), status {status}", *found))
    result = max(found.values(), key=(Result.WARN, Result.CRITICAL).index, default=Result.PASS)
    if state != 3 or status != 0:
        result = Result.CRITICAL
    if result is not Result.PASS and values["gpus_in_use"] == 1:
        return Judgement(Result.INFO, f"{read}; a single GPU does not use it")
    action = {Result.CRITICAL: "reboot", Result.WARN: "inspect"}.get(result, "")
    return Judgement(result, read, "3 (completed), status 0, healthy", action)


def _fabric_health(mask: int, summary: int) -> dict[str, Result]:
    """Return the problems in the fabric's health (nvml.h, NVML_GPU_FABRIC_HEALTH_MASK).

    Each question has two bits of the mask: 0 not supported, 1 yes, 2 no.
    """
    questions = {
        0: ("degraded bandwidth", Result.WARN),
        2: ("recovery of a route", Result.WARN),
        4: ("unhealthy route", Result.CRITICAL),
        6: ("recovery from an access timeout", Result.WARN),
    }
    found = {text: bad for shift, (text, bad) in questions.items() if mask >> shift & 3 == 1}
    configuration = mask >> 8 & 15  # 0 not supported, 1 right, then kinds of mistakes
    if configuration > 1:
        found[f"incorrect configuration ({configuration})"] = Result.CRITICAL
    summaries = {2: ("unhealthy", Result.CRITICAL), 3: ("limited capacity", Result.WARN)}
    if summary in summaries:
        text, bad = summaries[summary]
        found[f"summary: {text}"] = bad
    return found


RULES = (
    Rule("pcie-width", ("pcie_width", "pcie_max_width"), _pcie_width),
    Rule(
        "pcie-generation",
        ("pcie_generation", "pcie_max_generation", "utilization_percent"),
        _pcie_generation,
        "NVIDIA, nvidia-smi",
    ),
    Rule(
        "pcie-replays",
        ("pcie_replays_per_minute",),
        _pcie_replays,
        SOURCES["pcie_replays_per_minute"],
        modes=USUAL - {Mode.GATE},
    ),
    Rule(
        "nvlink",
        ("nvlink_active", "nvlink_peers", "nvswitch", "gpus_in_use"),
        _nvlink,
        SOURCES["nvlink_inactive"],
        ("nvlink_switch", "fabric"),
        WATCHED,
        ends_a_run=True,
        may_recover=True,  # the hardware trains a link again after errors
    ),
    Rule(
        "nvlink-errors",
        ("nvlink_errors", "nvlink_errors_risen"),
        _nvlink_errors,
        SOURCES["nvlink_errors"],
        modes=WATCHED,
    ),
    Rule(
        "nvlink-crc",
        ("nvlink_crc_per_second",),
        _nvlink_crc,
        SOURCES["nvlink_crc_per_second"],
        modes=WATCHED - {Mode.GATE},
    ),
    Rule(
        "fabric",
        ("fabric", "gpus_in_use"),
        _fabric,
        modes=WATCHED,
        ends_a_run=True,
        may_recover=True,
    ),
)
