"""Yield the batches of a training and of its validations on the device."""

import copy
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, TensorDataset, default_collate

from trainbox.pinned import pinned_if_possible
from trainbox.tensor_trees import tensors_in, to_device
from trainer.data.examples import Collate, Question, example_loader, length, read_once
from trainer.data.schedule import Schedule

# The share of the device's free memory for a dataset. The rest is for the model.
DATA_SHARE_OF_DEVICE = 0.4
_SAMPLED_BATCHES = 4
# The epoch of the random numbers of a validation example: no training example has the same numbers.
_EPOCH = -1


def place_tensors(dataset: Dataset[Any], device: torch.device) -> Dataset[Any]:
    """Return a `TensorDataset` on the GPU if it fits there beside a model.

    Other datasets are returned unchanged.
    """
    if not isinstance(dataset, TensorDataset) or device.type != "cuda":
        return dataset
    size = sum(tensor.nbytes for tensor in dataset.tensors)
    free, _total = torch.cuda.mem_get_info(device)
    if size > DATA_SHARE_OF_DEVICE * free:
        return dataset
    return TensorDataset(*(tensor.to(device) for tensor in dataset.tensors))


def training_batches(
    dataset: Dataset[Any],
    schedule: Schedule,
    start_step: int,
    device: torch.device,
    workers: int,
    collate: Collate = default_collate,
    question: Question | None = None,
) -> Iterator[Any]:
    """Yield this rank's micro-batches on `device`, from `start_step` to the end of the run.

    `collate` makes a batch of examples, except for a `TensorDataset`. For another dataset, the
    `Answer` to `question` follows each batch.
    """
    if isinstance(dataset, TensorDataset):
        tensors = dataset.tensors
        indices_of_batches = schedule.indices(start_step, tensors[0].device)
        if tensors[0].device.type == "cpu" and device.type == "cuda":
            pinned = (_gathered_pinned(tensors, indices) for _epoch, indices in indices_of_batches)
            yield from _copied_ahead(pinned, device)
            return
        stays = tensors[0].device == device
        for _epoch, indices in indices_of_batches:
            batch = tuple([tensor.index_select(0, indices) for tensor in tensors])
            yield batch if stays else to_device(batch, device)
        return
    sampler = _EpochIndices(schedule, start_step, question)
    loader = example_loader(dataset, schedule.seed, sampler, device, workers, collate)
    yield from _copied_ahead(loader, device)


class TimedBatches:
    """The same batches, with the `seconds` until each was ready, added up.

    On a GPU this is the time of the host, which may be ahead of the GPU.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        begin = time.perf_counter()
        batch = next(self._batches)
        self.seconds += time.perf_counter() - begin
        return batch


class EvaluationBatches:
    """The batches `own` of the validation set, in order. Each call of `iterate` restarts."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        own: Sequence[int],
        device: torch.device,
        workers: int,
        collate: Collate = default_collate,
    ) -> None:
        self.dataset, self.batch_size, self.own, self.device = dataset, batch_size, own, device
        self.size, self._workers, self._collate = length(dataset), workers, collate
        self._loader: Iterable[Any] | None = None
        if not isinstance(dataset, TensorDataset):
            positions = self._positions(own)
            self._loader = example_loader(dataset, 0, positions, device, workers, collate)

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the first example of the batch `number`, and the example after its last one."""
        return number * self.batch_size, min((number + 1) * self.batch_size, self.size)

    def _positions(self, numbers: Sequence[int]) -> list[list[tuple[int, int]]]:
        return [[(_EPOCH, i) for i in range(*self.bounds(number))] for number in numbers]

    def sample(self) -> "EvaluationBatches":
        """Return a few of all batches, read once.

        The sample of a `TensorDataset` is its first and its last batch. The sample of another
        dataset is two or three examples from each of at most four batches.
        """
        batch_count = evaluation_batch_count(self.size, self.batch_size)
        sample = copy.copy(self)
        if isinstance(self.dataset, TensorDataset):
            bounds = [self.bounds(number) for number in sorted({0, batch_count - 1})]
            parts = [
                [tensor[start:stop] for start, stop in bounds] for tensor in self.dataset.tensors
            ]
            sample.dataset = TensorDataset(*map(torch.cat, parts))
            sample.size, sample.own = length(sample.dataset), range(len(bounds))
            return sample
        numbers = sorted(
            {batch_count * i // (_SAMPLED_BATCHES - 1) for i in range(_SAMPLED_BATCHES - 1)}
            | {batch_count - 1}
        )
        chosen = _some_of_each([self.bounds(number) for number in numbers])
        positions = [[(_EPOCH, i) for i in some] for some in chosen]
        sample._loader = self._read(positions)
        sample.size = sum(map(len, chosen))
        sample.batch_size, sample.own = len(chosen[0]), range(len(chosen))
        return sample

    def iterate(self) -> Iterator[tuple[int, Any]]:
        """Yield (number of examples, batch on the device) of each own batch."""
        counts = [stop - start for start, stop in map(self.bounds, self.own)]
        if isinstance(self.dataset, TensorDataset):
            yield from zip(counts, self._sliced(self.dataset, self.own), strict=True)
        else:
            assert self._loader is not None
            yield from zip(counts, _copied_ahead(self._loader, self.device), strict=True)

    def close(self) -> None:
        """End the loader's workers.

        The garbage collector could free their queues first, and they would wait forever.
        """
        self._loader = None

    def read(self, numbers: Sequence[int]) -> list[Any]:
        """Return the batches `numbers` on the device, also batches of other ranks."""
        if isinstance(self.dataset, TensorDataset):
            return list(self._sliced(self.dataset, numbers))
        return [to_device(batch, self.device) for batch in self._read(self._positions(numbers))]

    def _sliced(self, dataset: TensorDataset, numbers: Sequence[int]) -> Iterator[Any]:
        """Yield copies of the batches `numbers` of a dataset in memory on the device.

        A task may change its batch in place, which must not change the dataset.
        """
        for part in (slice(*self.bounds(number)) for number in numbers):
            batch = tuple(tensor[part] for tensor in dataset.tensors)
            copies = (t.clone() if t.device == self.device else t.to(self.device) for t in batch)
            yield tuple(copies)

    def _read(self, positions: list[list[tuple[int, int]]]) -> list[Any]:
        return list(read_once(self.dataset, positions, self._workers, self._collate))


def _some_of_each(bounds: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return two or three examples of each batch, including its first and its last.

    If the last batch is smaller than the others, its sample is smaller too.
    """
    sizes = [stop - start for start, stop in bounds]
    counts = [min(2, size) for size in sizes]
    if sizes[-1] < sizes[0] and sizes[-1] > 1:
        counts = [3] * (len(sizes) - 1) + [2]
    chosen = []
    for (start, stop), count in zip(bounds, counts, strict=True):
        chosen.append(
            [start, (start + stop - 1) // 2, stop - 1] if count == 3 else [start, stop - 1][:count]
        )
    return chosen


def evaluation_batch_count(examples: int, batch_size: int) -> int:
    """Return the number of validation batches; the last batch may be smaller."""
    return -(-examples // batch_size)


class _EpochIndices(Sampler[list[Any]]):
    """A list of (epoch, index) for each micro-batch, over all epochs, and then the question.

    One sampler serves all epochs, so the workers stay alive between epochs.
    """

    def __init__(self, schedule: Schedule, start_step: int, question: Question | None) -> None:
        self.schedule, self.start_step, self.question = schedule, start_step, question

    def __iter__(self) -> Iterator[list[Any]]:
        for epoch, indices in self.schedule.indices(self.start_step):
            yield [(epoch, index) for index in indices.tolist()]
            if self.question is not None:
                yield [self.question]


def _gathered_pinned(tensors: Sequence[Tensor], indices: Tensor) -> tuple[Tensor, ...]:
    """Return the examples `indices` in pinned memory, from which a GPU copies while it computes."""
    batch = tuple(
        _empty_pinned((len(indices), *tensor.shape[1:]), tensor.dtype) for tensor in tensors
    )
    for tensor, examples in zip(tensors, batch, strict=True):
        torch.index_select(tensor, 0, indices, out=examples)
    return batch


def _empty_pinned(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return pinned_if_possible(lambda pins: torch.empty(size, dtype=dtype, pin_memory=pins))


@functools.cache  # torch's allocator keeps the freed memory of each stream for that stream
class _CopyStream:
    """A stream of a GPU that copies batches while the GPU computes.

    All trainings and validations on a GPU have the same one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def start(self, batch: Any) -> tuple[Any, torch.cuda.Event]:
        """Start to copy `batch`, which is in pinned memory; return the copy and its end."""
        with torch.cuda.stream(self._stream):
            copied = to_device(batch, self._device)
            return copied, self._stream.record_event()

    def finished(self, copied: Any, end: torch.cuda.Event) -> Any:
        """Return the copy for the stream that computes, which waits for it and keeps its memory."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(end)
        for tensor in tensors_in(copied):
            tensor.record_stream(computing)
        return copied


def _copied_ahead(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yield the batches on `device`, and start each copy before the previous batch is used."""
    if device.type == "cuda":
        copies = _CopyStream(device)
        started = (copies.start(batch) for batch in batches)
        yield from (copies.finished(*copy) for copy in _one_ahead(started))
    else:
        yield from _one_ahead(to_device(batch, device) for batch in batches)


def _one_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield each batch after the next one was taken from `batches`."""
    waiting: list[Any] = []
    for batch in batches:
        waiting.append(batch)
        if len(waiting) == 2:
            yield waiting.pop(0)
    yield from waiting
