"""An object storage in memory whose operations a test can watch, stop and let fail."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem


class Storages(MemoryFileSystem):  # type: ignore[misc]
    """A storage of `faulty://`. `before` is called with each operation and its path."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    before: ClassVar[Callable[[str, str], None]] = staticmethod(lambda operation, path: None)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).replace("faulty://", "memory://"))

    def find(self, path: str, *more: Any, **options: Any) -> Any:
        type(self).before("find", path)
        return super().find(path, *more, **options)

    def cat_file(self, path: str, *more: Any, **options: Any) -> Any:
        type(self).before("cat", path)
        return super().cat_file(path, *more, **options)

    def get_file(self, path: str, *more: Any, **options: Any) -> None:
        type(self).before("get", path)
        super().get_file(path, *more, **options)

    def pipe_file(self, path: str, *more: Any, **options: Any) -> None:
        type(self).before("pipe", path)
        super().pipe_file(path, *more, **options)

    def put_file(self, local: str, path: str, *more: Any, **options: Any) -> None:
        type(self).before("put", path)
        super().put_file(local, path, *more, **options)

    def rm_file(self, path: str) -> None:
        type(self).before("rm", path)
        super().rm_file(path)

    @classmethod
    def fail(cls, error: Exception, *operations: str) -> None:
        """Raise `error` in these operations, or in each."""

        def before(operation: str, _path: str) -> None:
            if operation in operations or not operations:
                raise error

        cls.before = staticmethod(before)

    @classmethod
    def work(cls) -> None:
        """Let all operations work again."""
        cls.before = staticmethod(lambda operation, path: None)

    def names(self) -> dict[str, bytes]:
        """Return the content of all files by their paths."""
        return {path: file.getvalue() for path, file in self.store.items()}


@pytest.fixture
def faulty() -> Iterator[type[Storages]]:
    """Return the class of an empty storage that works."""
    fsspec.register_implementation("faulty", Storages, clobber=True)
    yield Storages
    Storages.store.clear()
    Storages.pseudo_dirs[:] = [""]
    Storages.work()
