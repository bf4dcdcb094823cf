"""List the pictures and labels of a CSV file, and name the row of each mistake."""

import contextlib
import csv
import glob
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainbox import WrongUse
from trainer.tasks.imaging.parts import TEST, TRAIN, VALIDATION, Picture, name_in
from trainer.tasks.reading.files import nearest, refuse_missing, subfolders

_DELIMITERS = (",", ";", "\t")
_FILE, _LABEL, _PART = ("file", "file_name"), ("label", "labels"), ("part", "split")
_PARTS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("val", "valid", "validation", "dev"), VALIDATION),
    "test": TEST,
}
_YES, _NO = ("1", "1.0", "true"), ("0", "0.0", "false", "")


@dataclass(frozen=True)
class Columns:
    """The names of the columns of a CSV file. Without a name, the usual names are searched.

    Attributes:
        flags: Whether each other column may be a label, with 1 or 0 in each row, if there is no
            column for the labels.
    """

    file: str = ""
    label: str = ""
    part: str = ""
    flags: bool = False


def pictures_of_csv(
    folder: Path, labels: str, columns: Columns, labels_of: Callable[[str], tuple[str, ...]]
) -> list[Picture]:
    """Return the pictures of the CSV file `labels` in `folder`, in the order of its rows.

    If `folder` does not have the file, its folders train, val and test do. A name in a file is
    relative to the folder of the file. `labels_of` returns the labels of a cell.

    Raises:
        WrongUse: a file is missing or no CSV, or a row cannot be used.
    """
    refuse_missing(folder, "pictures", labels)
    found: list[Picture] = []
    for path, part in _tables(folder, labels):
        found += _pictures(path, folder, columns, labels_of, part)
    first = dict[Path, Picture]()
    for picture in found:
        if (picture.part is None) != (found[0].part is None):
            raise WrongUse(
                f"{picture.row}: {picture.name} is not in the same kind of folder as the first "
                "picture: put all pictures into folders train, val and test, or add a column part"
            )
        if picture.path in first:
            raise WrongUse(
                f"{picture.row}: {picture.name} is listed a second time, after "
                f"{first[picture.path].row}: keep one of the rows"
            )
        first[picture.path] = picture
    return found


def refuse_unused_csv(folder: Path) -> None:
    """Raise WrongUse if `folder` has a CSV file, and no class folders.

    Folders of parts are no class folders, unless they have folders of their own.
    """
    inside = [folder / name for name in subfolders(folder)]
    if any(path.name.lower() not in _PARTS or subfolders(path) for path in inside):
        return
    found = [path for place in (folder, *inside) for path in sorted(place.glob("*.csv"))]
    if found:
        raise WrongUse(
            f"{folder} has no folder for each class, but {found[0]}: if the file has the labels, "
            f"add --set labels={found[0].name}"
        )


def refuse_missing_files(pictures: Sequence[Picture]) -> None:
    """Raise WrongUse if the file of a row does not exist."""
    missing = [picture for picture in pictures if picture.row and not picture.path.exists()]
    if missing:
        others = f" ({len(missing) - 1} more are missing)" if len(missing) > 1 else ""
        if "\\" in missing[0].name:
            raise WrongUse(
                f"{missing[0].row}: {missing[0].path} does not exist{others}: write / instead of "
                "\\ in the names"
            )
        if near := _near_file(missing[0].path):
            raise WrongUse(
                f"{missing[0].row}: {missing[0].path} does not exist{others}, but {near} does: "
                f"write {near.relative_to(missing[0].path.parent)} instead of "
                f"{missing[0].path.name}, and so in each row"
            )
        raise WrongUse(
            f"{missing[0].row}: {missing[0].path} does not exist{others}: correct the row, which "
            "is relative to the folder of the CSV file, or skip missing pictures with --set "
            "skip_damaged=true"
        )


def _near_file(path: Path) -> Path | None:
    """Return a file whose name has other capital letters or one more ending, or None.

    The file may also be in a folder beside the missing `path`.
    """
    with contextlib.suppress(OSError):
        for near in sorted(path.parent.iterdir()):
            if near.name.lower() == path.name.lower() and near.is_file():
                return near
    name = glob.escape(path.name)
    forms = (f"{name}.*", f"*/{name}", f"*/{name}.*")
    found = (near for form in forms for near in sorted(path.parent.glob(form)))
    return next((near for near in found if near.is_file()), None)


def _tables(folder: Path, labels: str) -> list[tuple[Path, str | None]]:
    """Return the CSV file of `folder`, or the file and the part of each of its folders."""
    if (folder / labels).is_file():
        return [(folder / labels, None)]
    found: list[tuple[Path, str | None]] = [
        (place / labels, _PARTS[place.name.lower()])
        for place in sorted(folder.iterdir())
        if place.name.lower() in _PARTS and (place / labels).is_file()
    ]
    if not found:
        if near := nearest(Path(labels).name, [path.name for path in folder.glob("*.csv")]):
            raise WrongUse(f"{folder / labels} does not exist: did you mean --set labels={near}?")
        raise WrongUse(
            f"{folder / labels} does not exist: write it with the columns file and label, or name "
            "another CSV file with --set labels=NAME"
        )
    return found


def _pictures(
    path: Path,
    folder: Path,
    columns: Columns,
    labels_of: Callable[[str], tuple[str, ...]],
    part: str | None,
) -> Iterator[Picture]:
    header, rows = _rows(path, columns)
    file_at, label_at, part_at = _places(path, header, [cells for _, cells in rows], columns)
    flags = [k for k in range(len(header)) if k not in (file_at, part_at) and header[k]]
    for number, cells in rows:
        row = f"{path}, row {number}"
        name = cells[file_at]
        if not name:
            raise WrongUse(f"{row} has no file: write its name, or remove the row")
        if label_at is None:
            labels = tuple(header[k] for k in flags if _is_set(row, header[k], cells[k]))
        else:
            labels = labels_of(cells[label_at])
            if not labels and not columns.flags:
                raise WrongUse(f"{row} has no label: write the label, or remove the row")
        own = part or _PARTS.get(os.path.normpath(name).partition("/")[0].lower())
        if part_at is not None:
            own = _PARTS.get(cells[part_at].lower())
            if own is None:
                raise WrongUse(f"{row} has the part {cells[part_at]!r}: write train, val or test")
        file = Path(os.path.normpath(path.parent / name))
        yield Picture(file, name_in(folder, file), labels, own, row)


def _places(
    path: Path, header: Sequence[str], rows: Sequence[Sequence[str]], columns: Columns
) -> tuple[int, int | None, int | None]:
    """Return the indices of the columns of the files, the labels and the parts.

    The last two are None without such a column.
    """
    file_at = _column(path, header, columns.file, _FILE)
    if columns.flags and not columns.label:
        label_at = _index(header, "", _LABEL)
    else:
        if not columns.label and _index(header, "", _LABEL) is None:
            _refuse_flags(path, header, rows, file_at)
        label_at = _column(path, header, columns.label, _LABEL)
    if columns.part:
        return file_at, label_at, _column(path, header, columns.part, _PART)
    # A column of a usual name may have something else, such as parts of the body.
    part_at = _index(header, "", _PART)
    if part_at is not None and rows[0][part_at].lower() not in _PARTS:
        part_at = None
    return file_at, label_at, part_at


def _refuse_flags(
    path: Path, header: Sequence[str], rows: Sequence[Sequence[str]], file_at: int
) -> None:
    """Raise WrongUse if each of several columns may be a label, with 1 or 0 in each row."""
    part_at = _index(header, "", _PART)
    flags = [k for k in range(len(header)) if k not in (file_at, part_at)]
    cells = {cells[k].lower() for cells in rows for k in flags}
    if len(flags) > 1 and cells <= {*_YES, *_NO}:
        raise WrongUse(
            f"{path} has no column {' or '.join(_LABEL)}, but 1 or 0 in "
            f"{', '.join(header[k] for k in flags)}: train the task images_multilabel, or write "
            "one column label"
        )


def _rows(path: Path, columns: Columns) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the header, and the number and the cells of each further row that is not empty.

    The delimiter is the one with which the header has a column for the files.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise WrongUse(f"{path} is not text in UTF-8: save it as CSV in UTF-8") from error
    except OSError as error:
        raise WrongUse(f"{path} cannot be read ({error.strerror}): make it readable") from error

    def is_better(delimiter: str) -> tuple[bool, int]:
        header = _stripped(next(csv.reader(text.splitlines()[:1], delimiter=delimiter), []))
        return _index(header, columns.file, _FILE) is not None, len(header)

    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=max(_DELIMITERS, key=is_better), strict=True
    )
    rows: list[tuple[int, list[str]]] = []
    try:
        rows.extend((number, _stripped(cells)) for number, cells in enumerate(reader, 1))
    except csv.Error as error:
        raise WrongUse(
            f"{path}, row {len(rows) + 1}: {error}: close its double quotes, or write each quote "
            'in a cell as ""'
        ) from error
    rows = [(number, cells) for number, cells in rows if any(cells)]
    if len(rows) < 2:
        raise WrongUse(f"{path} has no rows below a header: write a row for each picture")
    header = rows[0][1]
    for number, cells in rows:
        if any(cells[len(header) :]):
            raise WrongUse(
                f"{path}, row {number} has {len(cells)} cells instead of {len(header)}: put double "
                "quotes around a cell that contains the delimiter"
            )
        cells.extend([""] * (len(header) - len(cells)))
    return header, rows[1:]


def _stripped(cells: Sequence[str]) -> list[str]:
    return [cell.strip() for cell in cells]


def _index(header: Sequence[str], name: str, usual: Sequence[str]) -> int | None:
    """Return the index of the column `name`, or of the first of the `usual` names, or None."""
    lower = [cell.lower() for cell in header]
    names = [name.lower()] if name else usual
    return next((lower.index(each) for each in names if each in lower), None)


def _column(path: Path, header: Sequence[str], name: str, usual: Sequence[str]) -> int:
    """Return the index of a column, or raise WrongUse if it does not exist."""
    index = _index(header, name, usual)
    if any((path.parent / cell).is_file() for cell in header if cell):
        raise WrongUse(f"{path} has no header: add a first row, such as file,label")
    if index is None and len(header) == 1 and re.search(r"[\s|:]", header[0]):
        raise WrongUse(
            f"{path} has only one column ({header[0]!r}): separate the columns by a comma, a "
            "semicolon or a tab"
        )
    if index is None:
        field = f"{usual[0]}_column"
        given = f"--set {field}={name}: " if name else ""
        raise WrongUse(
            f"{given}{path} has no column {name or ' or '.join(usual)} (it has "
            f"{', '.join(header)}): name one of them with --set {field}=NAME"
        )
    return index


def _is_set(row: str, name: str, cell: str) -> bool:
    """Return whether a label applies to the picture of `row`."""
    if cell.lower() not in (*_YES, *_NO):
        raise WrongUse(
            f"{row} has {cell!r} in the column {name}: write 1 or 0, or name the column of the "
            "labels with --set label_column=NAME"
        )
    return cell.lower() in _YES
