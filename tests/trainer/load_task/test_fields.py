"""The fields of a task: loaded with its class, and set by values."""

import dataclasses
import math
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.here import Here
from tests.support.task_files import HEAD, loaded
from trainbox.errors import WrongUse
from trainbox.task_names.field_texts import field_texts
from trainbox.task_names.task_spec import built_in_tasks
from trainer.load_task import load_task
from trainer.task_fields import TaskField, parse_fields


@pytest.mark.parametrize("name", built_in_tasks())
def test_each_field_of_a_built_in_task_has_a_default(name: str) -> None:
    fields = loaded(name)
    assert fields
    assert all(field.default is not dataclasses.MISSING for field in fields)


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
def test_a_task_inherits_fields(
    write: Callable[[str, str], str], name: str, expected: list[TaskField]
) -> None:
    assert loaded(f"{write('inheriting.py', _INHERITING)}:{name}") == expected


_FORMS = """
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
def test_a_field_can_be_written_in_any_form(write: Callable[[str, str], str], name: str) -> None:
    write(
        "helper_of_mine.py",
        HEAD + "@dataclass(frozen=True)\nclass Helper(Task):\n    width: int = 32\n",
    )
    spec = f"{write('forms.py', _FORMS)}:{name}"
    assert loaded(spec) == [TaskField("width", int, 32)]


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
        ("deep", "on", True),
        ("deep", "Off", False),
        ("deep", "t", True),
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
    ({"deep": "maybe"}, "--set deep=maybe: give true or false"),
    ({"widht": "3"}, "--set widht=3: task t has no field widht: did you mean width?"),
    ({"lr": "3"}, "--set lr=3: task t has no field lr: the option is --lr 3"),
    ({"learning-rate": "3"}, "--set learning-rate=3: task t has no field learning-rate: the option "
     "is --lr 3"),
    ({"file": "my.py:C"}, "--set file=my.py:C: task t has no field file: a file of --config names "
     'the task by name = "my.py:C"'),
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


_BROKEN = [
    ("null.py", "\0", r"its import raised \w+: source code string cannot contain null bytes"),
    (
        "syntax.py",
        "class T(\n",
        r"its import raised SyntaxError: .*never closed \(syntax.py, line 1",
    ),
    ("other.py", HEAD + "class A(Task): ...\n", "not define a Task named T: it defines A"),
    ("bare.py", "", "not define a Task named T: it defines none"),
]


@pytest.mark.parametrize(("name", "text", "message"), _BROKEN)
def test_a_file_without_the_class_is_reported(
    write: Callable[[str, str], str], name: str, text: str, message: str
) -> None:
    with pytest.raises(WrongUse, match=message):
        load_task(f"{write(name, text)}:T", {})


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
    with pytest.raises(WrongUse, match="depth has a type .* not support: annotate the field"):
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
    assert '"deep": {"type": "bool", "default": false, "note": ""}' in out
    out = here.succeeds("tasks", "tests.support.tiny:Tiny")
    assert "--set noise=...  float, default 0.1" in out


_NOTED = """
    @dataclass(frozen=True)
    class Base(Task):
        # The width of each layer.
        # At least 1.
        width: int = 8
        rate: float = 0.1  # how fast ä
        depth: int = 2
        \"\"\"The number
        of layers.\"\"\"
        more: int = 1  # noqa: E501

        # The first

        kind: str = "a"  # with a # in it

    @dataclass(frozen=True)
    class Noted(Base):
        width: int = 16
        depth: int = 3  # of the encoder
        wanted: int = dataclasses.field(kw_only=True)  # no default
"""


def test_the_comments_of_fields_are_listed_and_in_messages(
    here: Here, write: Callable[[str, str], str]
) -> None:
    text = "import dataclasses\n" + HEAD + textwrap.dedent(_NOTED)
    spec = f"{write('noted.py', text)}:Noted"
    notes = {field.name: field.note for field in loaded(spec)}
    assert notes == {
        "width": "The width of each layer. At least 1.",
        "rate": "how fast ä",
        "depth": "of the encoder",
        "more": "",
        "kind": "with a # in it",
        "wanted": "no default",
    }
    assert "  --set width=...  int, default 16\n      The width of each layer. At least 1.\n" in (
        here.succeeds("tasks", spec)
    )
    base = spec.replace("Noted", "Base")
    assert here.refused("train", base, "--set", "width=x", "--device", "cpu") == (
        "trainbox: --set width=x: give a value of type int (width: The width of each layer. At "
        "least 1)\n"
    )
    assert here.refused("train", spec, "--device", "cpu") == (
        f"trainbox: task {spec} has no default for wanted: add --set wanted=... (wanted: no "
        "default)\n"
    )
    assert {field.name: field.note for field in loaded(base)}["depth"] == "The number of layers."


def test_texts_come_from_the_file_and_from_set() -> None:
    of_file = {"width": 12, "rate": 0.1 + 0.2, "deep": True}
    assert field_texts(["width=8", "name=a=b"], of_file, swept=["deep"]) == {
        "width": "8",
        "rate": "0.30000000000000004",
        "name": "a=b",
    }
    for pair in ("width", "=8"):
        with pytest.raises(WrongUse, match=f"--set {pair}: write NAME=VALUE"):
            field_texts([pair])


def test_settings_have_the_types_of_the_fields(here: Here) -> None:
    """So the name of the run does not depend on how a value is written."""
    words = ("train", "digits", "--max-steps", "1", "--device", "cpu", "--set", "dropout=0")
    for width, name in (("08", "a"), ("8", "b")):
        assert here.command(*words, "--set", f"width={width}", "--run", name)[0] == 0
    config = here.json("config.json", "a")
    assert config["fields"] == {"dropout": 0.0, "width": 8}
    assert config == here.json("config.json", "b")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train digits --set widht=64", "--set widht=64: task digits has no field widht: did you"),
        ("train digits --set width=x", "--set width=x: give a value of type int"),
        ("sweep digits --set widht=64", "--set widht=64: task digits has no field widht: did you"),
        ("sweep digits --grid width=x", "--grid width=x: give a value of type int"),
        (
            "sweep digits --grid learning_rate=0.1,0.2",
            "--grid learning_rate=0.1,0.2: task digits has no field learning_rate: write --grid "
            "lr=0.1,0.2",
        ),
        (
            "sweep digits --grid learning-rate=0.1,0.2",
            "--grid learning-rate=0.1,0.2: task digits has no field learning-rate: write --grid "
            "lr=0.1,0.2",
        ),
        (
            "sweep digits --range learning_rate=1e-3:0.1:log --sampler random --trials 2 --metric "
            "loss",
            "--range learning_rate=1e-3:0.1:log: task digits has no field learning_rate: write "
            "--range lr=1e-3:0.1:log",
        ),
        (
            "sweep digits --range widht=1:2 --sampler random --trials 2 --metric loss",
            "--range widht=1:2: task digits has no field widht: ",
        ),
    ],
)
def test_a_wrong_field_is_refused_before_a_folder_is_made(
    here: Here, words: str, message: str
) -> None:
    assert here.refused(*words.split(), "--device", "cpu").startswith(f"trainbox: {message}")
    assert not (here.folder / "runs").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [("nan", "NaN is equal to nothing"), ("1,n=2", "separate fields, as in --set x=1 --set n=2")],
)
def test_a_number_that_no_resume_could_compare_and_two_fields_in_one_are_refused(
    text: str, problem: str
) -> None:
    fields = [TaskField("x", float, 0.0)]
    with pytest.raises(WrongUse, match=problem):
        parse_fields("T", fields, {"x": text})
    assert parse_fields("T", fields, {"x": "inf"}) == {"x": math.inf}
