"""The wheel of `make wheel`, in an environment and a folder without a checkout."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support.paths import ROOT

_UV = Path(sys.executable).with_name("uv")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not _UV.exists(), reason="no uv beside Python")]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the installed command. The environment has the packages that Trainbox needs."""
    folder = tmp_path_factory.mktemp("wheel")
    build = (_UV, "build", "--quiet", "--wheel", "--no-build-isolation", "--out-dir", folder)
    subprocess.run([*build, ROOT], check=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv")
    python = folder / "venv/bin/python"
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    # A line of a .pth file adds a folder, and does not install what is editable there.
    Path(where, "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = (_UV, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", python)
    subprocess.run([*install, wheel], check=True)
    return folder / "venv/bin/trainbox"


_TASK = """
from torch import nn
from torch.utils.data import TensorDataset
import torch
from trainbox import Task


class Line(Task):
    epochs, batch_size, best_by = 1, 4, "min:loss"

    def train_dataset(self, data_dir):
        inputs_N1 = torch.arange(16.0)[:, None] / 16
        return TensorDataset(inputs_N1, 2 * inputs_N1[:, 0])

    validation_dataset = train_dataset

    def build_model(self):
        return nn.Sequential(nn.Linear(1, 1), nn.Flatten(0))

    def losses(self, model, batch):
        inputs_B1, targets_B = batch
        return {"error": (model(inputs_B1) - targets_B) ** 2}
"""


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (("train", "digits", "--max-steps", "2", "--run", "r"), "tensorboard --logdir runs"),
        (("train", "digits", "--max-steps", "2", "--processes", "2"), "digest     "),
        (("train", "line.py:Line", "--max-steps", "2"), "digest     "),
        (("run", "script.py"), "exit code  0"),
        (("tasks",), "digits_augmented"),
        (("--version",), "trainbox 0.1.0"),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, tuple) else None,
)
def test_it_works_without_a_checkout(
    command: Path, tmp_path: Path, words: tuple[str, ...], printed: str
) -> None:
    (tmp_path / "line.py").write_text(_TASK)
    (tmp_path / "script.py").write_text("import trainbox\nprint(trainbox.__file__)\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run([command, *words], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert printed in ended.stdout + ended.stderr
    assert str(ROOT) not in ended.stdout
