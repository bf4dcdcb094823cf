"""The switches of torch that change bits agree with each other, and are set early enough."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.commands import clean_environment
from tests.support.here import Here
from tests.support.paths import ROOT
from trainbox.options.config import Settings
from trainer.loop.arithmetic import set_arithmetic, set_tf32
from trainer.sweep import worker


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    set_tf32(False)
    torch.set_deterministic_debug_mode("default")
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def _settings(precision: str = "fp32", deterministic: bool = True) -> Settings:
    return Settings(
        batch_size=8,
        learning_rate=0.1,
        precision=precision,
        best_by="min:loss",
        shards=1,
        threads=torch.get_num_threads(),
        deterministic=deterministic,
    )


@pytest.mark.parametrize("precision", ["tf32", "fp32", "bf16", "fp16"])
def test_torchs_older_and_newer_switches_agree(precision: str) -> None:
    """If they were mixed, some of these calls would raise an error."""
    set_arithmetic(_settings(precision))
    backends, tf32 = torch.backends, precision == "tf32"
    assert backends.cuda.matmul.allow_tf32 == tf32
    assert backends.cudnn.allow_tf32 == tf32
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    assert (backends.cuda.matmul.fp32_precision == "tf32") == tf32
    for part in (backends.cudnn.conv, backends.cudnn.rnn):  # type: ignore[attr-defined]
        assert (part.fp32_precision == "tf32") == tf32
    with backends.cudnn.flags(enabled=False):
        assert not backends.cudnn.enabled
    assert backends.cudnn.allow_tf32 == tf32


def test_each_training_of_a_process_sets_all_switches() -> None:
    set_arithmetic(_settings("tf32", deterministic=False))
    assert (torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark) == (0, True)
    set_arithmetic(_settings())
    assert (torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark) == (2, False)
    set_arithmetic(_settings(deterministic=False))
    assert (torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark) == (0, True)
    assert not torch.backends.cudnn.allow_tf32


def test_a_task_that_computes_at_its_import_has_the_workspace_of_the_training(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    Path("early.py").write_text(
        "import os\n"
        "from tests.support.tiny import Tiny\n"
        "assert os.environ['CUBLAS_WORKSPACE_CONFIG'] == ':4096:8'\n"
    )
    here.train(task="early.py:Tiny", max_steps=1)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_arithmetic(_settings())
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_worker_of_a_sweep_computes_first_with_the_workspace_of_its_trials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)

    def first_use(*_shape: int, **_options: str) -> None:
        raise RuntimeError(os.environ["CUBLAS_WORKSPACE_CONFIG"])

    monkeypatch.setattr(torch, "ones", first_use)
    assert worker._unusable("cuda") == ":4096:8"


@pytest.mark.slow
def test_kernels_of_the_compiler_are_deterministic_as_well() -> None:
    program = """
import dataclasses, torch
from tests.trainer.loop.test_arithmetic import _settings
from trainer.loop.arithmetic import set_arithmetic
for deterministic in (True, False):
    set_arithmetic(dataclasses.replace(_settings(deterministic=deterministic), compile=True))
    assert torch._inductor.config.deterministic == deterministic
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, env=clean_environment())
