"""The fields of a task in the manifest of its run."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from tests.support.tiny import Tiny
from trainer.session.record import fields_from_data, with_fields_from_data


@dataclass(frozen=True)
class _Words(Tiny):
    words: tuple[str, ...] = ()
    length: int = 0
    width: int = 8
    api_key: str = ""
    table: dict[str, int] = field(default_factory=dict)

    def with_data(self, data_dir: Path) -> Self:
        if self.words:
            return self
        return replace(self, words=("a", "b"), length=3, api_key="x", table={"a": 1})


def test_a_task_gets_the_fields_from_data_without_the_data() -> None:
    stored: dict[str, Any] = fields_from_data(_Words(width=4).with_data(Path("data")))
    assert stored == {"words": ("a", "b"), "length": 3, "width": 4}
    manifest = {"fields_from_data": {"words": ["a", "b"], "length": 3, "removed_since": 1}}
    task = with_fields_from_data(_Words(), manifest)
    assert task.with_data(Path("missing")) == _Words(words=("a", "b"), length=3)
    assert with_fields_from_data(_Words(), {}) == _Words()  # of an earlier version
    assert fields_from_data(Tiny(noise=3.0)) == {}
