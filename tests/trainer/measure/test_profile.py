"""The profile of some steps."""

from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent, FunctionEventAvg

from tests.support.here import Here, StopAfter
from tests.support.tiny import TINY
from trainbox.errors import Preempted, StorageFailure
from trainer.measure.profile import _longest
from trainer.system.signals import StopRequest

WORDS = ("train", TINY, "--device", "cpu", "--max-steps", "18", "--threads", "1")


def test_a_profile_has_a_trace_and_the_longest_operators_and_the_same_bits(here: Here) -> None:
    out = here.succeeds(*WORDS, "--run", "r", "--profile", "3")
    lines = out.splitlines()
    (first,) = (i for i, line in enumerate(lines) if line.startswith("profile of 3 steps, "))
    assert lines[first].endswith("runs/r/profile.json; to view it, open https://ui.perfetto.dev")
    assert lines[first + 1].split() == ["share", "ms", "calls", "operator"]
    shares = [float(line.split()[0].rstrip("%")) for line in lines[first + 2 : first + 12]]
    assert shares == sorted(shares, reverse=True)
    assert any("aten::" in line for line in lines[first + 2 : first + 12])
    trace = here.json("profile.json")
    name = "autograd::engine::evaluate_function: MseLossBackward0"
    backwards = [event for event in trace["traceEvents"] if event.get("name") == name]
    assert len(backwards) == 3
    here.command(*WORDS, "--run", "other")
    assert here.digest() == here.digest("other")
    assert not (here.path("other") / "profile.json").exists()


def test_a_training_that_is_stopped_has_a_profile_of_its_last_steps(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped_after(steps: int) -> str:
        stop = StopAfter(steps)
        monkeypatch.setattr(StopRequest, "install", lambda **_: stop)
        with stop.counting():
            code, out, _ = here.command(*WORDS[:5], "40", "--run", "r", "--profile", "10")
        assert code == Preempted.exit_code
        return out

    assert "profile of 4 steps, " in stopped_after(14)
    path = here.path() / "profile.json"
    assert here.json("profile.json")["traceEvents"]
    # A trace that cannot be written does not hide that the training was stopped.
    path.unlink()
    path.mkdir()
    assert "profile.json cannot be written (" in stopped_after(14)


def test_a_training_without_a_profiled_step_logs_this(here: Here) -> None:
    _, out, _ = here.command(*WORDS[:5], "10", "--run", "r", "--profile", "2")
    assert "--profile 2: no step was profiled, because this start has trained at most" in out
    assert not (here.path() / "profile.json").exists()


def test_a_trace_that_torch_cannot_write_is_an_error(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, torch logs a line and leaves a part of the trace."""

    def export(_profiler: torch.profiler.profile, path: str) -> None:
        Path(f"{path}.tmp").write_text("{")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    code, out, err = here.command(*WORDS, "--run", "r", "--profile", "3")
    assert (code, "profile of" in out) == (StorageFailure.exit_code, False)
    assert "runs/r/profile.json cannot be written: free space" in err
    assert not list(here.path().glob("profile.json*"))


def test_each_kernel_of_a_gpu_is_counted_once_and_sorted_by_its_time() -> None:
    """torch adds the time of a kernel to its operator, and to each annotated region around it."""
    events: list[FunctionEvent] = []
    for number in range(20):
        operator = _event(number, "aten::mm", DeviceType.CPU)
        operator.append_kernel(f"kernel {number}", 0, 100 - number)
        events += [operator, _event(number, f"kernel{number}", DeviceType.CUDA, 100 - number)]
    events.append(_event(20, "Optimizer.step", DeviceType.CUDA, 9000, is_user_annotation=True))
    averages = {event.key: FunctionEventAvg() for event in events}
    for event in events:
        averages[event.key].add(event)
    lines = _longest(averages.values(), on_gpu=True)
    assert [line.split()[-1] for line in lines] == ["operator", *(f"kernel{i}" for i in range(10))]
    assert lines[1].split() == ["5.5%", "0.10", "1", "kernel0"]


def _event(
    number: int, name: str, device_type: DeviceType, length_us: int = 1, **given: bool
) -> FunctionEvent:
    return FunctionEvent(
        number, name, 0, 0, length_us, device_type=device_type, use_device="cuda", **given
    )
