"""List all health rules for GPUs.

A new rule is an entry of `RULES` in the module of its topic: the values that it reads, a pure
function that judges them, and the modes in which it runs. If a value could not be read, the finding
is NA or UNKNOWN, and the function is not called. No rule thus passes by accident.
tests/support/health_cases.py has a passing and a failing case of each rule.
"""

from collections.abc import Sequence

from entrypoint.health.rules import heat, links, memory, settings
from entrypoint.health.rules.derived import DERIVED_FROM
from entrypoint.health.rules.rule import Rule
from entrypoint.health.verdict import Mode

RULES = (*memory.RULES, *heat.RULES, *links.RULES, *settings.RULES)
# Values of the examination and not of one GPU.
_NEVER_READ = ("per_gpu", "gpus_in_use", "nvlink_peers", "nvswitch")


def rules_for(mode: Mode) -> tuple[Rule, ...]:
    """Return the rules that run in the mode."""
    return tuple(rule for rule in RULES if mode in rule.modes)


def names_to_read(rules: Sequence[Rule]) -> tuple[str, ...]:
    """Return the names of the driver's values that the rules need."""
    names = [
        DERIVED_FROM.get(name, name)
        for rule in rules
        for name in (*rule.reads, *rule.also)
        if name not in _NEVER_READ
    ]
    return tuple(dict.fromkeys(names))
