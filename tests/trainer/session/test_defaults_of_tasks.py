"""The options of a training that a task may set, and the names of options that are refused."""

import json
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.here import Here
from tests.support.tiny import TINY, Tiny

_TASK = """
    from dataclasses import asdict, dataclass
    from typing import ClassVar

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from trainbox import Task


    @dataclass(frozen=True)
    class Own(Task):
        epochs: ClassVar[int] = 1
        batch_size: ClassVar[int] = 8
        {attributes}

        def train_dataset(self, data_dir):
            {body}
            x = torch.arange(32.0).reshape(8, 4) / 32
            return TensorDataset(x, x.sum(1))

        def validation_dataset(self, data_dir):
            x = torch.arange(1.0, 33.0).reshape(8, 4) / 32
            return TensorDataset(x, x.sum(1))

        def build_model(self):
            return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))

        def losses(self, model, batch):
            x, y = batch
            return {{"mse": (model(x) - y) ** 2}}
"""


def _write(here: Here, name: str, attributes: Sequence[str], body: str = "pass") -> str:
    text = textwrap.dedent(_TASK).format(attributes="\n    ".join(attributes), body=body)
    (here.folder / f"{name}.py").write_text(text)
    return f"{name}.py:Own"


def _settings(here: Here, name: str, *lines: str, body: str = "pass", **more: Any) -> Any:
    here.train(task=_write(here, name, lines, body), **more)
    return json.loads((here.folder / "runs/r/config.json").read_text())


@pytest.mark.parametrize("kind", ["ClassVar", "field"])
def test_a_task_sets_the_defaults_of_options(here: Here, kind: str) -> None:
    wanted = {
        "optimizer": "sgd",
        "weight_decay": 0.5,
        "warmup_epochs": 2.0,
        "clip_norm": 0.25,
        "precision": "bf16",
    }
    types = {name: type(value).__name__ for name, value in wanted.items()}
    lines = [
        f"{name}: {f'ClassVar[{types[name]}]' if kind == 'ClassVar' else types[name]} = {value!r}"
        for name, value in wanted.items()
    ]
    found = _settings(here, f"defaults_{kind.lower()}", *lines)
    assert {name: found[name] for name in wanted} == wanted


def test_options_override_a_task_and_a_run_keeps_them(here: Here) -> None:
    task = _write(here, "overridden", ["optimizer: ClassVar[str] = 'sgd'"])
    here.train(task=task, optimizer="adam", epochs=1)
    here.train(task=task, epochs=1)
    assert json.loads((here.folder / "runs/r/config.json").read_text())["optimizer"] == "adam"


def test_without_defaults_of_a_task_the_settings_are_those_of_trainbox(here: Here) -> None:
    found = _settings(here, "plain")
    assert (found["optimizer"], found["warmup_epochs"], found["clip_norm"]) == ("adamw", 0.0, None)


@pytest.mark.parametrize(
    ("line", "cure"),
    [
        ("lr: ClassVar[float] = 0.25", "rename it to learning_rate, or"),
        ("lr: float = 0.25", "rename it to learning_rate, or"),
        ("seed: int = 3", "remove it and give --seed, or rename it"),
        ("max_steps: ClassVar[int] = 3", "remove it and give --max-steps, or rename it"),
    ],
)
def test_an_option_under_a_name_that_nobody_reads_is_refused(
    here: Here, line: str, cure: str
) -> None:
    name = f"refused_{line.partition(':')[0]}_{'class' if 'ClassVar' in line else 'field'}"
    err = here.refused("train", _write(here, name, [line]), "--device", "cpu", code=2)
    assert f"reads {line.partition(':')[0]}: {cure} to _" in err


@pytest.mark.parametrize(
    ("line", "body"),
    [
        ("seed: int = 3", "torch.manual_seed(self.seed)"),
        ("precision: str = 'mine'", "assert self.precision == 'mine'"),
        ("optimizer: str = 'lion'", "assert self.optimizer == 'lion'"),
        ("lr: float = 0.5", "assert asdict(self)['lr'] == 0.5"),
    ],
)
def test_a_field_that_the_task_reads_is_its_own(here: Here, line: str, body: str) -> None:
    name = f"own_{line.partition(':')[0]}"
    found = _settings(here, name, line, body=body)
    assert (found["seed"], found["precision"], found["optimizer"]) == (0, "fp32", "adamw")


@pytest.mark.parametrize("method", ["train_dataset", "build_model", "losses"])
def test_a_task_that_changes_the_working_folder_is_refused(here: Here, method: str) -> None:
    (here.folder / "elsewhere").mkdir()
    real = getattr(Tiny, method)

    def changed(*values: Any) -> Any:
        os.chdir("elsewhere")
        return real(*values)

    here.plant(**{method: changed})
    err = here.refused("train", TINY, "--device", "cpu", code=2)
    assert f"task Tiny: {method}() has changed the working folder to {here.folder}/elsewhere" in err
    assert Path.cwd() == here.folder and not Path("elsewhere/runs").exists()


def test_an_import_that_changes_the_working_folder_is_refused(here: Here) -> None:
    (here.folder / "elsewhere").mkdir()
    task = _write(here, "moves", ["import os; os.chdir('elsewhere')"])
    err = here.refused("train", task, "--device", "cpu", code=2)
    assert "its import has changed the working folder to " in err


def test_a_task_may_change_the_working_folder_for_a_while(here: Here) -> None:
    body = "import contextlib\n        with contextlib.chdir('/'): pass"
    assert _settings(here, "for_a_while", body=body)["epochs"] == 1


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("optimizer: ClassVar[str] = 'lion'", "optimizer is 'lion': set it to one of adamw"),
        ("clip_norm: ClassVar[float] = 0.0", "clip_norm is 0.0: set it to a number above 0"),
        ("warmup_epochs: ClassVar[str] = 'two'", "warmup_epochs is 'two': set it to a number"),
    ],
)
def test_a_default_of_the_wrong_kind_is_refused(here: Here, line: str, text: str) -> None:
    name = f"wrong_{line.partition(':')[0]}"
    assert text in here.refused("train", _write(here, name, [line]), "--device", "cpu", code=2)


def test_a_name_elsewhere_in_the_file_is_not_a_read_of_the_task(here: Here) -> None:
    """Such as the name of a metric, of a module of numpy, or a name in a comment."""

    def written(name: str, *lines: str) -> str:
        spec = _write(here, name, lines)
        with (here.folder / f"{name}.py").open("a") as file:
            file.write(
                "\n\ndef other(trainer, lr):  # lr, task.lr\n    import torch\n"
                "    return trainer.optimizer, trainer.lr, getattr(torch, trainer.name)\n"
            )
        return spec

    words = ("--device", "cpu", "--max-steps", "1", "--run", "r")
    unread = written("elsewhere_lr", "lr: float = 0.5")
    assert "reads lr: rename it to learning_rate" in here.refused("train", unread, *words)
    here.succeeds("train", written("elsewhere", "optimizer: str = 'sgd'"), *words)
    assert here.json("config.json")["optimizer"] == "sgd"


def test_a_field_that_another_module_may_read_is_not_refused(here: Here) -> None:
    Path("helper_of_task.py").write_text("def check(task):\n    assert task.lr == 0.5\n")
    module = _write(
        here, "passes", ["lr: float = 0.5"], "import helper_of_task; helper_of_task.check(self)"
    )
    code, _, err = here.command("train", module, "--device", "cpu", "--max-steps", "1")
    assert (code, err) == (0, "")
