"""The fields of a task: read from its source, loaded with its class, and set by values."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.here import Here
from tests.support.task_files import HEAD, loaded
from trainbox.contract.errors import WrongUse
from trainbox.contract.task_fields import (
    TaskField,
    fields_of,
    pairs_of,
    parse_fields,
    static_fields,
    summary,
)
from trainbox.contract.task_spec import built_in_tasks
from trainer.load_task import load_task


@pytest.mark.parametrize("name", built_in_tasks())
def test_built_in_tasks_have_the_same_fields_read_and_loaded(name: str) -> None:
    fields = static_fields(name)
    assert fields == loaded(name)
    assert fields
    assert all(field.default is not dataclasses.MISSING for field in fields)
    assert summary(name)


_INHERITING = """
    from dataclasses import dataclass
    from typing import ClassVar
    import typing

    import torch
    from torch import nn

    from trainbox import Classification
    from trainer.tasks.digits import Digits

    @dataclass(frozen=True)
    class Base(Classification):
        epochs: ClassVar[int] = 3
        names: typing.ClassVar[tuple[str, ...]] = ("a", "b")
        width: int = 32
        rate: float = -0.5
        label: str = "plain"
        deep: bool = False
        constant = 5

    @dataclass(frozen=True)
    class Mine(Base):
        width: int = 64
        more: int = 1

    @dataclass(frozen=True)
    class Wider(Digits):
        layers: int = 2
"""


# fmt: off
_NAMES = [
    (
        "Mine",
        [
            TaskField("width", int, 64),
            TaskField("rate", float, -0.5),
            TaskField("label", str, "plain"),
            TaskField("deep", bool, False),
            TaskField("more", int, 1),
        ],
    ),
    ("Wider",
     [TaskField("width", int, 32), TaskField("dropout", float, 0.25), TaskField("layers", int, 2)]),
]
# fmt: on


@pytest.mark.parametrize(("name", "expected"), _NAMES)
@pytest.mark.parametrize("public", ["trainbox", "trainbox.classification"])
def test_inherited_fields_are_the_same_read_and_loaded(
    write: Callable[[str, str], str], public: str, name: str, expected: list[TaskField]
) -> None:
    text = _INHERITING.replace("from trainbox", f"from {public}")
    spec = f"{write('inheriting.py', text)}:{name}"
    assert static_fields(spec) == expected
    assert loaded(spec) == expected


_UNREADABLE = """
    from dataclasses import dataclass, field
    import trainbox.task
    from helper_of_mine import Helper
    from trainbox.task import Task

    WIDTH = 8

    @dataclass(frozen=True)
    class Computed(Task):
        width: int = 4 * WIDTH

    @dataclass(frozen=True)
    class Quoted(Task):
        width: "int" = 32

    @dataclass(frozen=True)
    class Dotted(trainbox.task.Task):
        width: int = 32

    @dataclass(frozen=True)
    class Foreign(Helper):
        pass

    @dataclass(frozen=True)
    class Fielded(Task):
        width: int = field(default=32)
"""


@pytest.mark.parametrize("name", ["Computed", "Quoted", "Dotted", "Foreign", "Fielded", "Helper"])
def test_fields_that_need_an_import_are_not_checked_before_it(
    write: Callable[[str, str], str], name: str
) -> None:
    write(
        "helper_of_mine.py",
        HEAD + "@dataclass(frozen=True)\nclass Helper(Task):\n    width: int = 32\n",
    )
    spec = f"{write('unreadable.py', _UNREADABLE)}:{name}"
    assert static_fields(spec) is None
    assert loaded(spec) == [TaskField("width", int, 32)]


def test_reading_fields_runs_nothing_and_needs_no_torch(
    write: Callable[[str, str], str], tmp_path: Path
) -> None:
    spec = write(
        "eager.py",
        HEAD
        + "open('it ran', 'w')\n@dataclass(frozen=True)\nclass Eager(Task):\n    width: int = 3\n",
    )
    assert static_fields(f"{spec}:Eager") == [TaskField("width", int, 3)]
    assert not (tmp_path / "it ran").exists()
    code = (
        "import sys; from trainbox.contract.task_fields import static_fields; "
        "static_fields('digits'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


_FIELDS = [
    TaskField("width", int, 32),
    TaskField("rate", float, 0.1),
    TaskField("label", str, "x"),
    TaskField("deep", bool, False),
]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("width", "64", 64),
        ("width", 64, 64),
        ("rate", "1e-3", 0.001),
        ("rate", 0.5, 0.5),
        ("label", "12", "12"),
        ("label", "", ""),
        ("deep", "true", True),
        ("deep", "YES", True),
        ("deep", True, True),
        ("deep", "False", False),
        ("deep", "no", False),
    ],
)
def test_values_are_converted_to_the_fields_types(name: str, text: Any, value: Any) -> None:
    parsed = parse_fields("t", _FIELDS, {name: text})
    assert parsed == {name: value}
    assert type(parsed[name]) is type(value)


# fmt: off
_GIVENS = [
    ({"width": "6.5"}, "--set width=6.5: give a value of type int"),
    ({"width": "true"}, "--set width=true: give a value of type int"),
    ({"width": f"{2**63}"}, f"--set width={2**63}: a whole number is more than "
     f"9223372036854775807: give a smaller one"),
    ({"deep": "maybe"}, "--set deep=maybe: give a value of type bool"),
    ({"widht": "3"}, "--set widht=3: task t has no field widht: did you mean width?"),
    ({"zzz": "3"}, "--set zzz=3: task t has no field zzz: it has width, rate, label, deep"),
]
# fmt: on


@pytest.mark.parametrize(("given", "message"), _GIVENS)
def test_wrong_fields_are_reported_with_the_remedy(given: dict[str, str], message: str) -> None:
    with pytest.raises(WrongUse) as failure:
        parse_fields("t", _FIELDS, given)
    assert str(failure.value) == message
    assert failure.value.exit_code == 2


def test_a_field_without_a_default_must_be_given() -> None:
    fields = [TaskField("classes", int, dataclasses.MISSING)]
    with pytest.raises(WrongUse, match=r"^task t has no default for classes: add --set classes="):
        parse_fields("t", fields, {})
    assert parse_fields("t", fields, {"classes": "3"}) == {"classes": 3}
    with pytest.raises(WrongUse, match="has no field x: it has none"):
        parse_fields("t", [], {"x": "1"})


# fmt: off
_BROKEN = [
    ("null.py", "\0", "T", r"task null.py:T: null.py(:\d+)? is not Python \(source code string "
     r"cannot contain null bytes"),
    ("nested.py", f"x = {'-' * 20000}1", "T",
     "task nested.py:T: nested.py has an expression that is nested too deeply: split"),
    ("syntax.py", "class T(\n", "T",
     r"task syntax.py:T: syntax.py:1 is not Python \(.*never closed"),
    ("binary.py", "\xff", "T",
     "task binary.py:T: binary.py.* is not Python|binary.py cannot be read"),
    ("other.py", HEAD + "class A(Task): ...\nclass B: ...\n", "T",
     "task other.py:T: other.py does not define a class T: it defines A, B"),
    ("bare.py", "", "T", "bare.py does not define a class T: it defines none"),
]
# fmt: on


@pytest.mark.parametrize(("name", "text", "cls", "message"), _BROKEN)
def test_a_file_without_the_class_is_reported_before_anything_starts(
    write: Callable[[str, str], str], tmp_path: Path, name: str, text: str, cls: str, message: str
) -> None:
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(WrongUse, match=message):
        static_fields(f"{name}:{cls}")


def test_a_field_of_another_type_cannot_be_set_and_keeps_its_default(
    write: Callable[[str, str], str],
) -> None:
    spec = write(
        "other_types.py",
        "from dataclasses import field\n"
        + HEAD
        + "@dataclass(frozen=True)\nclass T(Task):\n    depth: int | None = None\n"
        "    sizes: tuple[int, ...] = field(default_factory=lambda: (1, 2))\n",
    )
    loaded = load_task(f"{spec}:T", {})
    assert vars(loaded) == {"depth": None, "sizes": (1, 2)}
    with pytest.raises(WrongUse, match="depth has a type that --set does not support: use one of"):
        load_task(f"{spec}:T", {"depth": "3"})


def test_the_tasks_command_lists_tasks_and_fields(
    here: Here, write: Callable[[str, str], str]
) -> None:
    out = here.succeeds("tasks")
    assert [line.split()[0] for line in out.splitlines()] == built_in_tasks()
    out = here.succeeds("tasks", "digits")
    assert "--set width=...  int, default 32" in out
    assert "--set dropout=...  float, default 0.25" in out
    spec = write("inheriting.py", _INHERITING)
    out = here.succeeds("tasks", f"{spec}:Mine", "--json")
    assert '"deep": {"type": "bool", "default": false}' in out
    out = here.succeeds("tasks", "tests.support.tiny:Tiny")
    assert "--set noise=...  float, default 0.1" in out


def test_fields_keep_their_types_on_the_way_to_the_trainer(
    write: Callable[[str, str], str],
) -> None:
    """Also those of a config.json, for a task whose source does not have the types."""
    computed = write("computed.py", HEAD + "@dataclass\nclass T(Task):\n    width: int = 2 * 3\n")
    given = {"width": 12, "name": "-1", "wide": True, "rate": 0.1 + 0.2, "none": None}
    assert fields_of(f"{computed}:T", pairs_of(f"{computed}:T", given)) == given
    assert pairs_of("digits", {"width": 8}) == ("width=8",)
