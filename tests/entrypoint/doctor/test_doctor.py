"""`trainbox doctor`: reports on the NVML stub with stand-ins for torch, and the pure reasons."""

import importlib.metadata
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrypoint.doctor.report import (
    Examination,
    TorchAnswer,
    difference,
    finding_lines,
    problems,
)
from entrypoint.doctor.surroundings import Surroundings
from entrypoint.driver.gpus import Detection, Gpu
from entrypoint.health.verdict import Finding, Mode, Result, Verdict
from entrypoint.system.container import container_signs
from tests.support.commands import Ended, Trainbox, clean_environment
from tests.support.nvml_stub.build import stub_env, write_config
from tests.support.processes import started_with

Doctor = Callable[..., Ended]
NO_LIBCUDA = "libcuda.so.1: cannot open shared object file: No such file or directory"


@pytest.fixture
def doctor(library: Path, forked: Trainbox, tmp_path: Path) -> Doctor:
    """Run `trainbox doctor` on a profile's GPUs: `doctor("h100", {"gpu1.ret": 15}, count=4)`."""

    def run(
        profile: str,
        keys: dict[str, object] | None = None,
        env: dict[str, str] | None = None,
        **more: Any,
    ) -> Ended:
        stub = stub_env(library.parent, write_config(tmp_path / "nvml.conf", profile, keys, **more))
        return forked("doctor", env=stub | (env or {}))

    return run


def fake_torch(folder: Path, body: str) -> dict[str, str]:
    """Return the environment in which `import torch` runs `body`."""
    (folder / "fake/torch").mkdir(parents=True)
    (folder / "fake/torch/__init__.py").write_text(body)
    (folder / "fake/torch/version.py").write_text('cuda = "13.2"\n')
    return {"PYTHONPATH": str(folder / "fake")}


TWO_GPUS = """
from types import SimpleNamespace as Part
import warnings
__version__ = "9.9.9"
version = Part(cuda="13.2")
cuda = Part(is_available=lambda: True, device_count=lambda: 2,
            init=lambda: warnings.warn("GPU0 is too old for this torch"))
"""


def verdict_lines(ended: Ended) -> list[str]:
    assert (ended.code, ended.err) == (0, "")
    return ended.out.split("## verdict\n")[1].split("\n\n")[0].splitlines()


# Reports.


def test_a_gpu_with_an_ecc_error_is_named(doctor: Doctor, tmp_path: Path) -> None:
    ended = doctor(
        "h100", {"gpu1.ecc.volatile.uncorrected": 3}, env=fake_torch(tmp_path, TWO_GPUS), count=2
    )
    closing, finding, *_ = verdict_lines(ended)
    assert closing == "CLOSED, CRITICAL: 2 GPUs; ecc-uncorrected (GPU 1)"
    assert finding.startswith(
        "- GPU 1: ecc-uncorrected CRITICAL: 3 uncorrected memory errors since the driver "
        "was loaded; limit"
    )
    assert (
        "-> reset_gpu: stop what runs on the GPU, then `nvidia-smi --gpu-reset -i 1` as root"
        in finding
    )
    titles = ["verdict", "environment", "torch.utils.collect_env"]
    assert [line[3:] for line in ended.out.splitlines() if line.startswith("## ")] == titles


def test_a_machine_without_gpus_is_fit_if_none_is_requested(
    forked: Trainbox, tmp_path: Path
) -> None:
    env = {"GPUS": "0", **fake_torch(tmp_path, TWO_GPUS)}
    assert verdict_lines(forked("doctor", env=env))[0] == "OPEN, PASS: 0 GPUs"


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="torch finds real GPUs here")
def test_the_driver_sees_two_gpus_and_torch_none(doctor: Doctor) -> None:
    ended = doctor("geforce")
    assert verdict_lines(ended)[2].startswith("- driver sees 2 GPUs, torch sees 0: ")
    assert f"\n    PyTorch version: {importlib.metadata.version('torch')}" in ended.out
    assert "\n    Is CUDA available: False\n" in ended.out


def test_the_driver_and_torch_see_the_same(doctor: Doctor, tmp_path: Path) -> None:
    keys = {"gpu.persistence_mode": 1}
    ended = doctor("geforce", keys, env=fake_torch(tmp_path, TWO_GPUS))
    assert verdict_lines(ended) == ["OPEN, PASS: 2 GPUs", "- GPU0 is too old for this torch"]
    lines = ended.out.splitlines()
    assert re.match(r"trainbox [\d.]+, revision ([0-9a-f]{40}(-dirty)?|unknown), 20", lines[0])
    # The stand-in has no torch.utils.
    assert lines[-1].startswith("    exited with code 1 and no answer: ")


HANGS = """
import signal
signal.pause()
"""
WITHIN_4_S = """
import sys
from entrypoint.health.check import Question
from entrypoint.doctor.examine import examination_report
from entrypoint.health.verdict import Mode
sys.stderr.isatty = lambda: True
print(examination_report(Question(Mode.GATE), torch_deadline_s=4))
"""


def test_a_torch_that_hangs_is_killed_at_the_deadline(tmp_path: Path) -> None:
    env = clean_environment(**fake_torch(tmp_path, HANGS))
    done = subprocess.run(
        [sys.executable, "-c", WITHIN_4_S],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert "waiting for torch ..." in done.stderr
    assert verdict_lines(Ended(done.returncode, done.stdout, ""))[-1] == (
        "- torch gave no answer within 4 s: check the driver and the disk"
    )
    assert "## environment" in done.stdout
    assert done.stdout.endswith("    gave no answer within 4 s: check the driver and the disk\n")
    assert started_with(str(tmp_path)) == []


# fmt: off
_BROKEN_TORCHES = [
    ("x = 1",
     "torch cannot be used: AttributeError: module 'torch' has no attribute '__version__'"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGILL)",
     "torch was killed by signal 4 (Illegal instruction): no output"),
    ("import os; os._exit(7)", "torch exited with code 7 and no answer: no output"),
]
# fmt: on


@pytest.mark.parametrize(("body", "reported"), _BROKEN_TORCHES)
def test_a_torch_that_does_not_start(
    forked: Trainbox, tmp_path: Path, body: str, reported: str
) -> None:
    assert f"- {reported}" in verdict_lines(forked("doctor", env=fake_torch(tmp_path, body)))


# fmt: off
_BROKEN_MACHINES = [
    ({"ret.init": 999}, {},
     "- node: driver CRITICAL: the NVIDIA driver does not answer (NVML 999: Unknown Error)"),
    ({}, {"CUDA_VISIBLE_DEVICES": "0,0"},
     "- node: count CRITICAL: CUDA_VISIBLE_DEVICES=0,0 names GPU 0 twice: name each GPU once"),
]
# fmt: on


@pytest.mark.parametrize(("keys", "env", "reported"), _BROKEN_MACHINES)
def test_a_broken_driver_or_selection_becomes_part_of_the_report(
    doctor: Doctor, tmp_path: Path, keys: Any, env: Any, reported: str
) -> None:
    ended = doctor("geforce", keys, env=fake_torch(tmp_path, TWO_GPUS) | env)
    closing, *lines = verdict_lines(ended)
    assert closing.startswith("CLOSED, CRITICAL: ")
    assert any(line.startswith(reported) for line in lines), lines
    assert "## environment" in ended.out


def test_a_report_contains_nothing_private(doctor: Doctor, tmp_path: Path) -> None:
    home = "/home/kbauer"
    hidden = {
        "TRAINBOX_API_KEY": "canary-by-name",
        "SET": "width=64 name=canary",
        "TRAINBOX_A": "ghp_canaryGitHub0123",
        "SLURM_JOB_ACCOUNT": "canary-account",
        "http_proxy": "http://canary-user:canary-pass@proxy",
        "MY_SECRET_PLACE": "canary-unrelated",
        "PATH_TO_SOMETHING": "canary-unrelated",
    }
    partly = {
        "TASK": "my.py:Gestures --token canary-pair",
        "RDZV_ENDPOINT": f"https://canary-login:canary-word@{socket.gethostname()}:29400",
        "PET_MASTER_ADDR": "canary-node3",
        "SLURM_NODELIST": "canary-node[3-4]",
        "LD_LIBRARY_PATH": f"{home}/lib:/scratch/karoline/lib:/scratch/kbauer/lib",
        "USER": "karoline",
        "LOGNAME": "karoline",
        "HOME": home,
        "TRAINBOX_RUNS_DIR": str(tmp_path / "karoline/runs"),
        "TRAINBOX_DATA_DIR": f"{home}/data",
        **fake_torch(
            tmp_path, f"raise OSError('{home}/venv/libtorch.so: token=canary-torch at {home}')"
        ),
    }
    ended = doctor("geforce", env=hidden | partly)
    assert (ended.code, ended.err) == (0, "")
    page = ended.out.lower()
    for private in ("canary", "karoline", "kbauer"):
        assert private not in page, [line for line in page.splitlines() if private in line]
    assert (
        "torch cannot be used: OSError: ~/venv/libtorch.so: token=(not shown) at ~\n" in ended.out
    )
    for name in ("TRAINBOX_API_KEY", "SET", "TRAINBOX_A", "SLURM_JOB_ACCOUNT", "http_proxy"):
        assert [
            line.split(None, 1)[1] for line in ended.out.splitlines() if line.split()[:1] == [name]
        ] == ["(set, not shown)"]
    for shown in (
        "my.py:Gestures --token (not shown)",
        "~/lib:/scratch/[user]/lib:/scratch/[user]/lib",
        "~/data\n",
        "[user]/runs\n",
    ):
        assert shown in ended.out


# Reasons, as values.

AROUND = Surroundings(
    trainbox="0.1.0, revision unknown",
    signs=("Docker",),
    devices={"nvidia0": "rw", "nvidiactl": "rw", "nvidia-uvm": "rw", "nvidia-modeset": ""},
    kernel_module="580.95.05",
)
GPUS = tuple(Gpu(index, f"GPU-{index}", "H100", 81559) for index in range(2))
SLICES = tuple(
    Gpu(0, f"MIG-{index}", "H100 MIG 1g.10gb", 9984, mig_index=index, mig_parent="GPU-0")
    for index in range(7)
)
OLD = Finding(
    "cuda", Result.CRITICAL, "this image is too new for this driver", action="update_driver"
)
SEEN = Examination(
    taken_at="now",
    verdict=Verdict(Mode.GATE, ()),
    driver=Detection(GPUS, "580.95.05"),
    visible=GPUS,
    torch=TorchAnswer(version="2.15.0", cuda="13.2", count=0, error="RuntimeError: CUDA failed"),
    around=AROUND,
    collected=(),
    env={},
    hidden=(),
)


def torch(**changes: Any) -> Examination:
    return replace(SEEN, torch=replace(SEEN.torch, **changes))


def around(**changes: Any) -> Examination:
    return replace(SEEN, around=replace(AROUND, **changes))


ZERO = "driver sees 2 GPUs, torch sees 0: "


# fmt: off
_REASONS = [
    (torch(count=2), ""),
    (SEEN, f"{ZERO}RuntimeError: CUDA failed; recreate the container, and run `nvidia-smi` in it "
     f"and on the host"),
    (torch(cuda=None),
     f"{ZERO}torch 2.15.0 is built without CUDA; install the version in requirements.lock"),
    (replace(SEEN, verdict=Verdict(Mode.GATE, (OLD,))),
     f"{ZERO}this driver is too old for torch's CUDA 13.2; see above"),
    (torch(libcuda=NO_LIBCUDA), f"{ZERO}the driver's CUDA library is missing ({NO_LIBCUDA}); "
     f"start the container with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility, or "
     f"install libcuda1 on the host"),
    (around(devices={"nvidia0": "r", "nvidiactl": "", "nvidia-uvm": "rw"}),
     f"{ZERO}this user may not read and write /dev/nvidia0 /dev/nvidiactl; grant the access, or "
     f"pass the devices to the container"),
    (around(devices={"nvidia0": "rw", "nvidiactl": "rw"}), f"{ZERO}/dev/nvidia-uvm is missing; "
     f"pass this device to the container, or load the kernel module nvidia_uvm on the host"),
    (replace(SEEN, visible=GPUS[:1], env={"CUDA_VISIBLE_DEVICES": "0"}),
     "driver sees 2 GPUs, CUDA_VISIBLE_DEVICES leaves 1, torch sees 0: CUDA may interpret "
     "CUDA_VISIBLE_DEVICES differently; unset it and try again"),
    (replace(torch(count=1), driver=Detection(SLICES), visible=SLICES),
     "driver sees 7 GPUs, torch sees 1: CUDA shows a process only one MIG slice, so this is "
     "correct"),
    (replace(torch(count=1), driver=Detection(absent="none"), visible=()),
     "driver sees 0 GPUs, torch sees 1: Trainbox plans with the driver's list; start the "
     "container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
]
# fmt: on


@pytest.mark.parametrize(("seen", "text"), _REASONS)
def test_the_reason_why_torch_and_the_driver_differ(seen: Examination, text: str) -> None:
    assert difference(seen) == text


WITHOUT = replace(torch(count=0), driver=Detection(absent="no NVIDIA driver here"), visible=())


# fmt: off
_PROBLEMS = [
    (torch(count=2, warnings=["too old"]), ["too old"]),
    (replace(WITHOUT, around=replace(AROUND, kernel_module="")), []),
    (
        WITHOUT,
        [
            "the host runs NVIDIA driver 580.95.05, but this container has no access to it: "
            "start it with --gpus all (it needs nvidia-container-toolkit on the host)"
        ],
    ),
    (
        replace(WITHOUT, around=replace(AROUND, signs=())),
        [
            "the host runs NVIDIA driver 580.95.05, but its libraries are missing: "
            "install the driver's user-space packages, such as libnvidia-compute"
        ],
    ),
]
# fmt: on


@pytest.mark.parametrize(("seen", "lines"), _PROBLEMS)
def test_problems_beside_the_verdict(seen: Examination, lines: list[str]) -> None:
    assert problems(seen) == lines


def test_gpus_with_the_same_finding_share_a_line() -> None:
    off = Finding("persistence", Result.WARN, "off", action="change_mode")
    findings = [replace(off, gpu=f"{index}", uuid=f"GPU-{index}") for index in range(3)]
    findings += [
        Finding("mig", Result.PASS, "off", gpu="0"),
        Finding("shm", Result.WARN, "64 MiB for /home/karoline"),
    ]
    assert finding_lines(findings, [("karoline", "[user]")]) == [
        "GPU 0,1,2: persistence WARN: off -> change_mode: set it as root with "
        "`nvidia-smi`: -pm 1 (persistence), -c 0 (compute mode)",
        "node: shm WARN: 64 MiB for /home/[user]",
    ]


# Readings of the system.


def test_signs_of_containers() -> None:
    env = dict.fromkeys(("APPTAINER_NAME", "KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID"), "x")
    wsl, cgroup = "5.15.167.4-microsoft-standard-WSL2", "0::/docker-1f.scope/cri-containerd"
    assert container_signs(env, cgroup, wsl, ()) == (
        *("Docker", "Apptainer", "Kubernetes", "containerd", "a SLURM job", "WSL"),
    )
    env, marks = {"SINGULARITY_NAME": "x"}, ("/.dockerenv",)
    assert container_signs(env, "0::/kubepods", "6.1.0", marks) == (
        *("Docker", "Apptainer", "Kubernetes"),
    )
    assert container_signs({}, "0::/", "6.1.0", ()) == ()
