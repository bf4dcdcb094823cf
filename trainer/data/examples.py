"""Read the examples of a dataset or of files, in this process or in loader workers."""

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from trainbox.batches import SeededDataset
from trainbox.errors import Failure, WrongUse, text_of
from trainbox.pinned import pinned_if_possible
from trainbox.tensor_trees import copied, mapped, tensors_in
from trainer.data.sending import Sent, errors_to_send, failure_of_start, raise_file_limit, sent
from trainer.data.workers import ENDS, failure_of_worker, worker_context
from trainer.system.signals import leave_signals_to_the_parent
from trainer.system.sources import loaded_sources

# In the messages of torch, and in ours.
_WORKER_ENDED = ("exited unexpectedly", "is killed by signal")
_END = object()  # after the last batch
# A function from the examples of a batch to the batch.
Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Question:
    """A position at which the process that reads a dataset answers, instead of with an example.

    `answer` is a function of a module. It gets the dataset, and its result is sent to the parent.
    """

    answer: Callable[[Any], Any]


@dataclass(frozen=True)
class Answer:
    """The answer to a `Question`."""

    content: Any


def _sources(_dataset: Any) -> dict[str, str]:
    return loaded_sources()


def length(dataset: Dataset[Any]) -> int:
    """Return the number of examples in the dataset.

    Raises:
        WrongUse: The dataset does not have a valid length, such as an IterableDataset.
    """
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise WrongUse(
            f"the dataset {type(dataset).__name__} has no length ({text_of(error)}): use a "
            "map-style dataset with __len__ and __getitem__"
        ) from error


def check_dense(batch: Any) -> None:
    """Check the tensors of a batch, which is copied, cut into parts and recorded.

    Raises:
        WrongUse: A tensor is sparse, nested or quantized.
    """
    for tensor in tensors_in(batch):
        kind, cure = "", "to_dense()"
        if tensor.is_nested:
            kind, cure = "nested", "torch.nested.to_padded_tensor()"
        elif tensor.layout != torch.strided:
            kind = "sparse"
        elif tensor.is_quantized:
            kind, cure = "quantized", "dequantize()"
        if kind:
            raise WrongUse(
                f"a batch has a {kind} tensor ({tensor.dtype}): convert the tensor with "
                f"{cure} in the dataset or in collate()"
            )


class _Pinnable:
    """A batch that torch's loader pins. torch alone would fail where CUDA cannot pin it."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def pin_memory(self) -> Any:
        """Return the batch in pinned memory. torch calls this for a batch of a type of ours.

        torch's thread passes on an error that is raised here, but not one of its queue.
        """
        return mapped(
            lambda tensor: pinned_if_possible(
                lambda pins: tensor.pin_memory() if pins else tensor.clone()
            ),
            _received(self._batch),
        )


class SeededExamples(SeededDataset):
    """The examples of a dataset, and the answers of the process that reads it."""

    def __getitem__(self, position: tuple[int, int] | Question) -> Any:
        if isinstance(position, Question):
            return Answer(position.answer(self.dataset))
        with errors_to_send():
            return super().__getitem__(position)


class _Loader(DataLoader[Any]):
    """A loader whose batches come from this process or from its workers."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        earlier = signal.getsignal(signal.SIGCHLD)
        try:
            batches = super().__iter__()
        except OSError as error:
            raise failure_of_start(error) from error
        if (of_torch := signal.getsignal(signal.SIGCHLD)) is not earlier and callable(of_torch):
            ENDS.delay(of_torch)
        try:
            while True:
                with ENDS.heard():
                    batch = next(batches, _END)
                    if batch is _END:
                        return
                    batch = _received(batch)
                yield batch
        except Exception as error:
            if not isinstance(batches, _MultiProcessingDataLoaderIter):
                raise
            has_ended = any(sign in str(error) for sign in _WORKER_ENDED)
            ended = failure_of_worker() if has_ended else None
            # The error keeps the workers, and the garbage collector could free their queues first.
            batches._shutdown_workers()
            if ended is not None:
                raise ended from error
            raise


def example_loader(
    dataset: Dataset[Any],
    seed: int,
    positions: Iterable[Any],
    device: torch.device,
    workers: int,
    collate: Collate = default_collate,
) -> "DataLoader[Any]":
    """Return a loader of one batch for each list of (epoch, index) in `positions`."""
    if workers:
        raise_file_limit()
    context = worker_context() if workers else None
    # A worker of another start method may have another process as its parent.
    parent = os.getpid() if context else None
    pins = device.type == "cuda"
    return _Loader(
        SeededExamples(dataset, seed),
        batch_sampler=positions,
        num_workers=workers,
        collate_fn=functools.partial(_batch, collate, pins),
        pin_memory=pins,
        persistent_workers=workers > 0,
        worker_init_fn=functools.partial(_start_worker, parent) if workers else None,
        multiprocessing_context=context,
    )


def _batch(collate: Collate, pins: bool, examples: list[Any]) -> Any:
    batch: Any = examples[0]
    if not isinstance(batch, Answer):
        with errors_to_send():
            batch = collate(examples)
            check_dense(batch)
        if collate is not default_collate:
            # The task may return tensors of its dataset, and change its batch in place.
            batch = copied(batch)
    if get_worker_info() is not None:
        batch = sent(batch)
    return _Pinnable(batch) if pins else batch


def _received(batch: Any) -> Any:
    return batch.received() if isinstance(batch, Sent) else batch


def _start_worker(parent: int | None, _worker: int) -> None:
    torch.set_num_threads(1)
    # The thread that sends files prints a traceback with this hook if it cannot open one. This
    # process then sends the error to its parent, which prints it in one line.
    sys.excepthook = lambda *_: None
    leave_signals_to_the_parent(parent)


def read_once(
    dataset: Dataset[Any],
    positions: Iterable[Any],
    workers: int,
    collate: Collate = default_collate,
) -> Iterator[Any]:
    """Yield one batch on the CPU for each list of (epoch, index) in `positions`.

    If the training uses workers, one worker reads. A file that the dataset opens at its first
    example is then not shared with workers that are forked later. Each batch is copied out of
    shared memory, which may be small.
    """
    loader = example_loader(dataset, 0, positions, torch.device("cpu"), min(workers, 1), collate)
    for batch in loader:
        yield mapped(Tensor.clone, batch)


def read_examples(
    dataset: Dataset[Any],
    indices: list[int],
    workers: int,
    collate: Collate = default_collate,
) -> tuple[list[Any], dict[str, str]]:
    """Return examples as batches of one, and the `loaded_sources` of the process that read them."""
    positions = [[(0, index)] for index in indices] + [[Question(_sources)]]
    *examples, sources = read_once(dataset, positions, workers, collate)
    return examples, sources.content


class FileExamples(Dataset[Any]):
    """The examples that `load`, the method load_example() of the task `name`, returns for files."""

    def __init__(self, files: Sequence[Path], load: Callable[[Path], Any], name: str) -> None:
        self.files, self._load, self._name = files, load, name

    @property
    def ids(self) -> list[str]:
        """The paths of the files."""
        return [str(path) for path in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        path = self.files[index]
        try:
            return self._load(path)
        except (Failure, MemoryError):
            raise
        except Exception as error:
            raise WrongUse(
                f"task {self._name}: load_example({str(path)!r}) raised {type(error).__name__} "
                f"({' '.join(text_of(error).split())}): replace or leave out the file, or correct "
                "the method"
            ) from error
