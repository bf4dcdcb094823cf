"""From the driver to the plan: real commands and the real nvidia-ml-py on the NVML stub."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from entrypoint.driver import process
from tests.support.commands import Ended, Trainbox
from tests.support.here import Here, here  # noqa: F401 - a fixture
from tests.support.nvml_stub.build import stub_env, write_config

LOST = {"gpu1.ret": 15}
GPU_1_LOST = (
    "GPU 1 cannot be used (NVML 15: GPU is lost): name others with --gpu-ids, or fix it "
    "(reset, reboot)"
)
WITHOUT_GPUS = "to train without GPUs, use --device cpu"
MISMATCH = (
    "the NVIDIA driver does not answer (NVML 18: RM has detected an NVML/RM version mismatch.): "
    f"the driver was updated under a running kernel module: reboot the host; {WITHOUT_GPUS}"
)
UNKNOWN_ERROR = (
    "the NVIDIA driver does not answer (NVML 999: Unknown Error): "
    f"the container may have lost its GPUs (a daemon reload does that): recreate it; {WITHOUT_GPUS}"
)


def uuid(gpu: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{gpu:012d}"


def mig_uuid(gpu: int, mig: int) -> str:
    return f"MIG-00000000-0000-0000-{gpu:04d}-{mig:012d}"


@dataclass
class Host:
    """A machine with the GPUs of a profile, on which `trainbox` runs."""

    trainbox: Trainbox
    environment: dict[str, str]

    def __call__(self, *arguments: str, **env: str) -> Ended:
        return self.trainbox(*arguments, env=self.environment | env)

    def labels(self, *arguments: str, **env: str) -> tuple[list[str], str]:
        """Return the labels of the plan's GPUs, and its reason."""
        ended = self("plan", *arguments, **env)
        assert (ended.code, ended.err) == (0, "")
        plan = json.loads(ended.out)
        assert plan["env"]["CUDA_VISIBLE_DEVICES"] == ",".join(gpu["uuid"] for gpu in plan["gpus"])
        names = [
            f"{gpu['index']}" + f":{gpu['mig_index']}" * (gpu["mig_index"] is not None)
            for gpu in plan["gpus"]
        ]
        return names, plan["reason"]

    def refusal(self, *arguments: str, **env: str) -> tuple[int, str]:
        ended = self("plan", *arguments, **env)
        assert ended.out == ""
        return ended.code, ended.err.removeprefix("trainbox: ").removesuffix("\n")


@pytest.fixture
def host(library: Path, forked: Trainbox, tmp_path: Path) -> Callable[..., Host]:
    """Make a host: `host("h100", {"gpu1.ret": 15}, count=4)`."""

    def make(profile: str, keys: dict[str, object] | None = None, **more: object) -> Host:
        return Host(
            forked,
            stub_env(library.parent, write_config(tmp_path / "nvml.conf", profile, keys, **more)),
        )

    return make


# Listing.


def test_the_list_of_gpus(host: Callable[..., Host]) -> None:
    two = host("geforce")
    listed = two("health", "--list", "--json")
    assert (listed.code, listed.err) == (0, "")
    expected = {"name": "NVIDIA GeForce RTX 3080", "memory_mib": 10240, "capability": [8, 6]}
    expected |= dict.fromkeys(("mig_index", "mig_parent", "fault"))
    assert json.loads(listed.out) == [{"index": i, "uuid": uuid(i)} | expected for i in (0, 1)]
    assert two("health", "--list").out.splitlines() == [
        "NVIDIA driver 580.95.05 (stub)",
        f"GPU 0  NVIDIA GeForce RTX 3080  10240 MiB  {uuid(0)}",
        f"GPU 1  NVIDIA GeForce RTX 3080  10240 MiB  {uuid(1)}",
    ]


def test_slices_are_listed_instead_of_their_gpu(host: Callable[..., Host]) -> None:
    free_place = {"gpu0.mig3.memory_mib": ""}
    found = json.loads(host("h100-mig", free_place)("health", "--list", "--json").out)
    assert [(gpu["index"], gpu["mig_index"], gpu["uuid"], gpu["mig_parent"]) for gpu in found] == [
        *(
            (0, label, mig_uuid(0, position), uuid(0))
            for label, position in enumerate([0, 1, 2, 4, 5, 6])
        ),
        *((1, position, mig_uuid(1, position), uuid(1)) for position in range(7)),
    ]
    assert {(gpu["name"], gpu["memory_mib"]) for gpu in found} == {
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9984)
    }


@pytest.mark.parametrize("hidden", ["memory", "mig", "name", "temperature"])
def test_what_a_container_hides_of_a_gpu_with_mig_refuses_no_slice(
    host: Callable[..., Host], hidden: str
) -> None:
    """The driver answers such a call on the whole GPU with 4, no permission."""
    inside = host("a100-mig", {f"gpu.ret.{hidden}": 4})
    found = json.loads(inside("health", "--list", "--json").out)
    assert [(gpu["fault"], gpu["mig_index"]) for gpu in found] == [(None, 0), (None, 1), (None, 2)]
    assert inside.labels("--gpu-ids", "0:1")[0] == ["0:1"]
    gate = json.loads(inside("health", "--gate", "--gpu-ids", "0:1", "--json").out)
    assert gate["open"], gate["findings"]


def test_the_slices_of_other_containers_are_not_listed(host: Callable[..., Host]) -> None:
    inside = host("a100-mig", {"gpu0.mig0.ret.handle": 4, "gpu0.mig2.ret.handle": 4})
    found = json.loads(inside("health", "--list", "--json").out)
    assert [gpu["uuid"] for gpu in found] == [mig_uuid(0, 1)]


def test_a_lost_slice_is_a_fault_and_not_hidden(host: Callable[..., Host]) -> None:
    lost = host("a100-mig", {"gpu0.mig1.ret.handle": 15})
    assert [line.rpartition("  ")[2] for line in lost("health", "--list").out.splitlines()[1:]] == [
        "NVML 15: GPU is lost"
    ]


NOT_A_TEXT = "H100 \udcff"


def test_a_name_that_is_not_a_text_costs_only_the_name(host: Callable[..., Host]) -> None:
    garbled = host("h100", {"gpu1.name": NOT_A_TEXT, "driver": NOT_A_TEXT}, count=2)
    assert garbled("health", "--list").out.splitlines() == [
        f"GPU 0  NVIDIA H100 80GB HBM3  81559 MiB  {uuid(0)}",
        f"GPU 1  unknown  81559 MiB  {uuid(1)}",
    ]
    assert garbled.labels()[0] == ["0", "1"]


def test_a_gpu_in_mig_mode_without_slices_cannot_be_used(host: Callable[..., Host]) -> None:
    bare = host("h100", {"gpu0.mig": 1}, count=2)
    assert bare("health", "--list").out.splitlines()[1:] == [
        f"GPU 0  NVIDIA H100 80GB HBM3  0 MiB  {uuid(0)}  MIG mode is on without a slice",
        f"GPU 1  NVIDIA H100 80GB HBM3  81559 MiB  {uuid(1)}",
    ]
    assert bare.refusal("--gpus", "1") == (
        3,
        "GPU 0 cannot be used (MIG mode is on without a slice): name others with "
        "--gpu-ids, or fix it (reset, reboot)",
    )


# Plans.


def test_a_gpu_that_torch_has_no_code_for_is_refused(host: Callable[..., Host]) -> None:
    mixed = host("v100", {"gpu0.compute_capability": "8.0"}, count=2)
    code, reason = mixed.refusal()
    assert (code, reason.partition(" (")[0]) == (
        3,
        "torch has no code for GPU 1, Tesla V100-SXM2-32GB",
    )
    assert "it has compute capability 7.0, and the installed torch is built for sm_75 " in reason
    assert mixed.labels(GPU_IDS="0")[0] == ["0"]
    assert host("v100", {"gpu.compute_capability": ""}, count=1).labels()[0] == ["0"]
    unread = host("h100-mig", {"gpu1.compute_capability": "6.1"})
    assert "GPU 1:0" in unread.refusal("--gpu-ids", "1:0")[1], "a slice has its GPU's capability"


def test_cuda_visible_devices_and_then_gpu_ids_select_gpus(host: Callable[..., Host]) -> None:
    four = host("h100", count=4)
    assert four.labels(CUDA_VISIBLE_DEVICES=f"{uuid(3)},1")[0] == ["3", "1"]
    assert four.labels(CUDA_VISIBLE_DEVICES="")[0] == []
    assert four.refusal(CUDA_VISIBLE_DEVICES="0,0")[0] == 2
    assert four.refusal(CUDA_VISIBLE_DEVICES="0,1", GPU_IDS="2") == (
        3,
        "--gpu-ids=2: GPU 2 was not found: choose from the GPUs found (0 1)",
    )


# Faults.


def test_a_lost_gpu_is_listed_and_refused_and_can_be_avoided(host: Callable[..., Host]) -> None:
    four = host("h100", LOST, count=4)
    assert four("health", "--list").out.splitlines()[1:4] == [
        f"GPU 0  NVIDIA H100 80GB HBM3  81559 MiB  {uuid(0)}",
        "GPU 1  unknown  0 MiB  unknown-1  NVML 15: GPU is lost",
        f"GPU 2  NVIDIA H100 80GB HBM3  81559 MiB  {uuid(2)}",
    ]
    assert four.refusal() == (3, GPU_1_LOST)
    assert four.labels("--gpu-ids", "0,2,3")[0] == ["0", "2", "3"]


def test_health_judges_the_gpus_that_a_launch_would_use(host: Callable[..., Host]) -> None:
    four = host("h100", LOST, count=4)
    few = four("health", "--gate", GPUS="5")
    assert (few.code, few.err) == (1, "")
    assert few.out.splitlines()[-1] == "CLOSED, CRITICAL: 4 GPUs; count (node), handle (GPU 1)"
    assert "          read   NVML 15: GPU is lost" in few.out.splitlines()


@pytest.mark.parametrize(("error", "text"), [(18, MISMATCH), (999, UNKNOWN_ERROR)])
def test_a_broken_driver_is_reported_with_its_remedy(
    host: Callable[..., Host], error: int, text: str
) -> None:
    broken = host("h100", {"ret.init": error})
    assert broken.refusal() == (3, text)
    ended = broken("health", "--list")
    assert (ended.code, ended.out, ended.err) == (3, "", f"trainbox: {text}\n")
    judged = broken("health", "--gate")
    assert (judged.code, judged.err, judged.out.splitlines()[-1]) == (
        1,
        "",
        "CLOSED, CRITICAL: 0 GPUs; driver (node)",
    )
    assert text.removesuffix(f"; {WITHOUT_GPUS}") in judged.out
    none = broken("health", "--gate", GPUS="0")
    assert (none.code, none.out.splitlines()[-1]) == (0, "OPEN, PASS: 0 GPUs")
    assert broken.labels("--device", "cpu") == ([], "no GPU visible -> 1 process on the CPU")
    assert broken.labels("--gpus", "0") == ([], "no GPU visible -> 1 process on the CPU")


def test_a_driver_that_breaks_while_it_lists(host: Callable[..., Host]) -> None:
    assert host("h100", {"ret.count": 999}).refusal() == (
        3,
        f"the NVIDIA driver failed while listing GPUs (NVML 999: Unknown Error); {WITHOUT_GPUS}",
    )


@pytest.mark.parametrize(
    ("broken", "why"),
    [("library", "NVML Shared Library Not Found"), ("module", "Driver Not Loaded")],
)
def test_a_host_without_a_driver_trains_on_the_cpu(
    host: Callable[..., Host], tmp_path: Path, broken: str, why: str
) -> None:
    bare = host("h100", {"ret.init": 9})
    if broken == "library":  # The loader finds this file before a real library, and cannot load it.
        (tmp_path / "libnvidia-ml.so.1").touch()
        bare.environment["LD_LIBRARY_PATH"] = str(tmp_path)
    listed = bare("health", "--list")
    assert (listed.code, listed.err, listed.out) == (
        0,
        "",
        f"no GPU visible: no NVIDIA driver here (NVML: {why})\n",
    )
    assert bare.labels() == ([], "no GPU visible -> 1 process on the CPU")
    assert bare.refusal("--gpus", "1")[0] == 3


@pytest.mark.parametrize(
    ("container", "remedy"),
    [
        (
            True,
            "start the container with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        ),
        (False, "install the driver's user-space packages, such as libnvidia-compute"),
    ],
)
@pytest.mark.parametrize("command", [("plan", "digits"), ("bench",), ("health", "--list")])
def test_a_process_with_gpus_but_without_the_drivers_library_does_not_use_the_cpu(
    here: Here,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    container: bool,
    remedy: str,
) -> None:
    monkeypatch.setattr(process, "given_gpus", lambda _: "/dev/nvidia0 exists")
    monkeypatch.setattr(process, "in_container", lambda: container)
    monkeypatch.setattr(process, "_has_library", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    code, out, err = here.command(*command)
    why = "no NVIDIA driver here (NVML: NVML Shared Library Not Found), but /dev/nvidia0 exists"
    assert (code, out, err) == (3, "", f"trainbox: {why}: {remedy}; {WITHOUT_GPUS}\n")
    # A user may hide the GPUs, or choose the CPU.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert here.command("plan", "digits")[0] == 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert here.command("plan", "--device", "cpu", "digits")[0] == 0


def test_a_driver_that_lists_no_gpu(host: Callable[..., Host]) -> None:
    empty = host("h100", count=0)
    assert empty("health", "--list").out.splitlines() == [
        "NVIDIA driver 580.95.05 (stub)",
        "no GPU visible: the driver lists none, or CUDA_VISIBLE_DEVICES hides them",
    ]
    assert empty.refusal("--gpus", "all")[0] == 3


# Known mistakes.


def test_a_gpu_without_memory_of_its_own_can_be_used(host: Callable[..., Host]) -> None:
    assert host("b200", {"gpu.memory_mib": ""}, count=1).labels()[0] == ["0"]


@pytest.mark.parametrize(
    ("profile", "fault"),
    [("h100", "gpu1.ret.mig"), ("h100-mig", "gpu1.mig0.ret"), ("h100-mig", "gpu1.ret.mig_max")],
)
def test_a_fault_of_one_gpu_leaves_the_others(
    host: Callable[..., Host], profile: str, fault: str
) -> None:
    assert host(profile, {fault: 15}, count=2).labels("--gpus", "1")[0][0].startswith("0")


# This is the only test here that waits for torch.


def test_gpus_that_torch_does_not_see_are_never_replaced_by_the_cpu(
    host: Callable[..., Host],
) -> None:
    two = host("geforce")
    ended = two("train", "digits", "--gpus", "1", "--epochs", "1", "--run", "r")
    assert ended.code == 3
    assert ended.out.startswith("health     OPEN, WARN: 1 GPU; persistence (GPU 0)")
    (message,) = ended.err.splitlines()
    assert message.startswith("trainbox: process 0 was given a GPU, but torch ")
    assert " finds 0 GPUs (Found no NVIDIA driver on your system. " in message
    assert message.endswith(
        "): update the driver if it is too old for this image, or restart the container if it has "
        "lost its GPUs; see `trainbox health`"
    )
    assert not (two.trainbox.folder / "runs").exists()
