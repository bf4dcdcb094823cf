"""Judge a GPU's temperature, and clocks that are lowered by heat or power."""

from entrypoint.driver.gpus import Unread
from entrypoint.health.limits import SOURCES, Limits
from entrypoint.health.rules.rule import (
    SLOWDOWN_WINDOW,
    WATCHED,
    Judgement,
    Rule,
    Values,
    at_threshold,
)
from entrypoint.health.verdict import Result

SUSTAINED_S = 5.0  # a slowdown over a shorter time is not CRITICAL


def _slowdown(values: Values, limits: Limits) -> Judgement:
    reasons, hard, slow, samples, span_s = values["slowdown"]
    names = {
        0x08: "hardware slowdown",
        0x20: "software thermal slowdown",
        0x40: "hardware thermal slowdown",
        0x80: "hardware power brake",
    }
    now = ", ".join(name for bit, name in names.items() if reasons & bit) or "none"
    read = f"{now} now, in {slow} of the last {samples} samples"
    limit = (
        f"none; CRITICAL by hardware from {limits.slowdown_samples} of {SLOWDOWN_WINDOW} samples "
        f"in {SUSTAINED_S:g} s or more"
    )
    if hard >= limits.slowdown_samples and span_s >= SUSTAINED_S:
        return Judgement(Result.CRITICAL, read, limit, "cool")
    if slow:
        return Judgement(Result.WARN, read, limit, "cool")
    return Judgement(Result.PASS, read, limit)


def _temperature(values: Values, limits: Limits) -> Judgement:
    temperature, working = values["temperature_c"], values["working_c"]
    slowdown, shutdown = values["slowdown_c"], values["shutdown_c"]
    # On most GPUs slowdown and shutdown are 3 °C apart, so the warning is at the working limit.
    warning = slowdown if isinstance(working, Unread) else min(working, slowdown)
    read, critical = f"{temperature} °C", shutdown - limits.shutdown_margin_c
    limit = (
        f"below {warning} °C, its working limit; slowdown {slowdown} °C, CRITICAL from "
        f"{critical} °C, shutdown {shutdown} °C"
    )
    if temperature >= critical:
        return Judgement(Result.CRITICAL, read, limit, "cool")
    return at_threshold(temperature, warning, read, limit, Result.WARN, "cool")


def _margin(values: Values, limits: Limits) -> Judgement:
    """Judge the temperature of a GPU that reports the degrees left to its working limit."""
    margin = values["margin_c"]
    slowdown, shutdown = values["slowdown_margin_c"], values["shutdown_margin_c"]
    read, critical = f"{margin} °C left", shutdown + limits.shutdown_margin_c
    limit = f"slowdown at {slowdown}, CRITICAL from {critical}, shutdown at {shutdown}"
    if margin <= critical:
        return Judgement(Result.CRITICAL, read, limit, "cool")
    return at_threshold(-margin, -slowdown, read, limit, Result.WARN, "cool")


RULES = (
    Rule("slowdown", ("slowdown",), _slowdown, "DCGM", modes=WATCHED),
    Rule(
        "temperature",
        ("temperature_c", "slowdown_c", "shutdown_c"),
        _temperature,
        SOURCES["shutdown_margin_c"],
        ("working_c",),
        WATCHED,
    ),
    Rule(
        "temperature-margin",
        ("margin_c", "slowdown_margin_c", "shutdown_margin_c"),
        _margin,
        SOURCES["shutdown_margin_c"],
        modes=WATCHED,
    ),
)
