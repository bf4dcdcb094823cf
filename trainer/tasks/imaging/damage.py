"""Find damaged pictures before the training."""

import contextlib
import errno
import hashlib
import json
import os
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import UnidentifiedImageError

from trainbox import WrongUse
from trainer.tasks.imaging.parts import Picture, name_in
from trainer.tasks.imaging.picture import region

_STARTS = (
    *(b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"RIFF"),
    *(b"II*\0", b"MM\0*", b"II+\0", b"MM\0+", b"P1", b"P2", b"P3", b"P4", b"P5", b"P6"),
)
# Brands of the HEIF family. Others than AVIF cannot be decoded.
_AVIF = {b"avif", b"avis"}
_HEIC = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}
_START_BYTES = 64  # contain the brands of a HEIC or AVIF picture
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
    """Decode all pictures, and return the paths of the damaged ones.

    The result is kept in `folder`/.cache. It is used again while the names, sizes and times of the
    files are the same. If `folder` cannot be written, each process decodes all pictures.

    Raises:
        WrongUse: a file cannot be read.
    """
    key = hashlib.sha256()
    for picture in pictures:
        key.update(os.fsencode(picture.name) + b"\0")
        with contextlib.suppress(OSError):  # a link to a missing file
            status = picture.path.stat()
            key.update(b"%d\0%d\0" % (status.st_size, status.st_mtime_ns))
    cache = folder / ".cache" / f"damaged-{key.hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError):
        return {folder / name for name in json.loads(cache.read_text(encoding="utf-8"))}
    found = found_damage([picture.path for picture in pictures])
    with contextlib.suppress(OSError):
        _write(cache, json.dumps(sorted(name_in(folder, path) for path in found)))
    return set(found)


def found_damage(paths: Sequence[Path]) -> dict[Path, str]:
    """Decode all pictures, and return the damaged ones, with the reason, in their order."""
    return _found(paths, _damage)


def _found(paths: Sequence[Path], check: Callable[[Path], str | None]) -> dict[Path, str]:
    """Return the files in which `check` finds damage, with the reason, in their order."""
    from tqdm import tqdm

    # Do not show Pillow's warnings of files that it can decode, since they do not name the file.
    # Examples are damaged EXIF data and pictures of more than 89 million pixels.
    warnings.filterwarnings("ignore", module=r"PIL\.")
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
            start = file.read(_START_BYTES)
    except OSError as error:
        return _broken_link(path, error)
    if not start:
        return "the file is empty"
    brands = _brands(start)
    if brands & _AVIF or start.startswith(_STARTS):
        return None
    if brands & _HEIC:
        return "it is a HEIC picture: convert it to JPEG"
    return "it does not start as a picture"


def _brands(start: bytes) -> set[bytes]:
    """Return the brands in the first box of an ISO media file (ISO/IEC 14496-12), else none.

    The box has its size, `ftyp`, the major brand, a version, and compatible brands of 4 bytes each.
    """
    if start[4:8] != b"ftyp":
        return set()
    end = min(int.from_bytes(start[:4]), len(start))
    return {start[8:12], *(start[at : at + 4] for at in range(16, end, 4))}


def _damage(path: Path) -> str | None:
    try:
        region(path, 1, lambda width, height: (0, 0, width, height))
    except UnidentifiedImageError as error:
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
