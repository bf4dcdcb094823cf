"""Judge the errors of a GPU's memory, and the driver's recovery action."""

from dataclasses import replace

from entrypoint.health.limits import SOURCES, Limits
from entrypoint.health.rules.rule import USUAL, WATCHED, Judgement, Rule, Values, at_threshold
from entrypoint.health.verdict import Mode, Result


def _recovery_action(values: Values, _limits: Limits) -> Judgement:
    number = values["recovery_action"]
    known = {
        0: (Result.PASS, "none", ""),
        1: (Result.CRITICAL, "GPU reset", "reset_gpu"),
        2: (Result.CRITICAL, "node reboot", "reboot"),
        3: (Result.WARN, "drain peer-to-peer traffic", "inspect"),
        4: (Result.CRITICAL, "drain and reset", "reset_gpu"),
        5: (Result.CRITICAL, "recover the IMEX domain", "reboot"),
        6: (Result.CRITICAL, "bus reset", "reset_gpu"),
        7: (Result.CRITICAL, "system reboot", "reboot"),
    }
    result, text, action = known.get(number, (Result.WARN, "unknown to Trainbox", "inspect"))
    return Judgement(result, f"the driver recommends {number} ({text})", "0 (none)", action)


def _ecc(values: Values, limits: Limits) -> Judgement:
    count, most = values["ecc_uncorrected"], limits.ecc_uncorrected
    read = f"{count} uncorrected memory errors since the driver was loaded"
    return at_threshold(count, most + 1, read, f"at most {most}", Result.CRITICAL, "reset_gpu")


def _sram(values: Values, _limits: Limits) -> Judgement:
    flag = values["sram_threshold_exceeded"]
    read = "threshold exceeded" if flag else "threshold not exceeded"
    return at_threshold(
        flag, 1, read, "the device's threshold of SRAM errors", Result.CRITICAL, "replace"
    )


def _row_remap(values: Values, limits: Limits) -> Judgement:
    corrected, uncorrected, pending, failed = values["remapped_rows"]
    rows = corrected + uncorrected
    read = (
        f"{rows} rows remapped, {'one' if pending else 'none'} pending, "
        f"{'one' if failed else 'none'} failed"
    )
    limit = f"none failed, none pending, less than {limits.remapped_rows}"
    if failed:
        return Judgement(Result.CRITICAL, read, limit, "replace")
    if pending:
        return Judgement(Result(limits.remap_pending), read, limit, "reset_gpu")
    return at_threshold(rows, limits.remapped_rows, read, limit, Result.WARN, "replace")


def _retired_pages(values: Values, limits: Limits) -> Judgement:
    pages, pending = values["retired_pages"], values["retired_pages_pending"]
    read = f"{pages} pages retired{', one pending' if pending else ''}"
    limit = f"less than {limits.retired_pages}, none pending"
    if pages < limits.retired_pages and pending:
        return Judgement(Result.WARN, read, limit, "reset_gpu")
    return at_threshold(pages, limits.retired_pages, read, limit, Result.CRITICAL, "replace")


# All of these show damage, so each ends a training.
RULES = tuple(
    replace(rule, modes=rule.modes | WATCHED, ends_a_run=True, unknown_closes=True)
    for rule in (
        Rule("recovery-action", ("recovery_action",), _recovery_action, modes=USUAL | {Mode.LIVE}),
        Rule("ecc-uncorrected", ("ecc_uncorrected",), _ecc, SOURCES["ecc_uncorrected"]),
        Rule("sram-threshold", ("sram_threshold_exceeded",), _sram),
        Rule("row-remap", ("remapped_rows",), _row_remap, SOURCES["remapped_rows"]),
        Rule(
            "retired-pages",
            ("retired_pages", "retired_pages_pending"),
            _retired_pages,
            SOURCES["retired_pages"],
        ),
    )
)
