"""Finding a user's task, reading its fields with and without importing it, and saying what is wrong
with it.
"""

import dataclasses
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trainbox
from tests.support.here import Here
from tests.support.tiny import ScalarLoss, Tiny
from trainer.errors import WrongUse
from trainer.loop.losses import LossModule, check_losses
from trainer.task import (
    TASKS_FOLDER,
    Task,
    TaskField,
    built_in_tasks,
    load_task,
    loaded_fields,
    locate,
    parse_fields,
    static_fields,
    summary,
)

_HEAD = "from dataclasses import dataclass\nfrom trainer.task import Task\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], str]]:
    """Writes a task file into the working folder; what it imports is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)

    def write_file(name: str, text: str) -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
        return name

    yield write_file
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def _loaded(spec: str) -> list[TaskField]:
    return loaded_fields(type(load_task(spec, {})))


@pytest.mark.parametrize("name", built_in_tasks())
def test_built_in_tasks_have_the_same_fields_read_and_loaded(name: str) -> None:
    fields = static_fields(name)
    assert fields == _loaded(name)
    assert fields
    assert all(field.default is not dataclasses.MISSING for field in fields)
    assert summary(name)


def test_the_built_in_tasks_and_their_classes() -> None:
    assert {name: type(load_task(name, {})).__name__ for name in built_in_tasks()} == {
        "digits": "Digits",
        "digits_augmented": "DigitsAugmented",
        "fashion_mnist": "FashionMnist",
        "har": "Har",
        "mnist": "Mnist",
        "ssvae": "Ssvae",
        "teacher_student": "TeacherStudent",
        "video": "Video",
    }
    assert locate("fashion_mnist") == (TASKS_FOLDER / "fashion_mnist.py", "FashionMnist")
    assert load_task("digits", {"width": "8", "dropout": "0"}) == load_task(
        "digits", {"width": 8, "dropout": 0.0}
    )


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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
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
        (
            "Wider",
            [
                TaskField("width", int, 32),
                TaskField("dropout", float, 0.25),
                TaskField("layers", int, 2),
            ],
        ),
    ],
)
@pytest.mark.parametrize("public", ["trainbox", "trainer.classification"])
def test_inherited_fields_are_the_same_read_and_loaded(
    write: Callable[[str, str], str], public: str, name: str, expected: list[TaskField]
) -> None:
    text = _INHERITING.replace("from trainbox", f"from {public}")
    spec = f"{write('inheriting.py', text)}:{name}"
    assert static_fields(spec) == expected
    assert _loaded(spec) == expected


_UNREADABLE = """
    from dataclasses import dataclass, field
    import trainer.task
    from helper_of_mine import Helper
    from trainer.task import Task

    WIDTH = 8

    @dataclass(frozen=True)
    class Computed(Task):
        width: int = 4 * WIDTH

    @dataclass(frozen=True)
    class Quoted(Task):
        width: "int" = 32

    @dataclass(frozen=True)
    class Dotted(trainer.task.Task):
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
        _HEAD + "@dataclass(frozen=True)\nclass Helper(Task):\n    width: int = 32\n",
    )
    spec = f"{write('unreadable.py', _UNREADABLE)}:{name}"
    assert static_fields(spec) is None
    assert _loaded(spec) == [TaskField("width", int, 32)]


def test_reading_fields_runs_nothing_and_needs_no_torch(
    write: Callable[[str, str], str], tmp_path: Path
) -> None:
    spec = write(
        "eager.py",
        _HEAD
        + "open('it ran', 'w')\n@dataclass(frozen=True)\nclass Eager(Task):\n    width: int = 3\n",
    )
    assert static_fields(f"{spec}:Eager") == [TaskField("width", int, 3)]
    assert not (tmp_path / "it ran").exists()
    code = (
        "import sys; from trainer.task import static_fields; static_fields('digits'); assert "
        "'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_module_is_found_by_its_name_and_its_fields_by_importing_it() -> None:
    assert static_fields("tests.support.tiny:Tiny") is None
    assert load_task("tests.support.tiny:Tiny", {"nan_at": "3"}) == Tiny(nan_at=3)


def test_the_public_api_is_the_classes_that_the_trainer_uses() -> None:
    assert trainbox.Task is Task
    assert trainbox.WrongUse is WrongUse
    assert trainbox.Classification is sys.modules["trainer.classification"].Classification
    assert trainbox.metrics.accuracy(torch.eye(2)) == 1.0
    assert trainbox.pictures.from_figure is sys.modules["trainer.pictures"].from_figure
    assert all(hasattr(trainbox, name) for name in trainbox.__all__)
    with pytest.raises(AttributeError, match="module 'trainbox' has no attribute 'Classificaton'"):
        trainbox.Classificaton  # noqa: B018


def test_a_task_file_may_import_its_neighbours(write: Callable[[str, str], str]) -> None:
    write("my/neighbour_of_task.py", "WIDTH = 7\n")
    text = (
        "from neighbour_of_task import WIDTH\n"
        + _HEAD
        + "@dataclass(frozen=True)\nclass T(Task):\n    width: int = WIDTH\n"
    )
    assert _loaded(f"{write('my/task_with_neighbour.py', text)}:T") == [TaskField("width", int, 7)]


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
        ("width", "-3", -3),
        ("width", 64, 64),
        ("rate", "1e-3", 0.001),
        ("rate", "2", 2.0),
        ("rate", 0.5, 0.5),
        ("label", "12", "12"),
        ("label", "a=b", "a=b"),
        ("label", "", ""),
        ("deep", "true", True),
        ("deep", "YES", True),
        ("deep", "1", True),
        ("deep", True, True),
        ("deep", "False", False),
        ("deep", "no", False),
        ("deep", "0", False),
        ("deep", False, False),
    ],
)
def test_values_are_converted_to_the_fields_types(name: str, text: Any, value: Any) -> None:
    parsed = parse_fields("t", _FIELDS, {name: text})
    assert parsed == {name: value}
    assert type(parsed[name]) is type(value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"width": "6.5"}, "--set width=6.5: give a value of type int"),
        ({"width": "wide"}, "--set width=wide: give a value of type int"),
        ({"width": "true"}, "--set width=true: give a value of type int"),
        ({"rate": ""}, "--set rate=: give a value of type float"),
        ({"deep": "maybe"}, "--set deep=maybe: give a value of type bool"),
        ({"deep": ""}, "--set deep=: give a value of type bool"),
        ({"widht": "3"}, "--set widht=3: task t has no field widht: did you mean width?"),
        ({"zzz": "3"}, "--set zzz=3: task t has no field zzz: it has width, rate, label, deep"),
    ],
)
def test_wrong_fields_are_reported_with_the_remedy(given: dict[str, str], message: str) -> None:
    with pytest.raises(WrongUse) as failure:
        parse_fields("t", _FIELDS, given)
    assert str(failure.value) == message
    assert failure.value.exit_code == 2


def test_a_field_without_a_default_must_be_given() -> None:
    fields = [TaskField("classes", int, dataclasses.MISSING)]
    with pytest.raises(
        WrongUse, match=r"^task t has no default for classes: add --set classes=\.\.\.$"
    ):
        parse_fields("t", fields, {})
    assert parse_fields("t", fields, {"classes": "3"}) == {"classes": 3}
    with pytest.raises(WrongUse, match="has no field x: it has none"):
        parse_fields("t", [], {"x": "1"})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("digts", "no task 'digts': did you mean digits?"),
        ("mnst", "no task 'mnst': did you mean mnist?"),
        ("zebra", f"no task 'zebra': use {', '.join(built_in_tasks())}"),
        ("", "no task ''"),
        (
            "my/gestures.py",
            "task my/gestures.py does not name the class: write my/gestures.py:CLASS",
        ),
        (
            "my/gestures.py:Gestures",
            "task my/gestures.py:Gestures: no file my/gestures.py in the current folder (",
        ),
        (
            "gestures.py:",
            "task gestures.py:: '' is not a class name: write file.py:Class or module:Class",
        ),
        ("gestures.py:My Class", "task gestures.py:My Class: 'My Class' is not a class name"),
        (
            "my-module:Gestures",
            "task my-module:Gestures: 'my-module' is neither a .py file nor a module",
        ),
        ("../../etc/passwd:root", "'../../etc/passwd' is neither a .py file nor a module"),
        (":Gestures", "task :Gestures: '' is neither a .py file nor a module"),
    ],
)
def test_a_wrong_task_is_reported_with_the_remedy(
    spec: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WrongUse) as failure:
        static_fields(spec)
    assert message in str(failure.value)
    if "current folder" in message:
        assert str(tmp_path) in str(failure.value)


_BROKEN = [
    (
        "null.py",
        "\0",
        "T",
        r"task null.py:T: null.py(:\d+)? is not Python \(source code string cannot "
        r"contain null bytes",
    ),
    (
        "nested.py",
        f"x = {'-' * 20000}1",
        "T",
        "task nested.py:T: nested.py has an expression that is nested too deeply: split",
    ),
    (
        "syntax.py",
        "class T(\n",
        "T",
        r"task syntax.py:T: syntax.py:1 is not Python \(.*never closed",
    ),
    (
        "binary.py",
        "\xff",
        "T",
        "task binary.py:T: binary.py.* is not Python|binary.py cannot be read",
    ),
    (
        "other.py",
        _HEAD + "class A(Task): ...\nclass B: ...\n",
        "T",
        "task other.py:T: other.py does not define a class T: it defines A, B",
    ),
    ("bare.py", "", "T", "bare.py does not define a class T: it defines none"),
]


@pytest.mark.parametrize(("name", "text", "cls", "message"), _BROKEN)
def test_a_file_without_the_class_is_reported_before_anything_starts(
    write: Callable[[str, str], str], tmp_path: Path, name: str, text: str, cls: str, message: str
) -> None:
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(WrongUse, match=message):
        static_fields(f"{name}:{cls}")


def test_a_file_with_relative_imports_is_refused_with_the_cure(
    write: Callable[[str, str], str],
) -> None:
    spec = write("inside.py", "from .beside import x\n" + _HEAD + "class T(Task): ...\n")
    with pytest.raises(
        WrongUse, match=r"relative imports fail \(.*inside.py:1\): give the task as package.module"
    ):
        load_task(f"{spec}:T", {})


def test_a_class_that_is_not_a_task_is_reported(write: Callable[[str, str], str]) -> None:
    spec = write(
        "no_task.py",
        _HEAD + "@dataclass(frozen=True)\nclass Good(Task): ...\nclass Bad: ...\nWorse = 3\n",
    )
    for name in ("Bad", "Worse", "Missing"):
        with pytest.raises(
            WrongUse,
            match=rf"task no_task.py:{name}: no_task.py does not define a Task named {name}: it "
            r"defines Task, Good",
        ):
            load_task(f"{spec}:{name}", {})
    with pytest.raises(
        WrongUse, match=r"task json:Task: json does not define a Task named Task: it defines none"
    ):
        load_task("json:Task", {})


def test_fields_without_the_decorator_are_reported(write: Callable[[str, str], str]) -> None:
    spec = write("bare_class.py", _HEAD + "class T(Task):\n    width: int = 3\n")
    with pytest.raises(
        WrongUse,
        match=r"task bare_class.py:T: width cannot be set: write @dataclass\(frozen=True\) above T",
    ):
        load_task(f"{spec}:T", {})


def test_a_field_of_another_type_cannot_be_set_and_keeps_its_default(
    write: Callable[[str, str], str],
) -> None:
    spec = write(
        "other_types.py",
        "from dataclasses import field\n"
        + _HEAD
        + "@dataclass(frozen=True)\nclass T(Task):\n    depth: int | None = None\n"
        "    sizes: tuple[int, ...] = field(default_factory=lambda: (1, 2))\n",
    )
    loaded = load_task(f"{spec}:T", {})
    assert vars(loaded) == {"depth": None, "sizes": (1, 2)}
    with pytest.raises(
        WrongUse,
        match="--set depth=3: depth has a type that --set does not support: use one of str, int, "
        "float, bool",
    ):
        load_task(f"{spec}:T", {"depth": "3"})


def test_a_missing_module_is_refused_and_so_is_a_missing_import_of_it(
    write: Callable[[str, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        WrongUse, match=rf"task nowhere_at_all:T: no module nowhere_at_all in {tmp_path}"
    ):
        load_task("nowhere_at_all:T", {})
    write("module_that_needs.py", "import package_that_is_not_here\n")
    with pytest.raises(
        WrongUse,
        match=r"ModuleNotFoundError: No module named 'package_that_is_not_here' "
        r"\(module_that_needs.py:1\)",
    ):
        load_task("module_that_needs:T", {})


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("import package_that_is_not_here", "No module named 'package_that_is_not_here'"),
        ("from torch import there_is_no_such_name", "cannot import name 'there_is_no_such_name'"),
        ("raise RuntimeError('licence missing')", "RuntimeError: licence missing"),
    ],
)
def test_an_error_inside_a_task_file_is_one_line_with_its_position(
    here: Here, write: Callable[[str, str], str], line: str, error: str
) -> None:
    spec = write("importing.py", f"{line}\n{_HEAD}@dataclass(frozen=True)\nclass T(Task): ...\n")
    code, out, err = here.command("train", f"{spec}:T", "--device", "cpu")
    assert code == 2
    assert err.startswith("trainbox: task importing.py:T: its import raised ")
    assert error in err
    assert err.endswith(" (importing.py:1): fix it (`python importing.py` shows the traceback)\n")
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("json.py", "has the name of the standard library's module json: rename the file"),
        ("my/this.py", "has the name of the standard library's module this: rename the file"),
        ("torch.py", r"has the name of the module torch \(.*/torch/__init__.py\): rename the file"),
        (
            "trainer.py",
            r"has the name of the module trainer \(.*/trainer/__init__.py\): rename the file",
        ),
        (
            "prometheus_client.py",
            r"has the name of the module prometheus_client \(.*\): rename the file",
        ),
        ("__main__.py", r"has the name of the module __main__.*: rename the file"),
        ("my/a.b.py", "has a dot in its name: rename it, as in a_b.py"),
    ],
)
def test_a_file_that_would_shadow_a_module_is_refused_before_it_runs(
    here: Here, write: Callable[[str, str], str], name: str, reason: str
) -> None:
    spec = write(name, _HEAD + "open('it ran', 'w')\n@dataclass(frozen=True)\nclass T(Task): ...\n")
    for words in (["train", "--check"], ["train", "--device", "cpu"], ["tasks"]):
        code, _, err = here.command(*words, f"{spec}:T")
        assert code == 2
        assert re.fullmatch(f"trainbox: task file {re.escape(name)} {reason}\n", err)
    assert not Path("it ran").exists()


def test_neighbours_of_a_task_are_imported_and_never_shadow_a_library(
    here: Here, write: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a library wins against are named once, if the task or a neighbour of it imports
    them.
    """
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(here.folder)])
    for name in ("secrets", "tensorboard", "statistics", "prometheus_client/__init__"):
        write(f"my/{name}.py", "raise SystemExit('a neighbour shadows a library')\n")
    write("my/near_the_task.py", "import prometheus_client, secrets\nWIDTH = 7\n")
    write("my/at_the_top.py", "")
    text = (
        "import my.at_the_top\nimport statistics\nimport torch.utils.tensorboard\nfrom "
        "near_the_task import WIDTH\n" + _HEAD
    )
    spec = write(
        "my/task_among_others.py",
        f"{text}@dataclass(frozen=True)\nclass T(Task):\n    width: int = WIDTH\n",
    )
    before = list(sys.path)
    assert _loaded(f"{spec}:T") == [TaskField("width", int, 7)]
    assert sys.path == [*before, str(here.folder / "my"), str(here.folder)]
    code, _, err = here.command("train", "--check", f"{spec}:T")
    warnings = err.splitlines()
    assert code == 0
    assert warnings[0] == (
        "trainbox: `import statistics` in my/task_among_others.py loads the standard "
        "library's module statistics, not "
        "my/statistics.py: rename my/statistics.py to use it"
    )
    assert warnings[1].startswith(
        "trainbox: `import prometheus_client` in my/near_the_task.py loads the module "
        "prometheus_client ("
    )
    assert warnings[2].startswith(
        "trainbox: `import secrets` in my/near_the_task.py loads the standard library's "
        "module secrets"
    )
    assert len(warnings) == 3


def test_a_module_of_the_current_folder_comes_last(
    here: Here, write: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(here.folder)])
    write(
        "found_here/tasks.py",
        _HEAD + "@dataclass(frozen=True)\nclass T(Task):\n    width: int = 3\n",
    )
    write("sklearn.py", "raise SystemExit('a file here shadows a library')\n")
    before = list(sys.path)
    assert _loaded("found_here.tasks:T") == [TaskField("width", int, 3)]
    assert sys.path == [*before, str(here.folder)]
    code, _, err = here.command("train", "--check", "sklearn:T")
    assert code == 0
    assert err.startswith("trainbox: task sklearn is loaded from the module sklearn (")
    assert err.endswith("), not from sklearn.py: rename sklearn.py to use it\n")


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        (
            {"mse": torch.tensor(1.0)},
            r"loss 'mse' has shape \(\) instead of \(4,\), one value per example: use "
            r"reduction='none'",
        ),
        (
            {"mse": 0.5},
            r"loss 'mse' is a float: return a tensor of shape \(B,\), one value per example",
        ),
        ({"a": torch.ones(4), "aux": 0.5}, r"loss 'aux' is a float: return a tensor"),
        ({"mse": torch.ones(4) * 1j}, "loss 'mse' is complex: return real numbers"),
        (
            {"mse": torch.ones(4)},
            "no loss depends on a trained parameter: compute mse from",
        ),
        ({"mse": torch.ones(3)}, r"loss 'mse' has shape \(3,\) instead of \(4,\)"),
        (
            {"ce": torch.ones(4), "map": torch.ones(4, 7)},
            r"loss 'map' has shape \(4, 7\) instead of \(4,\)",
        ),
        (torch.ones(4), "losses\\(\\) returned Tensor: return a dict"),
        ((torch.ones(4),), "losses\\(\\) returned tuple: return a dict"),
        (None, "losses\\(\\) returned None: return a dict"),
        ({}, "losses\\(\\) returned dict: return a dict"),
    ],
)
def test_losses_of_another_form_are_reported_by_task_loss_and_shape(
    monkeypatch: pytest.MonkeyPatch, losses: Any, found: str
) -> None:
    task = Tiny()
    module = LossModule(task, task.build_model(), "cpu", None)
    monkeypatch.setattr(Tiny, "losses", lambda *_: losses)
    with pytest.raises(WrongUse, match=f"^task Tiny: {found}"):
        check_losses(task, module((torch.ones(4, 4), torch.ones(4))), 4)


def test_right_losses_pass_and_are_float32() -> None:
    check_losses(Tiny(), {"a": torch.ones(4, requires_grad=True), "b": torch.ones(4)}, 4)
    task = Tiny()
    module = LossModule(task, task.build_model().bfloat16(), "cpu", None)
    losses = module((torch.ones(4, 4).bfloat16(), torch.ones(4).bfloat16()))
    assert losses["squared_error"].dtype == torch.float32


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            "ScalarLoss",
            "task ScalarLoss: loss 'squared_error' has shape () instead of (8,), one value per "
            "example",
        ),
        (
            "BareLoss",
            "task BareLoss: losses() returned Tensor: return a dict {name: tensor of shape (B,)}",
        ),
    ],
)
def test_a_training_with_wrong_losses_ends_with_that_message(
    here: Here, task: str, message: str
) -> None:
    code, _, err = here.command("train", f"tests.support.tiny:{task}", "--device", "cpu")
    assert f"trainbox: {message}" in err
    assert "Traceback" not in err
    assert code == 2
    assert issubclass(ScalarLoss, Task)


def test_default_statistics_add_up_in_full_precision() -> None:
    """Under bf16 a task's losses may be bf16: their sum over a validation batch of 500 must not be
    rounded to three digits.
    """

    class Half(Task):
        def losses(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
            return {"loss": torch.full((257,), 1.0, dtype=torch.bfloat16)}

    assert float(Half().statistics(torch.nn.Identity(), None)["loss"]) == 257.0


def test_the_tasks_command_lists_tasks_and_fields(
    here: Here, write: Callable[[str, str], str]
) -> None:
    code, out, _ = here.command("tasks")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == built_in_tasks()
    code, out, _ = here.command("tasks", "digits")
    assert code == 0
    assert "--set width=...  int, default 32" in out
    assert "--set dropout=...  float, default 0.25" in out
    spec = write("inheriting.py", _INHERITING)
    code, out, _ = here.command("tasks", f"{spec}:Mine", "--json")
    assert code == 0
    assert '"deep": {"type": "bool", "default": false}' in out
    code, out, _ = here.command("tasks", "tests.support.tiny:Tiny")
    assert code == 0
    assert "--set noise=...  float, default 0.1" in out
