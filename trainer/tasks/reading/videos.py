"""Find the videos of each class in its folder, and decode them into .npy files of grey frames."""

import contextlib
import hashlib
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

from trainbox import StorageFailure, WrongUse

# Shape suffixes: T frames, H height, W width.

ENDINGS = (".mp4", ".avi", ".mkv", ".mov", ".webm", ".npy")


@dataclass(frozen=True)
class VideoFile:
    """A video in the folder of a class."""

    path: Path
    label: int

    @property
    def recording(self) -> str:
        """The name of the recording: the file's name up to its first dot."""
        return self.path.name.partition(".")[0]


def decoded(videos: Sequence[VideoFile], cache: Path, size: int) -> list[Path]:
    """Return the .npy file of each video, and decode videos that are not in `cache`."""
    found = [
        video.path if video.path.suffix.lower() == ".npy" else _cached(video.path, cache, size)
        for video in videos
    ]
    missing = [
        (video.path, target)
        for video, target in zip(videos, found, strict=True)
        if not target.exists()
    ]
    if missing:
        from tqdm import tqdm

        for path, target in tqdm(
            missing, desc="decoding", unit=" videos", leave=False, disable=None
        ):
            _decode(path, target, size)
    return found


def _cached(path: Path, cache: Path, size: int) -> Path:
    """Return the path of the decoded frames of `path`.

    It depends on the path in the folder, the size and the time of the file, so a changed file is
    decoded again.

    Raises:
        WrongUse: the file cannot be read.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise WrongUse(
            f"{path} cannot be read ({error.strerror}): restore the file, or remove it"
        ) from error
    key = hashlib.sha256(
        f"{os.path.relpath(path, cache)} {status.st_size} {status.st_mtime_ns} {size}".encode()
    ).hexdigest()[:16]
    return cache / path.parent.name / f"{path.name}-{key}.npy"


def _decode(path: Path, target: Path, size: int) -> None:
    """Write the frames of the video `path`, grey and `size` x `size`, atomically to `target`.

    Raises:
        WrongUse: the video cannot be decoded.
        StorageFailure: `target` cannot be written.
    """
    import av
    from numpy.lib import format as npy

    part, count = target.with_name(f".{uuid.uuid4().hex}"), 0
    header = {"descr": "|u1", "fortran_order": False}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("xb") as file, av.open(str(path)) as container:
            # The header contains the number of frames, which is known only at the end. NumPy leaves
            # space for a larger number.
            npy.write_array_header_1_0(file, header | {"shape": (0, size, size)})
            for frame in container.decode(video=0):
                file.write(frame.reformat(size, size, "gray").to_ndarray().tobytes())
                count += 1
            file.seek(0)
            npy.write_array_header_1_0(file, header | {"shape": (count, size, size)})
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except (av.FFmpegError, IndexError) as error:  # IndexError: the file has no video stream
        raise WrongUse(
            f"{path} cannot be decoded ({error}): replace it with a valid video, or remove it"
        ) from error
    except OSError as error:
        raise StorageFailure(
            f"{target.parent} cannot be written ({error.strerror}) and needs {size * size:,} "
            "bytes per frame: make it writable and free enough space, or use .npy files"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def frame_count(path: Path, size: int) -> int:
    """Return the number of frames in the .npy file.

    Raises:
        WrongUse: the file does not contain a (T, size, size) array of uint8.
    """
    try:
        frames_THW = numpy.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise WrongUse(
            f"{path} cannot be read ({error}): replace it with a .npy file of uint8 with shape "
            f"(T, {size}, {size})"
        ) from error
    if (
        frames_THW.dtype != numpy.uint8
        or frames_THW.ndim != 3
        or frames_THW.shape[1:] != (size, size)
    ):
        raise WrongUse(
            f"{path} has {frames_THW.dtype} of shape {frames_THW.shape} instead of uint8 of "
            f"shape (T, {size}, {size}): convert it, or set its side with --set size=N"
        )
    return len(frames_THW)
