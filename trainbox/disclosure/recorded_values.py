"""What a manifest records of settings and arguments, without secrets, and what was changed."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainbox.disclosure.secret_rule import (
    LONGEST,
    NOT_SHOWN,
    arguments_without_secrets,
    is_secret,
    without_secrets,
)


def shown_value(name: str, value: Any) -> Any:
    """Return `value` as the manifest records it: strings are cut and have no secrets."""
    if not isinstance(value, str):
        return value
    return NOT_SHOWN if is_secret(name, value) else without_secrets(value[:LONGEST])


def shown_arguments(argv: Sequence[str]) -> list[str]:
    """Return the arguments of a command as the manifest records them, without secrets."""
    return arguments_without_secrets(argument[:LONGEST] for argument in argv)


def shown_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as the manifest records them, without secrets in the task's fields."""
    fields = settings.get("fields")
    if not isinstance(fields, dict):
        return dict(settings)
    return {
        **settings,
        "fields": {name: shown_value(name, value) for name, value in fields.items()},
    }


def edited_settings(
    manifest: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between a run's manifest and its config.json.

    The result is {dotted name: (manifest, config)}. Secrets are removed before the comparison, so a
    changed secret in a task's field is not an edit.
    """
    settings = manifest.get("settings", {})
    if all(config.get(name) == value for name, value in settings.items()):
        return {}
    before = flat(settings, "settings.")
    now = flat(shown_settings({name: config.get(name) for name in settings}), "settings.")
    return changes(before, now)


def listed_changes(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Return the changes as in `threads: 1 -> 2; cudnn: 9 -> 10`, with long values cut."""
    return "; ".join(
        f"{name}: {short(old)} -> {short(new)}" for name, (old, new) in changed.items()
    )


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the entries that differ, as {name: (before, after)}."""
    return {
        name: (before.get(name), after.get(name))
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    }


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested object by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= (
            flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        )
    return found


def short(value: Any) -> str:
    """Return `value` for a message: a digest and a long text are cut."""
    text = "nothing" if value is None else str(value)
    return f"{text[:12]}..." if re.fullmatch("[0-9a-f]{40,}", text) else text[:200]
