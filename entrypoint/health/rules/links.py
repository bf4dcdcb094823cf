"""Judge a GPU's PCIe link, NVLinks and NVSwitch fabric."""

from entrypoint.health.limits import SOURCES, Limits
from entrypoint.health.rules.rule import USUAL, Judgement, Rule, Values, at_threshold
from entrypoint.health.verdict import Mode, Result


def _pcie_width(values: Values, _limits: Limits) -> Judgement:
    width, most = values["pcie_width"], values["pcie_max_width"]
    return at_threshold(
        most - width,
        1,
        f"{width} lanes",
        f"{most}, the device's and the slot's",
        Result.WARN,
        "inspect",
    )


def _pcie_replays(values: Values, limits: Limits) -> Judgement:
    rate, most = values["pcie_replays_per_minute"], limits.pcie_replays_per_minute
    read, limit = f"{rate:g} replays a minute", f"at most {most:g} a minute"
    return (
        Judgement(Result.WARN, read, limit, "inspect")
        if rate > most
        else Judgement(Result.PASS, read, limit)
    )


def _nvlink(values: Values, limits: Limits) -> Judgement:
    active, peers = values["nvlink_active"], values["nvlink_peers"]
    down = [str(link) for link, state in enumerate(active) if not state]
    read, limit = f"{len(active) - len(down)} of {len(active)} links active", "all"
    if not down:
        return Judgement(Result.PASS, read, limit)
    # A card without a bridge looks the same as a card whose links have all failed.
    if len(down) == len(active):
        return Judgement(Result.WARN, f"{read}: no bridge, or all are down", limit, "inspect")
    read += f": down {', '.join(down)}"
    # Some machines do not connect all links of their GPUs, and a single GPU needs no link.
    if len(set(peers)) == 1:
        return Judgement(
            Result.WARN, f"{read}, the same number as on each GPU in use", limit, "inspect"
        )
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
    limit = f"less than {most:g} a second"
    result, action = (Result.CRITICAL, "reset_gpu") if rate >= most else (Result.PASS, "")
    return Judgement(result, f"{rate:g} CRC errors a second on the worst link", limit, action)


def _fabric(values: Values, _limits: Limits) -> Judgement:
    state, status = values["fabric"]
    name = {1: "not started", 2: "in progress", 3: "completed"}.get(state, "unknown")
    if state == 0:  # also on healthy cards without NVSwitch
        return Judgement(Result.NA, "no NVSwitch fabric")
    read = f"registration {state} ({name}), status {status}"
    good = state == 3 and status == 0
    return Judgement(
        Result.PASS if good else Result.CRITICAL,
        read,
        "3 (completed), status 0",
        "" if good else "reboot",
    )


RULES = (
    Rule("pcie-width", ("pcie_width", "pcie_max_width"), _pcie_width),
    Rule(
        "pcie-replays",
        ("pcie_replays_per_minute",),
        _pcie_replays,
        SOURCES["pcie_replays_per_minute"],
        modes=USUAL - {Mode.GATE},
    ),
    Rule("nvlink", ("nvlink_active", "nvlink_peers"), _nvlink),
    Rule(
        "nvlink-errors",
        ("nvlink_errors", "nvlink_errors_risen"),
        _nvlink_errors,
        SOURCES["nvlink_errors"],
    ),
    Rule(
        "nvlink-crc",
        ("nvlink_crc_per_second",),
        _nvlink_crc,
        SOURCES["nvlink_crc_per_second"],
        modes=USUAL - {Mode.GATE},
    ),
    Rule("fabric", ("fabric",), _fabric),
)
