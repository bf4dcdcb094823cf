"""The GPUs that an installed torch has code for."""

from pathlib import Path

import pytest
import torch

from entrypoint.system import torch_build
from entrypoint.system.torch_build import torch_architectures, torch_cuda
from trainbox.processes.architectures import without_code


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((7, 0), "sm_75 sm_80", False),
        ((7, 5), "sm_75 sm_80", True),
        ((8, 6), "sm_80", True),
        ((8, 0), "sm_86", False),
        ((9, 0), "sm_80 compute_80", True),
        ((7, 5), "sm_80 compute_80", False),
        ((9, 0), "sm_90a", True),
        ((10, 0), "sm_90a compute_90a", False),
        ((10, 3), "sm_100", True),
        ((10, 3), "sm_100a", False),
        ((10, 3), "sm_100f", True),
        ((12, 0), "sm_100f compute_100f", False),
        ((7, 0), "", True),
    ],
)
def test_code_runs_on_its_own_architecture_and_its_successors(
    capability: tuple[int, int], architectures: str, runs: bool
) -> None:
    assert (without_code(capability, architectures.split()) == "") == runs


def test_the_text_names_both_sides() -> None:
    assert without_code((7, 0), ["sm_75", "compute_90"]) == (
        "it has compute capability 7.0, and the installed torch is built for sm_75 compute_90"
    )


def test_the_library_shows_what_torch_reports() -> None:
    assert list(torch_architectures()) == torch.cuda.get_arch_list()
    assert torch_cuda() == torch.version.cuda


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a made-up torch for CUDA, still without its library."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "version.py").write_text("cuda: Optional[str] = '13.2'\n")
    monkeypatch.setattr(torch_build, "_torch_folder", lambda: tmp_path)
    monkeypatch.setattr(torch_build, "torch_cuda", torch_cuda.__wrapped__)
    return tmp_path


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"text\0sm_80 sm_90a compute_120\0text", ("sm_80", "sm_90a", "compute_120")),
        (b"text\0for sm_80 only\0text", ()),
        (b"", ()),
        (None, ()),
    ],
)
def test_a_library_without_the_list_gives_no_rule(
    installed: Path, content: bytes | None, found: tuple[str, ...]
) -> None:
    if content is not None:
        (installed / "lib/libtorch_python.so").write_bytes(content)
    assert torch_architectures.__wrapped__() == found


def test_torch_for_the_cpu_has_no_architectures(installed: Path) -> None:
    (installed / "lib/libtorch_python.so").write_bytes(b"\0sm_80\0")
    (installed / "version.py").write_text("cuda: Optional[str] = None\n")
    assert torch_architectures.__wrapped__() == ()
