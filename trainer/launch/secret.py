"""Read the secret by which the machines of a training recognize each other.

docs/concepts/launch.md describes its protection.
"""

import errno
import os
import stat
from collections.abc import MutableMapping
from pathlib import Path

from trainbox.contract.errors import WrongUse
from trainbox.contract.files import open_regular

_SHORTEST, _LONGEST = 16, 4096
_REMEDY = "use 16 to 4096 characters, as `openssl rand -hex 32` makes them"


def take_secret(env: MutableMapping[str, str]) -> bytes | None:
    """Return the secret from `env` or from the file that `env` names, or None if it is not set.

    The secret is removed from `env`, because ranks and tasks do not need it. It does not have an
    option, because every user of a machine can read the arguments of a process.

    Raises:
        WrongUse: The secret is too short or too long, or its file cannot be used.
    """
    text, file = env.pop("RDZV_SECRET", ""), env.pop("RDZV_SECRET_FILE", "")
    if text and file:
        raise WrongUse("RDZV_SECRET and RDZV_SECRET_FILE are both set: unset one of them")
    if not text and not file:
        return None
    name = f"RDZV_SECRET_FILE={file}" if file else "RDZV_SECRET"
    secret = (_content(Path(file), name) if file else os.fsencode(text)).strip()
    if not _SHORTEST <= len(secret) <= _LONGEST:
        raise WrongUse(f"the secret of {name} has {len(secret)} characters: {_REMEDY}")
    return secret


def _content(path: Path, name: str) -> bytes:
    """Return the content of the file `path`, up to a length.

    `name` is the setting of the file, for the message.

    Raises:
        WrongUse: The file cannot be read, or every user of this machine can read it.
    """
    try:
        with open_regular(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_LONGEST + 2)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise WrongUse(
                f"{name} is not a file: name the file that contains the secret"
            ) from error
        raise WrongUse(
            f"{name} cannot be read ({error.strerror}): name a file that you can read"
        ) from error
    if mode & stat.S_IRWXO:
        raise WrongUse(
            f"{name} is open to every user of this machine (mode {stat.S_IMODE(mode):o}): "
            f"chmod 600 {path}"
        )
    return content
