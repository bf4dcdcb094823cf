"""The manifest has what the bits of a GPU depend on, and a resume compares it."""

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.parallel.strategy import Strategy
from trainer.parallel.world import World
from trainer.records import manifest
from trainer.records.compare_runs import changes_bits, manifest_differences


def _described(monkeypatch: pytest.MonkeyPatch, multiprocessors: list[int]) -> dict[str, Any]:
    """Return the manifest of a process that sees GPUs with these counts."""
    gpus = [
        SimpleNamespace(
            name="NVIDIA A",
            uuid=f"GPU-{number}",
            major=9,
            minor=0,
            multi_processor_count=count,
        )
        for number, count in enumerate(multiprocessors)
    ]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    world = World(0, 1, torch.device("cuda", 0))
    return manifest.describe(Strategy("single", world), [], {}, {}, {})


def test_another_number_of_multiprocessors_changes_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, half = (_described(monkeypatch, [count, count]) for count in (132, 66))
    assert whole["device"]["multiprocessors"] == [132]
    changed = manifest_differences(whole, half)
    assert changed == {"device.multiprocessors": ([132], [66])}
    assert changes_bits("device.multiprocessors")


def test_a_torch_without_nccl_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_nccl_version", raising=False)
    version = torch.cuda.nccl.version
    _described(monkeypatch, [132])
    monkeypatch.setattr(torch.cuda.nccl, "version", version)
    assert manifest._device(World(0, 1, torch.device("cuda", 0)))["nccl"] is None


def test_variables_that_several_processes_get_are_left_out() -> None:
    several = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    several["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    found = manifest_differences({"environment": {}}, {"environment": several})
    assert found == {}


def test_the_version_of_cublas_is_that_of_the_loaded_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = manifest.cublas_version()
    installed = [
        package.version
        for package in importlib.metadata.distributions()
        if package.name.startswith("nvidia-cublas")
    ]
    if not installed:
        assert found is None
    else:
        assert found is not None
        assert installed[0].startswith(found)
    assert _described(monkeypatch, [132])["device"]["cublas"] == found
    assert changes_bits("device.cublas")


def test_variables_that_change_the_kernels_are_recorded_and_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_NATIVE_JIT", "1")
    before = _described(monkeypatch, [132])
    monkeypatch.setenv("TORCH_DISABLE_NATIVE_JIT", "0")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "4096")
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")
    changed = manifest_differences(before, _described(monkeypatch, [132]))
    assert changed == {
        "environment.TORCH_DISABLE_NATIVE_JIT": (None, "0"),
        "environment.CUBLASLT_WORKSPACE_SIZE": (None, "4096"),
        "environment.CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": (None, "50"),
    }
    assert {name for name in changed if changes_bits(name)} == {
        "environment.TORCH_DISABLE_NATIVE_JIT",
        "environment.CUBLASLT_WORKSPACE_SIZE",
    }


def test_a_variable_that_is_not_shown_differs_only_if_it_is_set_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_X_LOGIN", "karo")
    shown = {"NCCL_X_LOGIN": _described(monkeypatch, [132])["environment"]["NCCL_X_LOGIN"]}
    monkeypatch.setenv("NCCL_X_LOGIN", "other")
    again = {"NCCL_X_LOGIN": _described(monkeypatch, [132])["environment"]["NCCL_X_LOGIN"]}
    assert manifest_differences({"environment": shown}, {"environment": again}) == {}
    found = manifest_differences({"environment": shown}, {"environment": {}})
    assert list(found) == ["environment.NCCL_X_LOGIN"]
    assert "karo" not in str(found)
