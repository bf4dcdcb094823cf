"""Find a task by its name and import it, and report what is wrong with it."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.here import Here
from tests.support.task_files import HEAD, loaded
from tests.support.tiny import Tiny
from trainbox.errors import WrongUse
from trainbox.task_names.task_spec import TASKS_FOLDER, built_in_tasks, locate
from trainer.load_task import load_task
from trainer.task_fields import TaskField


def test_the_built_in_tasks_and_their_classes() -> None:
    assert {name: type(load_task(name, {})).__name__ for name in built_in_tasks()} == {
        "digits": "Digits",
        "digits_augmented": "DigitsAugmented",
        "fashion_mnist": "FashionMnist",
        "har": "Har",
        "images": "Images",
        "images_multilabel": "ImagesMultilabel",
        "images_regression": "ImagesRegression",
        "mnist": "Mnist",
        "ssvae": "Ssvae",
        "teacher_student": "TeacherStudent",
        "text": "Text",
        "video": "Video",
    }
    assert locate("fashion_mnist") == (TASKS_FOLDER / "fashion_mnist.py", "FashionMnist")
    assert load_task("digits", {"width": "8", "dropout": "0"}) == load_task(
        "digits", {"width": 8, "dropout": 0.0}
    )


def test_a_module_is_found_by_its_name_and_its_fields_by_importing_it() -> None:
    assert load_task("tests.support.tiny:Tiny", {"nan_at": "3"}) == Tiny(nan_at=3)


# fmt: off
_SPECS = [
    ("digts", "no task 'digts': did you mean digits?"),
    ("zebra", f"no task 'zebra': use {', '.join(built_in_tasks())}"),
    ("my/gestures.py", "task my/gestures.py: no file my/gestures.py in the current folder ("),
    ("several.py",
     "task several.py does not name the class: write several.py:One or several.py:Two; a script "),
    ("script.py", "task script.py does not name the class: write script.py:CLASS; a script is "),
    ("my/gestures.py:Gestures",
     "task my/gestures.py:Gestures: no file my/gestures.py in the current folder ("),
    ("gestures.py:",
     "task gestures.py:: '' is not a class name: write file.py:Class or module:Class"),
    ("gestures.py:My Class", "task gestures.py:My Class: 'My Class' is not a class name"),
    ("my-module:Gestures",
     "task my-module:Gestures: 'my-module' is neither a .py file nor a module"),
    ("../../etc/passwd:root", "'../../etc/passwd' is neither a .py file nor a module"),
]
# fmt: on


@pytest.mark.parametrize(("spec", "message"), _SPECS)
def test_a_wrong_task_is_reported_with_the_remedy(
    spec: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("several.py").write_text("class One(Task): pass\nclass Plain: pass\nclass Two(Task): pass")
    Path("script.py").write_text("print(1)")
    with pytest.raises(WrongUse) as failure:
        locate(spec)
    assert message in str(failure.value)
    if "current folder" in message:
        assert str(tmp_path) in str(failure.value)


def test_a_file_with_relative_imports_is_refused_with_the_remedy(
    write: Callable[[str, str], str],
) -> None:
    spec = write("inside.py", "from .beside import x\n" + HEAD + "class T(Task): ...\n")
    with pytest.raises(WrongUse, match=r"\(.*inside.py:1\): give the task as package.module"):
        load_task(f"{spec}:T", {})


def test_a_class_that_is_not_a_task_is_reported(write: Callable[[str, str], str]) -> None:
    spec = write(
        "no_task.py",
        HEAD + "@dataclass(frozen=True)\nclass Good(Task): ...\nclass Bad: ...\nWorse = 3\n",
    )
    for name, cure in (
        ("Bad", r"the class Bad of .*no_task.py is not a task: write class Bad\(Task\)"),
        ("Worse", "does not define a Task named Worse: it defines Good"),
        ("good", r"does not define a Task named good: did you mean Good\?"),
    ):
        with pytest.raises(WrongUse, match=cure):
            load_task(f"{spec}:{name}", {})
    with pytest.raises(WrongUse, match="json does not define a Task named Task: it defines none"):
        load_task("json:Task", {})


def test_fields_without_the_decorator_are_reported(write: Callable[[str, str], str]) -> None:
    spec = write("bare_class.py", HEAD + "class T(Task):\n    width: int = 3\n")
    with pytest.raises(WrongUse, match=r"cannot be set: write @dataclass\(frozen=True\) above T"):
        load_task(f"{spec}:T", {})


@pytest.mark.parametrize(
    ("line", "name", "meant"),
    [
        ("learnig_rate: ClassVar[float] = 0.1", "learnig_rate", "learning_rate"),
        ("epoch: int = 3", "epoch", "epochs"),
        ("def metric(self, totals): ...", "metric", "metrics"),
        ("def loss(self, model, batch): ...", "loss", "losses"),
        ("class_name = ('cat', 'dog')", "class_name", "class_names"),
        ("lr = 0.1", "lr", "learning_rate"),
    ],
)
def test_a_misspelt_name_is_refused(
    write: Callable[[str, str], str], line: str, name: str, meant: str
) -> None:
    head = HEAD + "from typing import ClassVar\n@dataclass(frozen=True)\n"
    spec = write("misspelt.py", f"{head}class T(Task):\n    {line}\n")
    with pytest.raises(WrongUse, match=f"rename it to {meant}, or to _{name} if"):
        load_task(f"{spec}:T", {})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("configure_optimizers", "build_optimizer"),
        ("training_step", "losses"),
        ("train_dataloader", "train_dataset"),
    ],
)
def test_a_method_of_lightning_is_refused_unless_it_is_called_or_beside_ours(
    write: Callable[[str, str], str], name: str, meant: str
) -> None:
    """Otherwise, the training would use another optimizer without a word."""
    text = f"class T(Task):\n    def {name}(self): ...\n"
    spec = write("of_lightning.py", HEAD + text)
    with pytest.raises(WrongUse, match=rf"does not call {name}\(\): write {meant}\(\) instead"):
        load_task(f"{spec}:T", {})
    called = f"    def losses(self, model, batch):\n        return self.{name}()\n"
    beside = f"    def {meant}(self, *_): ...\n"
    for file, more in (("calls_it.py", called), ("has_both.py", beside)):
        spec = write(file, HEAD + text + more)
        assert type(load_task(f"{spec}:T", {})).__name__ == "T"


@pytest.mark.parametrize(
    "body",
    [
        "patch_size = 4\n    def build_model(self): return Patches(self)",
        "patch_size = 4\n    def build_model(self): return type(self).patch_size",
        "@staticmethod\n    def metric(value): ...\n"
        "    def metrics(self, totals): return T.metric(totals)",
        "lr = 0.1\n    def build_model(self): return self.__class__.lr",
    ],
)
def test_a_name_that_the_class_or_other_code_reads_is_not_misspelt(
    write: Callable[[str, str], str], body: str
) -> None:
    name = f"read_otherwise_{abs(hash(body))}.py"
    spec = write(name, f"{HEAD}class T(Task):\n    {body}\n")
    assert type(load_task(f"{spec}:T", {})).__name__ == "T"


def test_names_beside_those_that_trainbox_reads_are_accepted(
    write: Callable[[str, str], str],
) -> None:
    names = ("losses", "loss", "_metric", "lr", "plot_predictions", "draw_figures")
    methods = "".join(f"    def {n}(self, *_): ...\n" for n in names)
    fields = "    note: str = ''\n    width: int = 3\n"
    spec = write(
        "own_names.py", f"{HEAD}@dataclass(frozen=True)\nclass T(Task):\n{fields}{methods}"
    )
    assert type(load_task(f"{spec}:T", {})).__name__ == "T"


def test_a_missing_module_is_refused_and_so_is_a_missing_import_of_it(
    write: Callable[[str, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WrongUse, match=rf"T: no module nowhere_at_all in {tmp_path}"):
        load_task("nowhere_at_all:T", {})
    write("module_that_needs.py", "import package_that_is_not_here\n")
    with pytest.raises(WrongUse, match=r"'package_that_is_not_here' \(module_that_needs.py:1\)"):
        load_task("module_that_needs:T", {})


@pytest.mark.parametrize(
    ("line", "error", "remedy"),
    [
        (
            "import package_not_here",
            "No module named 'package_not_here'",
            "install the package that has package_not_here in the environment of Trainbox, or put "
            "package_not_here.py beside the task",
        ),
        ("from torch import no_such_name", "cannot import name 'no_such_name'", "fix it"),
        ("raise RuntimeError('licence missing')", "RuntimeError: licence missing", "fix it"),
        (
            "import torch; torch.ones(1).cuda()",
            "RuntimeError: Found no NVIDIA driver",
            "remove .cuda() and .to('cuda'): Trainbox moves the model and the batches to the "
            "device",
        ),
    ],
)
def test_an_error_inside_a_task_file_is_one_line_with_its_position(
    here: Here, write: Callable[[str, str], str], line: str, error: str, remedy: str
) -> None:
    spec = write("importing.py", f"{line}\n{HEAD}@dataclass(frozen=True)\nclass T(Task): ...\n")
    err = here.refused("train", f"{spec}:T", "--device", "cpu", silent=True)
    assert "task importing.py:T: its import raised " in err and error in err
    end = f" (importing.py:1): {remedy} (`python importing.py` shows the traceback)\n"
    assert err.endswith(end)


def test_the_traceback_of_a_file_in_a_folder_is_shown_with_the_current_folder(
    here: Here,
) -> None:
    """A task's file imports from the current folder as well."""
    folder = here.folder / "own_tasks"
    folder.mkdir()
    (folder / "shared_names.py").write_text("NAMES = ('a',)\n")
    (folder / "broken_task.py").write_text("from own_tasks.shared_names import NAMES\n1 / 0\n")
    err = here.refused("train", "own_tasks/broken_task.py:T", "--device", "cpu", silent=True)
    line = "PYTHONPATH=. python own_tasks/broken_task.py"
    assert err.endswith(f": fix it (`{line}` shows the traceback)\n")
    ended = subprocess.run(
        [sys.executable, "own_tasks/broken_task.py"],
        env={**os.environ, "PYTHONPATH": "."},
        cwd=here.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ZeroDivisionError" in ended.stderr


@pytest.mark.parametrize("end", ["parse_args()", "parse_args(['-h'])"])
def test_a_task_that_reads_the_arguments_is_told_of_fields(
    here: Here, write: Callable[[str, str], str], end: str
) -> None:
    text = f"import argparse\nargparse.ArgumentParser().{end}\n"
    spec = write("parsing.py", f"{text}{HEAD}@dataclass(frozen=True)\nclass T(Task): ...\n")
    code, _, err = here.command("train", f"{spec}:T", "--device", "cpu")
    assert code == 2
    assert re.search(r"in <module> \(.*/parsing.py, line 2\): use fields of the task", err)


# fmt: off
_NAMES = [
    ("json.py", "has the name of the standard library's module json: rename the file"),
    ("my/this.py", "has the name of the standard library's module this: rename the file"),
    ("torch.py", r"has the name of the module torch \(.*/torch/__init__.py\): rename the file"),
    ("trainer.py",
     r"has the name of the module trainer \(.*/trainer/__init__.py\): rename the file"),
    ("prometheus_client.py",
     r"has the name of the module prometheus_client \(.*\): rename the file"),
    ("__main__.py", r"has the name of the module __main__.*: rename the file"),
    ("my/a.b.py", "has a dot in its name: rename it, as in a_b.py"),
]
# fmt: on


@pytest.mark.parametrize(("name", "reason"), _NAMES)
def test_a_file_that_would_shadow_a_module_is_refused_before_it_runs(
    here: Here, write: Callable[[str, str], str], name: str, reason: str
) -> None:
    spec = write(name, HEAD + "open('it ran', 'w')\n@dataclass(frozen=True)\nclass T(Task): ...\n")
    for words in (["train", "--device", "cpu"], ["plan"], ["tasks"]):
        err = here.refused(*words, f"{spec}:T")
        assert re.fullmatch(f"trainbox: task file {re.escape(name)} {reason}\n", err)
    assert not Path("it ran").exists()


def test_modules_beside_a_task_are_imported_and_never_replace_a_library(
    here: Here, write: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that a library replaces is named once, if the task imports it."""
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(here.folder)])
    for name in ("secrets", "tensorboard", "statistics", "prometheus_client/__init__"):
        write(f"my/{name}.py", "raise SystemExit('a neighbour shadows a library')\n")
    write("my/near_the_task.py", "import prometheus_client, secrets\nWIDTH = 7\n")
    write("my/at_the_top.py", "")
    text = (
        "import my.at_the_top\nimport statistics\nimport torch.utils.tensorboard\nfrom "
        "near_the_task import WIDTH\n" + HEAD
    )
    spec = write(
        "my/task_among_others.py",
        f"{text}@dataclass(frozen=True)\nclass T(Task):\n    width: int = WIDTH\n",
    )
    before = list(sys.path)
    assert loaded(f"{spec}:T") == [TaskField("width", int, 7)]
    assert sys.path == [*before, str(here.folder / "my"), str(here.folder)]
    code, _, err = here.command("plan", f"{spec}:T")
    warnings = err.splitlines()
    assert code == 0
    assert "module statistics, not my/statistics.py: rename my/statistics.py" in warnings[0]
    assert "`import prometheus_client` in my/near_the_task.py loads the module " in warnings[1]
    assert "`import secrets` in my/near_the_task.py loads the standard library" in warnings[2]
    assert len(warnings) == 3


def test_a_module_of_the_current_folder_comes_last(
    here: Here, write: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(here.folder)])
    write(
        "found_here/tasks.py",
        HEAD + "@dataclass(frozen=True)\nclass T(Task):\n    width: int = 3\n",
    )
    write("sklearn.py", "raise SystemExit('a file here shadows a library')\n")
    before = list(sys.path)
    assert loaded("found_here.tasks:T") == [TaskField("width", int, 3)]
    assert sys.path == [*before, str(here.folder)]
    code, _, err = here.command("plan", "sklearn:T")
    assert code == 0
    assert err.startswith("trainbox: task sklearn is loaded from the module sklearn (")
    assert err.endswith("), not from sklearn.py: rename sklearn.py to use it\n")


@pytest.mark.parametrize(
    ("body", "cure"),
    [
        ("width = 32", "write width: int = 32 in the class"),
        ("width: ClassVar[float] = 0.5", "write width: float = 0.5 in the class"),
        (
            "def __init__(self, width=8): ...",
            "remove __init__(), and write width: int = 8 in the class",
        ),
        (
            "def __init__(self, width): ...",
            "remove __init__(), and write width: int = 32 in the class",
        ),
    ],
)
@pytest.mark.parametrize(
    "words", [("train", "--set", "width=64"), ("sweep", "--grid", "width=1,2")]
)
def test_a_value_without_a_type_is_not_a_field(
    here: Here, write: Callable[[str, str], str], words: tuple[str, ...], body: str, cure: str
) -> None:
    head = HEAD + "from typing import ClassVar\n@dataclass(frozen=True)\n"
    spec = write("untyped.py", f"{head}class T(Task):\n    {body}\n")
    verb, *options = words
    err = here.refused(verb, f"{spec}:T", *options, "--device", "cpu")
    assert err == f"trainbox: task untyped.py:T: width is not a field: {cure}\n"


@pytest.mark.parametrize(
    "body", ["def __init__(self, width): ...", "def __init__(self, width=3): self.width = width"]
)
def test_a_task_with_a_constructor_is_told_of_fields(
    write: Callable[[str, str], str], body: str
) -> None:
    spec = write("built.py", f"{HEAD}@dataclass(frozen=True)\nclass T(Task):\n    {body}\n")
    with pytest.raises(WrongUse, match=r"remove __init__\(\) and write width: int = 32 in"):
        load_task(f"{spec}:T", {})
