"""The texts of a task's fields, which the class of the task converts to its types."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trainbox.errors import WrongUse


def field_texts(
    pairs: Sequence[str], of_file: Mapping[str, Any] | None = None, swept: Collection[str] = ()
) -> dict[str, str]:
    """Return the texts of the fields that the file of settings and --set have given.

    Args:
        pairs: the values of --set, such as `width=64`.
        of_file: the fields of the file of settings.
        swept: the fields that a sweep varies, instead of their values in the file.

    Raises:
        WrongUse: a pair is malformed.
    """
    given = {name: str(value) for name, value in (of_file or {}).items() if name not in swept}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise WrongUse(f"--set {pair}: write NAME=VALUE, as in --set width=64")
        given[name] = value
    return given
