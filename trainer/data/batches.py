"""Select the examples of each step and move them to the device.

A position in a run is an integer, so a resume needs no sampler state.
"""

import copy
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from trainer.data.seeding import derive_seed
from trainer.errors import WrongUse
from trainer.system.signals import leave_signals_to_the_parent
from trainer.system.sources import loaded_sources

# The share of the device's free memory for a dataset. The rest is for the model.
DATA_SHARE_OF_DEVICE = 0.4
_SAMPLED_BATCHES = 4

_SOURCES = (-1, -1)  # the position at which a loader worker returns the source files it has loaded


@dataclass(frozen=True)
class MicroBatch:
    """The examples of one forward pass.

    They are part `part` of shard `shard`, and examples `start` to `stop` of the global batch.
    """

    shard: int
    part: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def micro_batches(
    batch_size: int, shards: int, accumulation: int, owned: Iterable[int]
) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of the shards `owned`.

    The sizes of shards differ by at most one example, and so do the sizes of a shard's parts.
    """
    cut = []
    for shard in owned:
        begin, end = batch_size * shard // shards, batch_size * (shard + 1) // shards
        for part in range(accumulation):
            start, stop = (begin + (end - begin) * i // accumulation for i in (part, part + 1))
            cut.append(MicroBatch(shard, part, start, stop))
    return tuple(cut)


def epoch_order(seed: int, epoch: int, size: int) -> Tensor:
    """Return the order of the examples in `epoch`, a permutation of shape (size,).

    The permutation depends only on the arguments.
    """
    return torch.randperm(
        size, generator=torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    )


@dataclass(frozen=True)
class Schedule:
    """The steps of a run over `examples` examples.

    Each epoch drops its last incomplete batch. Epochs have different orders, so each epoch drops
    different examples.
    """

    seed: int
    examples: int
    batch_size: int
    total_steps: int
    micros: tuple[MicroBatch, ...]

    @property
    def steps_per_epoch(self) -> int:
        return self.examples // self.batch_size

    def indices(
        self, start_step: int, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (epoch, indices) of this rank's micro-batches from `start_step` to the end."""
        known, order = -1, torch.empty(0)
        for step in range(start_step, self.total_steps):
            epoch, position = divmod(step, self.steps_per_epoch)
            if epoch != known:
                known, order = epoch, epoch_order(self.seed, epoch, self.examples).to(device)
            first = position * self.batch_size
            for micro in self.micros:
                yield epoch, order[first + micro.start : first + micro.stop]


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
    dataset: Dataset[Any], schedule: Schedule, start_step: int, device: torch.device, workers: int
) -> Iterator[Any]:
    """Yield this rank's micro-batches on `device`, from `start_step` to the end of the run."""
    if isinstance(dataset, TensorDataset):
        tensors = dataset.tensors
        placed = tensors[0].device == device
        for _epoch, indices in schedule.indices(start_step, tensors[0].device):
            batch = tuple([tensor.index_select(0, indices) for tensor in tensors])
            yield batch if placed else to_device(batch, device)
        return
    sampler = _EpochIndices(schedule, start_step)
    loader = _loader(SeededExamples(dataset, schedule.seed), sampler, device, workers)
    yield from _ahead(loader, device)


def read_examples(
    dataset: Dataset[Any], seed: int, indices: list[int], workers: int
) -> tuple[list[Any], dict[str, str]]:
    """Return examples as batches of one, and the `loaded_sources` of the process that read them.

    If the training uses workers, a worker reads the examples. A file that the dataset opens at its
    first example is then not shared with workers that are forked later. Each example is copied out
    of shared memory, which may be small.
    """
    positions = [[(0, index)] for index in indices] + [[_SOURCES]]
    loader = _loader(SeededExamples(dataset, seed), positions, torch.device("cpu"), min(workers, 1))
    *examples, sources = (_mapped(Tensor.clone, batch) for batch in loader)
    return examples, {name: digest for name, (digest,) in sources.items()}


def read_twice(
    dataset: Dataset[Any], seed: int, workers: int, seconds: float
) -> Iterator[tuple[int, Any]]:
    """Yield (index, example as a batch of one) twice for examples spread over the dataset.

    The second pass is in reverse order. `seconds` limits the time of both
    passes. The first and the last example are always read.
    """
    order: list[int] = []

    def positions() -> Iterator[list[tuple[int, int]]]:
        end = 0.0
        for index in spread(length(dataset)):
            if len(order) == 2:  # a worker has started by now
                end = time.monotonic() + seconds / 2
            if len(order) >= 2 and time.monotonic() >= end:
                break
            order.append(index)
            yield [(0, index)]
        order.extend(reversed(order))
        for index in order[len(order) // 2 :]:
            yield [(0, index)]

    loader = _loader(
        SeededExamples(dataset, seed), positions(), torch.device("cpu"), min(workers, 1)
    )
    for number, batch in enumerate(loader):
        yield order[number], _mapped(Tensor.clone, batch)


def spread(count: int) -> Iterator[int]:
    """Yield the numbers below `count` in an order whose every prefix is spread evenly.

    The first and the last number come first. The others follow van der Corput's sequence.
    """
    yield from dict.fromkeys((0, count - 1))
    bits = (count - 1).bit_length()
    for k in range(1, 1 << bits):
        # The reversed bits of 1, 2, 3, ... give the halves, then the quarters, and so on.
        index = int(f"{k:0{bits}b}"[::-1], 2)
        if index < count - 1:
            yield index


class EvaluationBatches:
    """The batches `own` of the validation set, in order. Each call of `iterate` restarts."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        own: Sequence[int],
        device: torch.device,
        workers: int,
    ) -> None:
        self.dataset, self.batch_size, self.own, self.device = dataset, batch_size, own, device
        self.size, self._workers = length(dataset), workers
        self._loader: Iterable[Any] | None = None
        if not isinstance(dataset, TensorDataset):
            positions = [[(0, i) for i in range(*self._bounds(number))] for number in own]
            self._loader = _loader(SeededExamples(dataset, 0), positions, device, workers)

    def _bounds(self, number: int) -> tuple[int, int]:
        return number * self.batch_size, min((number + 1) * self.batch_size, self.size)

    def sample(self) -> "EvaluationBatches":
        """Return a few of all batches, read once.

        The sample of a `TensorDataset` is its first and its last batch. The sample of another
        dataset is two or three examples from each of at most four batches.
        """
        batch_count = evaluation_batch_count(self.size, self.batch_size)
        sample = copy.copy(self)
        if isinstance(self.dataset, TensorDataset):
            bounds = [self._bounds(number) for number in sorted({0, batch_count - 1})]
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
        chosen = _some_of_each([self._bounds(number) for number in numbers])
        loader = _loader(
            SeededExamples(self.dataset, 0),
            [[(0, i) for i in some] for some in chosen],
            torch.device("cpu"),
            min(self._workers, 1),
        )
        sample._loader = [_mapped(Tensor.clone, batch) for batch in loader]
        sample.size, sample.batch_size, sample.own = (
            sum(map(len, chosen)),
            len(chosen[0]),
            range(len(chosen)),
        )
        return sample

    def iterate(self) -> Iterator[tuple[int, Any]]:
        """Yield (number of examples, batch on the device) of each own batch."""
        counts = [stop - start for start, stop in map(self._bounds, self.own)]
        if isinstance(self.dataset, TensorDataset):
            tensors = self.dataset.tensors
            slices = (slice(*self._bounds(number)) for number in self.own)
            batches = (
                to_device(tuple(tensor[part] for tensor in tensors), self.device) for part in slices
            )
            yield from zip(counts, batches, strict=True)
        else:
            assert self._loader is not None
            yield from zip(counts, _ahead(self._loader, self.device), strict=True)

    def read(self, numbers: Sequence[int]) -> list[Any]:
        """Return the batches `numbers` on the device, including those of other ranks."""
        if isinstance(self.dataset, TensorDataset):
            slices = [slice(*self._bounds(number)) for number in numbers]
            return [
                to_device(tuple(tensor[part] for tensor in self.dataset.tensors), self.device)
                for part in slices
            ]
        positions = [[(0, i) for i in range(*self._bounds(number))] for number in numbers]
        loader = _loader(
            SeededExamples(self.dataset, 0), positions, torch.device("cpu"), min(self._workers, 1)
        )
        return [to_device(_mapped(Tensor.clone, batch), self.device) for batch in loader]


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
    return -(-examples // batch_size)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on `device`.

    Pinned tensors are copied while the device computes.
    """
    return _mapped(
        lambda tensor: tensor if tensor.device == device else tensor.to(device, non_blocking=True),
        batch,
    )


def take(batch: Any, indices: Tensor) -> Any:
    """Return the examples `indices` of a batch."""
    return _mapped(lambda tensor: tensor[indices], batch)


def joined(parts: Sequence[Any], most: int) -> Any:
    """Return the first `most` examples of several batches as one batch.

    Batches whose examples differ in shape from those of the last batch are left out.
    """
    tensors = [tensors_in(part) for part in parts]
    shapes = [[tensor.shape[1:] for tensor in part] for part in tensors]
    alike = [part for part, shape in zip(tensors, shapes, strict=True) if shape == shapes[-1]]
    whole = iter([torch.cat(each)[:most] for each in zip(*alike, strict=True)])
    return _mapped(lambda _: next(whole), parts[-1])


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    found: list[Tensor] = []
    _mapped(found.append, batch)
    return found


def _mapped(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """Return nested tuples, lists and dicts with `function` applied to each tensor."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {name: _mapped(function, value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [_mapped(function, value) for value in batch]
        return parts if isinstance(batch, list) else tuple(parts)
    return batch


class _EpochIndices(Sampler[list[tuple[int, int]]]):
    """A list of (epoch, index) for each micro-batch, over all epochs.

    One sampler serves all epochs, so the workers stay alive between epochs.
    """

    def __init__(self, schedule: Schedule, start_step: int) -> None:
        self.schedule, self.start_step = schedule, start_step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for epoch, indices in self.schedule.indices(self.start_step):
            yield [(epoch, index) for index in indices.tolist()]


class SeededExamples(Dataset[Any]):
    """A dataset that seeds the generators of Python, NumPy and torch before each example.

    The seed depends on (seed, epoch, index) and not on the worker.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, position: tuple[int, int]) -> Any:
        import numpy

        if position == _SOURCES:
            return loaded_sources()
        epoch, index = position
        seed = derive_seed(self.seed, "example", epoch, index)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        try:
            return self.dataset[index]
        except StopIteration as error:
            # A loop over the loader would end here as if it had read all examples.
            raise RuntimeError(f"example {index} raised StopIteration") from error


def _loader(
    examples: Dataset[Any], batches: Any, device: torch.device, workers: int
) -> "DataLoader[Any]":
    return DataLoader(
        examples,
        batch_sampler=batches,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
        worker_init_fn=_start_worker if workers else None,
    )


def _start_worker(_worker: int) -> None:
    torch.set_num_threads(1)
    leave_signals_to_the_parent()


def _ahead(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yield the batches on `device`, and start each copy before the previous batch is used."""
    waiting: list[Any] = []
    try:
        for batch in batches:
            waiting.append(to_device(batch, device))
            if len(waiting) == 2:
                yield waiting.pop(0)
    except ConnectionError as error:
        # A worker that is killed while it sends a batch closes its socket.
        raise RuntimeError(
            "DataLoader worker exited unexpectedly: killed, perhaps for its memory"
        ) from error
    yield from waiting


def length(dataset: Dataset[Any]) -> int:
    """Return the number of examples in the dataset.

    Raises:
        WrongUse: the dataset has no valid length, as an IterableDataset.
    """
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise WrongUse(
            f"the dataset {type(dataset).__name__} has no length ({error}): use a map-style "
            "dataset with __len__ and __getitem__"
        ) from error
