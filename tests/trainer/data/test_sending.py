"""Batches of loader workers arrive whole, or the training ends with the cause in one line."""

import contextlib
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from tests.support.here import Here
from tests.support.library import raise_in_library
from tests.support.tiny import TINY, Tiny
from trainbox.errors import Failure, WrongUse
from trainbox.tensor_trees import mapped, tensors_in
from trainer.data.examples import _Pinnable, example_loader, read_once
from trainer.data.sending import Sent, raise_file_limit, sent
from trainer.data.workers import EndsOfWorkers
from trainer.records.digest import value_digest
from trainer.session.failures import errors_as_failures

_POSITIONS = [[(0, 0), (0, 1)], [(0, 2), (0, 3)]]
_EXAMPLES: Any = [(torch.arange(4.0) + i, i % 2) for i in range(4)]


def _gradient(examples: list[Any]) -> Any:
    inputs, labels = default_collate(examples)
    return inputs.requires_grad_() * 2, labels


def _with(value: Callable[[], Any]) -> Callable[[list[Any]], Any]:
    return lambda examples: [*default_collate(examples), value()]


class _Unreadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)


@pytest.mark.parametrize(
    ("collate", "reason"),
    [
        (_gradient, "non-leaf tensor which requires_grad"),
        (_with(lambda: lambda: 1), "pickle local object"),
        (_with(threading.Lock), r"cannot pickle '_thread\.lock' object"),
        (_with(lambda: (i for i in range(3))), "cannot pickle 'generator' object"),
        (_with(lambda: open(os.devnull)), "cannot pickle '_io.TextIOWrapper' object"),  # noqa: SIM115, PTH123
        (_with(_Unreadable), "ValueError: invalid literal"),
    ],
)
def test_a_batch_that_a_worker_cannot_send_is_refused(
    collate: Callable[[list[Any]], Any], reason: str
) -> None:
    with (
        pytest.raises(WrongUse, match=rf"^a loader worker cannot send its batch \(.*{reason}"),
        errors_as_failures(Path("runs")),
    ):
        list(read_once(_EXAMPLES, _POSITIONS, 1, collate))


def test_the_line_of_a_training_whose_batch_has_a_gradient(here: Here) -> None:
    for method in ("train_dataset", "validation_dataset"):
        here.plant(**{method: lambda *_: _Own(lambda: None)})
    here.plant(collate=lambda _, examples: _gradient(examples))
    err = here.refused("train", TINY, "--device", "cpu", "--workers", "1", code=2)
    assert "trainbox: a loader worker cannot send its batch (RuntimeError: " in err
    assert "Traceback" not in err


class _Own(Dataset[Any]):
    """Examples, one of which calls `action` first."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._action = action

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            self._action()
        return _EXAMPLES[index % 4]


def _raise_local() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("has no name for the parent")


def _interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            "a loader worker was killed by SIGKILL: the system may be out of memory: ",
        ),
        (
            lambda: os.kill(os.getpid(), signal.SIGSEGV),
            "a loader worker was killed by SIGSEGV: a library of the dataset has crashed: ",
        ),
        (
            lambda: os._exit(3),
            "a loader worker exited with code 3: the dataset or a library has ended it",
        ),
        (lambda: os._exit(0), "a loader worker exited"),
        (lambda: sys.exit(3), r"the task called sys\.exit\(3\) in "),
        (_interrupt, "the task raised KeyboardInterrupt in _interrupt "),
    ],
)
def test_a_worker_that_ends_is_one_line(action: Callable[[], Any], message: str) -> None:
    with pytest.raises(Failure, match=f"^{message}"), errors_as_failures(Path("runs")):
        list(read_once(_Own(action), _POSITIONS, 1))


class _Wordless(ValueError):
    def __str__(self) -> str:
        raise KeyError("no text")


class _OfTwo(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class _Ending(BaseException):
    pass


def _raising(error: BaseException) -> Callable[[], Any]:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (_raise_local, "LocalError: has no name for the parent"),
        (_raising(_Wordless()), "_Wordless: without a text, because its __str__"),
        (_raising(_OfTwo(1, 2)), "_OfTwo: 1 and 2"),
        (_raising(ExceptionGroup("several", [ValueError("bad")])), "ExceptionGroup: several"),
        (_raising(_Ending("the end")), "_Ending: the end"),
        (_raising(GeneratorExit()), "GeneratorExit"),
    ],
)
def test_an_error_that_the_parent_cannot_make_again_arrives(
    action: Callable[[], Any], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        list(read_once(_Own(action), _POSITIONS, 1))


def test_a_worker_with_a_thread_of_the_task_is_ended() -> None:
    def start() -> None:
        threading.Thread(target=lambda: time.sleep(600)).start()

    loader = example_loader(_Own(start), 0, _POSITIONS, torch.device("cpu"), 1)
    batches = iter(loader)
    next(batches)
    (worker,) = multiprocessing.active_children()
    del batches, loader  # torch waits for 5 s
    gc.collect()
    worker.join(5)
    assert not worker.is_alive()


def test_an_error_of_the_pinning_thread_is_raised_in_the_training() -> None:
    """torch's thread passes on what `pin_memory` raises; an error of its queue would end it."""
    batch = _Pinnable(Sent(pickle.dumps((None, pickle.dumps(_Unreadable())))))
    with pytest.raises(WrongUse, match="cannot send its batch"):
        batch.pin_memory()


_MANY = {
    "small": [torch.arange(3.0) + i for i in range(20)],
    "types": [torch.zeros((2, i), dtype=torch.int16) + i for i in range(10)],
    "large": torch.arange(2**19).share_memory_(),
    "other": [torch.ones(2, 3).T, torch.tensor(True)],
    "text": ("a", 1, None),
}


def _received(value: Any) -> Any:
    """Return a value that a worker has sent."""
    loader = DataLoader(range(1), num_workers=1, collate_fn=lambda _: sent(value))  # type: ignore[arg-type]
    batches = iter(loader)
    return next(batches).received()


def test_many_tensors_share_a_block() -> None:
    batch = _received(_MANY)
    assert value_digest(batch) == value_digest(_MANY)
    assert batch["other"][0].stride() == (1, 3)
    files = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(batch)}
    assert len(files) <= 4  # the block, the large tensor, and tensors with other strides
    batch["small"][0].add_(1)
    assert value_digest(batch["small"][1:]) == value_digest(_MANY["small"][1:])


@pytest.mark.parametrize("count", [1, 20])
def test_conjugated_and_negated_views_keep_their_values(count: int) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    given = [values.conj(), values.conj().imag, values.conj() * 2] * count
    assert [value.tolist() for value in _received(given)] == [value.tolist() for value in given]


def test_workers_give_the_batches_of_the_training_process() -> None:
    examples: Any = [{f"{n}": torch.full((3,), n + i) for n in range(50)} for i in range(4)]
    cpu = torch.device("cpu")
    own, of_workers = (
        [
            value_digest(mapped(torch.clone, batch))
            for batch in example_loader(examples, 0, _POSITIONS, cpu, workers)
        ]
        for workers in (0, 2)
    )
    assert own == of_workers


@pytest.fixture
def limit() -> Any:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda soft: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_of_open_files_is_raised(limit: Any) -> None:
    limit(200)
    raise_file_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == min(hard, 2**16)
    raise_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft


def test_a_worker_with_too_many_files_names_the_limit(limit: Any) -> None:
    def collate(examples: list[Any]) -> Any:
        limit(len([*Path("/dev/fd").iterdir()]) + 3)  # of the worker
        return default_collate(examples)

    with (
        pytest.raises(WrongUse, match=r"raise the limit with `ulimit -n \d+`"),
        errors_as_failures(Path("runs")),
    ):
        list(read_once(_EXAMPLES, _POSITIONS, 1, collate))


def test_a_training_with_too_many_files_names_the_limit(limit: Any) -> None:
    loader = DataLoader(range(1), num_workers=1, collate_fn=lambda _: sent(torch.ones(3)))  # type: ignore[arg-type]
    batches = iter(loader)
    batch = next(batches)
    highest = max(int(path.name) for path in Path("/dev/fd").iterdir())
    limit(highest + 1)
    held = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        with (
            pytest.raises(WrongUse, match=r"raise the limit with `ulimit -n \d+`"),
            errors_as_failures(Path("runs")),
        ):
            batch.received()
    finally:
        for file in held:
            os.close(file)
    del batches


def test_the_end_of_a_worker_is_an_error_only_where_a_batch_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the lock of a library, Python would print the error as a traceback and go on."""
    ends, heard = EndsOfWorkers(), list[int]()
    monkeypatch.setattr("signal.signal", lambda *_: None)
    ends.delay(lambda number, _: heard.append(number))
    ends._note(signal.SIGCHLD, None)
    assert heard == []
    with ends.heard():
        assert heard == [signal.SIGCHLD]
        ends._note(signal.SIGCHLD, None)
        assert len(heard) == 2
    with ends.heard():
        assert len(heard) == 2


@pytest.mark.parametrize(
    "text",
    [
        "received 0 items of ancdata",
        "unable to open shared memory object </torch_1_2_3> in read-write mode: Too many open "
        "files (24)",
        "Too many open files. Communication with the workers is no longer possible.",
    ],
)
def test_torch_s_errors_of_too_many_files(text: str) -> None:
    with (
        pytest.raises(WrongUse, match="more than .* open.*`ulimit -n"),
        errors_as_failures(Path("runs")),
    ):
        raise_in_library(RuntimeError(text))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (torch.Tensor.to_sparse, "sparse"),
        (lambda x: torch.nested.nested_tensor([*x], layout=torch.jagged), "nested"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "quantized"),
    ],
)
def test_batches_of_other_kinds_are_refused(
    change: Callable[[Any], Any], kind: str, workers: int
) -> None:
    def collate(examples: list[Any]) -> Any:
        inputs, labels = default_collate(examples)
        return change(inputs), labels

    with (
        pytest.raises(WrongUse, match=rf"^a batch has a {kind} tensor \(.*\): convert the tensor"),
        errors_as_failures(Path("runs")),
    ):
        list(read_once(_EXAMPLES, _POSITIONS, workers, collate))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("name", "buffer", "message"),
    [
        (
            "q",
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "creates q as a quantized tensor, which cannot be saved",
        ),
        ("s", lambda: torch.ones(3).to_sparse(), "creates s as a sparse tensor"),
        (
            "__metadata__",
            lambda: torch.ones(3),
            "creates __metadata__, the name of the header in model.",
        ),
    ],
)
def test_buffers_that_cannot_be_saved_are_refused(
    here: Here, name: str, buffer: Any, message: str
) -> None:
    build = Tiny.build_model

    def with_buffer(task: Tiny) -> torch.nn.Module:
        model = build(task)
        model.register_buffer(name, buffer())
        return model

    here.plant(build_model=with_buffer)
    assert message in here.refused("train", TINY, "--device", "cpu", code=2)
