"""Find the text files of a folder, and cut windows of bytes out of them."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainbox import StorageFailure, WrongUse
from trainbox.found_files import files_in
from trainer.tasks.reading.files import is_held_out, refuse_missing, split_folders, test_folder


@dataclass(frozen=True)
class TextFile:
    """A text file and its size in bytes."""

    path: Path
    size: int


def standard_library() -> list[Path]:
    """Return the modules of Python's standard library that are a single file, sorted.

    They differ between versions of Python. Other files in their folder do not count.

    Raises:
        WrongUse: this Python has no such files.
    """
    folder = Path(os.__file__).parent
    paths = [folder / f"{name}.py" for name in sorted(sys.stdlib_module_names)]
    if found := [path for path in paths if path.is_file()]:
        return found
    raise WrongUse(
        f"{folder} has no sources of the standard library: set a folder of text files with --set "
        "folder=NAME"
    )


def split_texts(
    folder: Path | None, endings: tuple[str, ...], share: float
) -> tuple[list[TextFile], list[TextFile]]:
    """Return the texts for training and the texts for validation.

    If `folder` is None, they come from `standard_library`. If `folder` has the folders train and
    val, these are the two parts. Otherwise the name of each file decides: about `share` of the
    files, of train if there is no val, are for validation.

    Raises:
        WrongUse: the folder is missing, or a part has no text or several names.
    """
    if folder is None:
        paths = standard_library()
        return _by_name(paths[0].parent, paths, share)
    refuse_missing(folder, "text files", f"NAME{endings[0]}")
    train, validation = split_folders(folder) or (folder, None)
    if validation is None:
        return _by_name(train, _found(train, endings), share)
    return _texts(_found(train, endings)), _texts(_found(validation, endings))


def test_texts(folder: Path | None, endings: tuple[str, ...]) -> list[TextFile]:
    """Return the texts of the folder test beside train and val.

    Raises:
        WrongUse: the folder does not exist, or has no text.
    """
    if folder is None:
        raise WrongUse(
            "the standard library has no test data: set a folder of text files with --set "
            "folder=NAME, or use --data validation"
        )
    return _texts(_found(test_folder(folder), endings))


def _found(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    paths = list(files_in(folder, endings))
    if not paths:
        raise WrongUse(
            f"{folder} has no text file ({', '.join(endings)}): add one, or set other endings with "
            "--set endings=NAME"
        )
    return paths


def _by_name(
    folder: Path, paths: Sequence[Path], share: float
) -> tuple[list[TextFile], list[TextFile]]:
    parts: dict[bool, list[Path]] = {False: [], True: []}
    for path in paths:
        parts[is_held_out(path.relative_to(folder).as_posix(), share)].append(path)
    for held_out, purpose in ((False, "training"), (True, "validation")):
        if not parts[held_out]:
            raise WrongUse(
                f"{folder}: none of its {len(paths)} text file(s) is for {purpose}: add files, "
                "make the folders train and val, or set another share with --set "
                "validation_share=X"
            )
    return _texts(parts[False]), _texts(parts[True])


def _texts(paths: Sequence[Path]) -> list[TextFile]:
    try:
        return [TextFile(path, path.stat().st_size) for path in paths]
    except OSError as error:
        raise WrongUse(
            f"{error.filename} cannot be read ({error.strerror}): restore the file, or remove it"
        ) from error


class Windows(Dataset[tuple[Tensor]]):
    """A dataset of windows (context + 1,) uint8 of all texts, one after the other.

    A zero byte follows each text. Neighbouring windows share one byte, so each byte is predicted
    once, except the first byte and the bytes after the last whole window. If `shifted`, a window
    starts up to `context` bytes later, at random.

    A window is mapped from its files when it is read. So a process has only the paths and the sizes
    of the files in memory.

    Raises:
        WrongUse: the texts are shorter than a window.
    """

    def __init__(
        self, texts: Sequence[TextFile], context: int, shifted: bool, purpose: str
    ) -> None:
        self.paths = [str(text.path) for text in texts]
        self.sizes_N = numpy.array([text.size for text in texts], dtype=numpy.int64)
        self.ends_N = numpy.cumsum(self.sizes_N + 1)  # after the zero byte
        self.context, self.shifted = context, shifted
        if self.ends_N[-1] <= context:
            raise WrongUse(
                f"{len(texts)} text file(s) for {purpose} have {self.bytes:,} bytes, fewer than a "
                f"window of context={context} and one more: add text, or lower --set context=N"
            )

    @property
    def bytes(self) -> int:
        """The number of bytes of all texts."""
        return int(self.sizes_N.sum())

    def __len__(self) -> int:
        return int(self.ends_N[-1] - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.context
        if self.shifted:
            start += int(torch.randint(self.context, ()))
            start = min(start, int(self.ends_N[-1]) - self.context - 1)
        window_T = numpy.zeros(self.context + 1, numpy.uint8)
        file, filled = int(numpy.searchsorted(self.ends_N, start, side="right")), 0
        while filled < len(window_T):
            size = int(self.sizes_N[file])
            offset = start + filled - int(self.ends_N[file]) + size + 1
            count = min(size - offset, len(window_T) - filled)
            if count > 0:
                window_T[filled : filled + count] = _mapped(self.paths[file], offset, count)
            file, filled = file + 1, filled + count + 1
        return (torch.from_numpy(window_T),)


def _mapped(path: str, offset: int, count: int) -> numpy.ndarray:
    """Return `count` bytes of the file.

    Raises:
        StorageFailure: the file cannot be read, or has become shorter.
    """
    try:
        return numpy.memmap(path, numpy.uint8, "r", offset, (count,))
    except (OSError, ValueError) as error:
        raise StorageFailure(
            f"{path} cannot be read ({error}): restore the text as it was at the start"
        ) from error
