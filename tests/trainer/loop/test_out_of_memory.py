"""A batch that does not fit in memory is split into smaller micro-batches in the first steps.

The batch size and the steps stay the same, and the split is logged.
"""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.here import Here
from tests.support.tiny import Large, Tiny
from trainbox.errors import OutOfMemory, WrongUse
from trainer.loop.out_of_memory import memory_used_up
from trainer.records.compare_runs import first_difference

LARGE = "tests.support.tiny:Large"
_FOUND = "the GPU's memory is used up (CUDA out of memory. Tried to allocate 2.00 GiB.)"


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets how many examples fit in memory at once."""
    return lambda examples: monkeypatch.setenv("ROOM", str(examples))


@pytest.mark.parametrize(("room_for", "count"), [(8, 1), (3, 4)])
def test_the_batch_is_split_until_it_fits_with_the_bits_of_that_accumulation(
    here: Here, room: Any, room_for: int, count: int
) -> None:
    here.train("whole", task=LARGE, log_steps=1)
    here.train("requested", task=LARGE, log_steps=1, accumulation=count)
    room(room_for)
    out = here.train(task=LARGE, log_steps=1)

    assert here.digest() == here.digest("requested")
    assert here.json("config.json") == here.json("config.json", "requested")
    config = here.json("config.json")
    assert (config["batch_size"], config["accumulation"]) == (8, count)
    # The batch, the steps and the examples of each step stay the same.
    assert [(e["step"], e["epoch"]) for e in here.entries("train")] == [
        (e["step"], e["epoch"]) for e in here.entries("train", "whole")
    ]
    assert [e["order"] for e in here.digests("r")] == [e["order"] for e in here.digests("whole")]
    for name, weight in here.weights("whole").items():
        if name != "forwards":
            torch.testing.assert_close(here.weights()[name], weight)

    sizes = [8 >> number for number in range(count.bit_length() - 1)]
    messages = [f"{_FOUND} with {size} examples at once" for size in sizes]
    assert out.count("batch      8 = 1 process x 8 x 1 accumulation\n") == 1
    for number, line in enumerate(messages, 1):
        assert (
            f"{line}: restarting with smaller micro-batches of the same batch\n"
            f"batch      8 = 1 process x {8 >> number} x {2**number} accumulation\n" in out
        )
    assert out.count("restarting with smaller micro-batches") == len(messages)
    assert out.count("run        runs/r\n") == 1
    manifest = here.json("manifest.json")
    assert manifest.get("did_not_fit", []) == messages
    assert manifest["settings"]["accumulation"] == count


def test_a_batch_that_does_not_fit_in_the_second_step_restarts_the_run(
    here: Here, room: Any
) -> None:
    here.train(
        "requested", task=LARGE, fields={"first": 2}, log_steps=1, digest_steps=1, accumulation=2
    )
    room(4)
    out = here.train(task=LARGE, fields={"first": 2}, log_steps=1, digest_steps=1)
    assert f"{_FOUND} with 8 examples at once: restarting with smaller micro-batches" in out
    assert here.digest() == here.digest("requested")
    assert [e["step"] for e in here.entries("train")] == list(range(1, 19))
    trained = [[e for e in here.digests(run) if e["kind"] == "step"] for run in ("r", "requested")]
    assert trained[0] == trained[1]


def test_the_old_model_is_freed_before_the_next_is_built(
    here: Here, room: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[weakref.ref[nn.Module]] = []
    build_model = Large.build_model

    def recorded(task: Large) -> nn.Module:
        assert [model for model in built if model() is not None] == []
        model = build_model(task)
        model.itself = [model]  # type: ignore[assignment]  # a cycle, as hooks make
        built.append(weakref.ref(model))
        return model

    monkeypatch.setattr(Large, "build_model", recorded)
    room(2)
    here.train(task=LARGE, fields={"first": 2})
    assert len(built) == 3


@pytest.mark.parametrize(
    ("settings", "step"),
    [({"fields": {"first": 3}}, 2), ({"fields": {"first": 2}, "checkpoint_steps": 1}, 1)],
)
def test_after_the_first_steps_the_run_fails_and_keeps_its_checkpoints(
    here: Here, room: Any, settings: dict[str, Any], step: int
) -> None:
    """From the third step, or once a checkpoint has the bits of the larger micro-batches."""
    room(4)
    with pytest.raises(OutOfMemory) as ended:
        here.train(task=LARGE, **settings)
    assert str(ended.value).startswith(_FOUND)
    assert ended.value.exit_code == 5
    assert here.json("config.json")["accumulation"] == 1
    assert here.path().joinpath("checkpoints", f"step-{step:08d}.pt").exists() == (
        "checkpoint_steps" in settings
    )


# fmt: off
_SETTINGS = [
    ({"accumulation": 1}, 4,
     f"{_FOUND} with 8 example(s) at once; --accumulation 1 (or the config.json that was given)"),
    ({"accumulation": 2}, 3,
     f"{_FOUND} with 4 example(s) at once; --accumulation 2 (or the config.json that was given)"),
    ({}, 0, f"{_FOUND} with 1 example(s) at once, and a micro-batch cannot be smaller: make the "
     f"model or the examples smaller"),
    ({"fields": {"norm": True}}, 1,
     f"{_FOUND} with 2 example(s) at once, and batch norm needs two: make the model"),
]
# fmt: on


@pytest.mark.parametrize(("settings", "room_for", "text"), _SETTINGS)
def test_a_batch_that_cannot_be_split_exits_with_code_5(
    here: Here, room: Any, settings: dict[str, Any], room_for: int, text: str
) -> None:
    room(room_for)
    with pytest.raises(OutOfMemory) as ended:
        here.train(task=LARGE, **settings)
    assert str(ended.value).startswith(text)
    assert ended.value.exit_code == 5
    assert here.steps() == []


@pytest.mark.parametrize(
    ("settings", "room_for", "equation"),
    [
        ({"batch_size": 7}, 3, "7 = 1 process x 1 or 2 x 4 accumulation"),
        ({"batch_size": 7, "shards": 2}, 2, "7 = 2 shards x 1 or 2 x 2 accumulation"),
        ({"batch_size": 7, "fields": {"norm": True}}, 3, "7 = 1 process x 2 or 3 x 3 accumulation"),
    ],
)
def test_no_micro_batch_is_empty(
    here: Here, room: Any, settings: dict[str, Any], room_for: int, equation: str
) -> None:
    """The sizes of micro-batches differ by one if a shard cannot be halved evenly."""
    room(room_for)
    out = here.train(task=LARGE, max_steps=2, **settings)
    assert f"\nbatch      {equation}\n" in out
    norm = [line for line in out.splitlines() if "batch norm now sees" in line]
    assert bool(norm) == ("fields" in settings)


def test_a_resumed_run_keeps_its_micro_batches(here: Here, room: Any) -> None:
    here.train("requested", task=LARGE, accumulation=4)
    room(2)
    here.stopped(4, task=LARGE)
    room(8)
    out = here.train(task=LARGE)
    assert "batch      8 = 1 process x 2 x 4 accumulation\n" in out
    assert "restarting with smaller micro-batches" not in out
    assert here.digest() == here.digest("requested")
    with pytest.raises(WrongUse, match="started with other settings .accumulation: 4 -> 1."):
        here.train(task=LARGE, accumulation=1)


def test_a_resume_with_less_memory_is_refused_without_resume_anyway(here: Here, room: Any) -> None:
    room(4)
    here.stopped(4, task=LARGE)
    room(2)
    with pytest.raises(OutOfMemory) as ended:
        here.train(task=LARGE)
    assert str(ended.value) == (
        f"{_FOUND} with 4 example(s) at once; runs/r has a checkpoint of step 4, and smaller "
        "micro-batches change the bits: resume with more memory, or use --resume anyway"
    )
    assert here.json("config.json")["accumulation"] == 2
    out = here.train(task=LARGE, resume="anyway")
    assert "changed since the run's start: settings.accumulation: 2 -> 4\n" in out
    assert "batch      8 = 1 process x 2 x 4 accumulation\n" in out
    resumed = here.json("manifest.json")["resumes"][-1]
    assert resumed["step"] == 4
    assert resumed["changed"] == {"settings.accumulation": [2, 4]}
    assert resumed["did_not_fit"] == [f"{_FOUND} with 4 examples at once"]
    assert here.json("config.json")["accumulation"] == 4
    assert here.steps()[-1] == 18


def test_a_run_whose_batch_was_split_is_verified_and_repeated_by_its_config(
    here: Here, room: Any
) -> None:
    room(2)
    here.train(task=LARGE)
    room(8)
    out = here.succeeds("verify", "runs/r", "--device", "cpu")
    assert "SAME BITS" in out
    config = ("--config", "runs/r/config.json", "--device", "cpu")
    here.succeeds("train", *config, "--run", "again")
    assert here.digest("again") == here.digest()


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("CUDA error: out of memory\nCUDA kernel errors might be reported later", "GPU"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "GPU"),
        ("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `x`", "GPU"),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "GPU"),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", "host"),
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", "host"),
        ("unable to mmap 64 bytes from file </x>: Cannot allocate memory (12)", "host"),
        ("Caught RuntimeError in replica 1 on device 1.\nRuntimeError: CUDA out of memory", "GPU"),
        ("could not create a memory object: out of memory", "host"),  # as a library of the host
        ("device-side assert triggered", None),
        ("GET was unable to find an engine to execute this computation", None),
    ],
)
def test_each_library_has_its_own_message_for_used_up_memory(text: str, device: str | None) -> None:
    found = memory_used_up(RuntimeError(text))
    line = next((line for line in text.splitlines() if "Caught" not in line), "")
    assert found == (device and f"the {device}'s memory is used up ({line})")
    assert memory_used_up(ValueError(text)) is None


def test_memory_that_a_loader_worker_has_used_up_is_that_of_the_host() -> None:
    text = (
        "Caught OSError in DataLoader worker process 0.\nOriginal Traceback (most recent call last)"
    )
    text += (
        ':\n  File "a.py", line 1, in f\n    fork()\nOSError: [Errno 12] Cannot allocate memory\n'
    )
    assert memory_used_up(OSError(text)) == "the host's memory is used up (Cannot allocate memory)"


@pytest.mark.parametrize("mode", ["GET", "FIND"])
def test_a_convolution_without_an_algorithm_is_out_of_memory_if_an_allocation_failed(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The message has no other reason in it, such as a type that cuDNN does not support."""
    error = RuntimeError(f"{mode} was unable to find an engine to execute this computation")
    assert memory_used_up(error) is None
    monkeypatch.setattr("trainer.loop.out_of_memory.failed_allocations", lambda: 1)
    assert memory_used_up(error) == f"the GPU's memory is used up ({error})"
    assert memory_used_up(error, failed_before=1) is None


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list. Its length is the number of allocations that have failed on a GPU."""
    failed: list[int] = []
    for module in ("out_of_memory", "digests"):
        monkeypatch.setattr(f"trainer.loop.{module}.failed_allocations", lambda: len(failed))
        monkeypatch.setattr(
            f"trainer.loop.{module}.failed_allocations_change_bits",
            lambda _strategy: torch.are_deterministic_algorithms_enabled(),
        )
    return failed


def _fail_silently(patch: pytest.MonkeyPatch, failed: list[int], step: int) -> None:
    """Let an allocation fail in the training forwards of more than 4 examples from `step` on."""
    losses = Large.losses

    def losses_with_a_failure(task: Large, model: Any, batch: Any) -> Any:
        if model.training and int(model.forwards) + 1 >= step and len(batch[0]) > 4:
            failed.append(1)
        return losses(task, model, batch)

    patch.setattr(Large, "losses", losses_with_a_failure)


def test_a_batch_that_changes_the_algorithms_of_cudnn_does_not_fit(
    here: Here, hidden: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    here.train("requested", task=LARGE, accumulation=2)
    _fail_silently(monkeypatch, hidden, step=1)
    out = here.train(task=LARGE)
    assert "which only --fast allows) with 8 examples at once: restarting with smaller" in out
    assert here.digest() == here.digest("requested")
    out = here.train("fast", task=LARGE, deterministic=False)
    assert "restarting" not in out
    assert here.json("config.json", "fast")["accumulation"] == 1


def test_allocations_that_fail_later_are_logged_and_recorded_with_the_digests(
    here: Here, hidden: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    here.train("whole", task=LARGE, digest_steps=1)
    _fail_silently(monkeypatch, hidden, step=17)
    out = here.train(task=LARGE, digest_steps=1)
    assert "step 17: 1 allocation(s) of GPU memory have failed so far, so cuDNN may have" in out
    assert "step 18: 2 allocation(s) of GPU memory have failed so far" in out
    recorded = {e["step"]: e.get("failed_allocations") for e in here.digests("r")}
    assert recorded == dict.fromkeys(range(17)) | {17: 1, 18: 2}
    assert here.digest() == here.digest("whole")


def test_a_difference_of_bits_names_failed_allocations() -> None:
    entry = {"step": 3, "tensors": {"w": "a"}, "model": "a", "optimizer": "o", "order": "p"}
    other = {**entry, "tensors": {"w": "b"}, "model": "b"}
    assert "memory" not in str(first_difference([entry], [other]))
    assert str(first_difference([entry], [other | {"failed_allocations": 2}])).endswith(
        "first tensor w, 1 in all; GPU memory had run out by then, which changes bits"
    )


class NeedsTheWholeSet(Tiny):
    """Refuses a sample of the validation set, and has too little memory for the first whole set."""

    def metrics(self, totals: Any) -> dict[str, float]:
        with Path("calls").open("a") as calls:
            calls.write("x")
        if (number := Path("calls").stat().st_size) <= 2:
            raise ValueError("too few") if number == 1 else MemoryError
        return super().metrics(totals)


def test_memory_for_the_whole_validation_set_is_part_of_the_check(here: Here) -> None:
    out = here.train(task=f"{__file__}:NeedsTheWholeSet", max_steps=2, rehearses=True)
    assert "the host's memory is used up with 8 examples at once: restarting with smaller" in out
