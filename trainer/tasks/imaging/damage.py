"""Find damaged pictures before the training."""

import contextlib
import errno
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainbox import WrongUse
from trainer.tasks.imaging.decode import DamagedPicture, decode, ignore_warnings
from trainer.tasks.imaging.folder import Picture

_STARTS = (
    *(b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"RIFF"),
    *(b"II*\0", b"MM\0*", b"II+\0", b"MM\0+", b"P1", b"P2", b"P3", b"P4", b"P5", b"P6"),
)
# The kind of a file of the HEIF family, from byte 4. Others than AVIF cannot be decoded.
_FAMILY, _AVIF = b"ftyp", (b"ftypavif", b"ftypavis")
# Errors of a link to a missing file and of a link to itself. With other errors, such as a missing
# permission, the file may be a valid picture.
_BROKEN_LINK = (errno.ENOENT, errno.ELOOP)
_REMEDY = "replace or remove it, or skip damaged pictures with --set skip_damaged=true"


def damaged_use(damaged: Mapping[Path, str], remedy: str = _REMEDY) -> WrongUse:
    """Return the error for damaged pictures, {path: reason}, that are not skipped."""
    path, reason = next(iter(damaged.items()))
    others = f"; {len(damaged) - 1} more are damaged" if len(damaged) > 1 else ""
    return WrongUse(f"{path} is damaged ({reason}{others}): {remedy}")


def refuse_damaged(pictures: Sequence[Picture]) -> None:
    """Check the first bytes of each file, which takes microseconds for each.

    Raises:
        WrongUse: a file is empty, is a broken link, cannot be read, or does not start as a picture.
    """
    if found := _found([picture.path for picture in pictures], _wrong_start):
        raise damaged_use(found)


def damaged_pictures(folder: Path, pictures: Sequence[Picture]) -> set[Path]:
    """Decode all pictures, and return the paths of those that are damaged.

    The result is kept in `folder`/.cache. It is used again while the names, sizes and times of the
    files are the same. If `folder` cannot be written, each process decodes all pictures.

    Raises:
        WrongUse: a file cannot be read.
    """
    key = hashlib.sha256()
    for picture in pictures:
        with contextlib.suppress(OSError):  # a link to a missing file
            status = picture.path.stat()
            name = os.fsencode(picture.path.relative_to(folder))
            key.update(b"%s\0%d\0%d\0" % (name, status.st_size, status.st_mtime_ns))
    cache = folder / ".cache" / f"damaged-{key.hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError):
        return {folder / name for name in json.loads(cache.read_text(encoding="utf-8"))}
    found = found_damage([picture.path for picture in pictures])
    with contextlib.suppress(OSError):
        _write(cache, json.dumps(sorted(str(path.relative_to(folder)) for path in found)))
    return set(found)


def found_damage(paths: Sequence[Path]) -> dict[Path, str]:
    """Decode all pictures, and return those that are damaged, with the reason, in their order."""
    return _found(paths, _damage)


def _found(paths: Sequence[Path], check: Callable[[Path], str | None]) -> dict[Path, str]:
    """Return the files in which `check` finds damage, with the reason, in their order."""
    from tqdm import tqdm

    ignore_warnings()
    # Decoders and files do not hold Python's lock.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        reasons: Iterator[str | None] = threads.map(check, paths)
        shown = tqdm(
            reasons,
            "checking",
            len(paths),
            unit=" pictures",
            delay=2,
            leave=False,
            disable=None,
        )
        return {
            path: reason for path, reason in zip(paths, shown, strict=True) if reason is not None
        }


def _wrong_start(path: Path) -> str | None:
    try:
        with path.open("rb", buffering=0) as file:
            start = file.read(16)
    except OSError as error:
        return _broken_link(path, error)
    if not start:
        return "the file is empty"
    if start.startswith(_FAMILY, 4) and not start.startswith(_AVIF, 4):
        return "it is a HEIC picture: convert it to JPEG"
    known = start.startswith(_STARTS) or start.startswith(_AVIF, 4)
    return None if known else "it does not start as a picture"


def _damage(path: Path) -> str | None:
    try:
        decode(path)
    except DamagedPicture as error:
        return _wrong_start(path) or str(error)
    except OSError as error:
        return _broken_link(path, error)
    return None


def _broken_link(path: Path, error: OSError) -> str:
    """Return the reason of a broken link, and raise WrongUse for any other error of the system."""
    if error.errno not in _BROKEN_LINK:
        raise WrongUse(f"{path} cannot be read ({error.strerror}): make it readable") from error
    return os.strerror(error.errno)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    part = path.with_name(f".{uuid.uuid4().hex}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
