"""Read the example of each file of a list."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from trainbox.contract.errors import Failure, WrongUse


class FileExamples(Dataset[Any]):
    """The examples that `load`, the method load_example() of the task `name`, returns for files."""

    def __init__(self, files: Sequence[Path], load: Callable[[Path], Any], name: str) -> None:
        self.files, self._load, self._name = files, load, name

    @property
    def ids(self) -> list[str]:
        """The paths of the files."""
        return [str(path) for path in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        path = self.files[index]
        try:
            return self._load(path)
        except (Failure, MemoryError):
            raise
        except Exception as error:
            raise WrongUse(
                f"task {self._name}: load_example({str(path)!r}) raised {type(error).__name__} "
                f"({' '.join(str(error).split())}): replace or leave out the file, or correct the "
                "method"
            ) from error
