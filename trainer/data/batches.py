"""Which examples a step sees, and how they get to the device.

Positions are integers: a resume needs no sampler state.
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

# Of the device's free memory, how much a dataset may take; the rest is for the model.
DATA_SHARE_OF_DEVICE = 0.4
_SAMPLED_BATCHES = 4

_SOURCES = (-1, -1)  # the position that asks a loader worker which source files it has loaded


@dataclass(frozen=True)
class MicroBatch:
    """What one forward sees: part `part` of shard `shard`, the examples `start` to `stop` of the
    global batch.
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
    """The micro-batches of the shards `owned`: shards are equal but for one example, parts of a
    shard too.
    """
    cut = []
    for shard in owned:
        begin, end = batch_size * shard // shards, batch_size * (shard + 1) // shards
        for part in range(accumulation):
            start, stop = (begin + (end - begin) * i // accumulation for i in (part, part + 1))
            cut.append(MicroBatch(shard, part, start, stop))
    return tuple(cut)


def epoch_order(seed: int, epoch: int, size: int) -> Tensor:
    """The order of the examples in `epoch`: a permutation that depends on its arguments only."""
    return torch.randperm(
        size, generator=torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    )


@dataclass(frozen=True)
class Schedule:
    """The steps of a run over `examples` examples; an epoch's last incomplete batch is left out,
    each time another.
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
        """(epoch, indices) of each of this process's micro-batches from `start_step` to the end."""
        known, order = -1, torch.empty(0)
        for step in range(start_step, self.total_steps):
            epoch, position = divmod(step, self.steps_per_epoch)
            if epoch != known:
                known, order = epoch, epoch_order(self.seed, epoch, self.examples).to(device)
            first = position * self.batch_size
            for micro in self.micros:
                yield epoch, order[first + micro.start : first + micro.stop]


def place_tensors(dataset: Dataset[Any], device: torch.device) -> Dataset[Any]:
    """A `TensorDataset` moved to the GPU if it fits there beside a model; anything else as it
    is.
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
    """This process's micro-batches on `device`, in the order of its steps, from `start_step` to the
    end of the run.
    """
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
    """Return examples as batches of one, read by a loader worker where they come through those, and
    its `loaded_sources`.

    This process then stays as it is: a file that a dataset opens at its first example must not be
    shared with the workers that are forked later. Each is copied out of the shared memory that it
    comes in, which may be small.
    """
    positions = [[(0, index)] for index in indices] + [[_SOURCES]]
    loader = _loader(SeededExamples(dataset, seed), positions, torch.device("cpu"), min(workers, 1))
    *examples, sources = (_mapped(Tensor.clone, batch) for batch in loader)
    return examples, {name: digest for name, (digest,) in sources.items()}


def read_twice(
    dataset: Dataset[Any], seed: int, workers: int, seconds: float
) -> Iterator[tuple[int, Any]]:
    """Yield (index, example as a batch of one) of examples that are spread over the dataset, then
    the same ones backwards.

    There are as many as can be read twice in `seconds`, and at least the first and the last.
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
    """Yield the numbers below `count`, the first and the last one first, such that any first few
    are spread evenly.
    """
    yield from dict.fromkeys((0, count - 1))
    bits = (count - 1).bit_length()
    for k in range(1, 1 << bits):
        # the halves, the quarters, ...: van der Corput's sequence
        index = int(f"{k:0{bits}b}"[::-1], 2)
        if index < count - 1:
            yield index


class EvaluationBatches:
    """Batches number `own` of the validation set, in order, again at each call of `iterate`."""

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
        """A few of all batches, read once: the first and the last, or of a dataset that is read,
        some examples of four.
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
        """(number of examples, batch on the device) of each own batch."""
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
        """Return the batches `numbers` on the device, whichever process they belong to."""
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
    """Two or three examples of each batch, the first and the last among them; a last batch that is
    smaller stays smaller.
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
    """The tensors of a tuple, list or dict on `device`; pinned ones are copied while the device
    computes.
    """
    return _mapped(
        lambda tensor: tensor if tensor.device == device else tensor.to(device, non_blocking=True),
        batch,
    )


def take(batch: Any, indices: Tensor) -> Any:
    """Return the examples `indices` of a batch."""
    return _mapped(lambda tensor: tensor[indices], batch)


def joined(parts: Sequence[Any], most: int) -> Any:
    """Return the first `most` examples of several batches as one; parts whose examples have other
    shapes are left out.
    """
    tensors = [tensors_in(part) for part in parts]
    shapes = [[tensor.shape[1:] for tensor in part] for part in tensors]
    alike = [part for part, shape in zip(tensors, shapes, strict=True) if shape == shapes[-1]]
    whole = iter([torch.cat(each)[:most] for each in zip(*alike, strict=True)])
    return _mapped(lambda _: next(whole), parts[-1])


def tensors_in(batch: Any) -> list[Tensor]:
    """The tensors of a tuple, list or dict, and of those in it."""
    found: list[Tensor] = []
    _mapped(found.append, batch)
    return found


def _mapped(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """What `function` makes of each tensor of a tuple, list or dict, and of those in it."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {name: _mapped(function, value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [_mapped(function, value) for value in batch]
        return parts if isinstance(batch, list) else tuple(parts)
    return batch


class _EpochIndices(Sampler[list[tuple[int, int]]]):
    """Lists of (epoch, index), one a micro-batch, over all epochs: workers live on from one epoch
    to the next.
    """

    def __init__(self, schedule: Schedule, start_step: int) -> None:
        self.schedule, self.start_step = schedule, start_step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for epoch, indices in self.schedule.indices(self.start_step):
            yield [(epoch, index) for index in indices.tolist()]


class SeededExamples(Dataset[Any]):
    """Seeds Python's, NumPy's and torch's generators for each example by (seed, epoch, index), in
    whatever worker.
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
        except (
            StopIteration
        ) as error:  # a loop over the loader would end there as if all had been read
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
    """The batches on `device`, each one's copy started before the one before it is used."""
    waiting: list[Any] = []
    try:
        for batch in batches:
            waiting.append(to_device(batch, device))
            if len(waiting) == 2:
                yield waiting.pop(0)
    except ConnectionError as error:  # from its socket, if it dies while it hands a batch over
        raise RuntimeError(
            "DataLoader worker exited unexpectedly: killed, perhaps for its memory"
        ) from error
    yield from waiting


def length(dataset: Dataset[Any]) -> int:
    """How many examples it holds.

    Raises:
        WrongUse: it cannot tell: an IterableDataset, say.
    """
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (
        TypeError,
        ValueError,
        OverflowError,
    ) as error:  # not there, not a whole number, negative, or too large
        raise WrongUse(
            f"the dataset {type(dataset).__name__} has no length ({error}): give a "
            "map-style one, with __len__ and "
            "__getitem__, whose examples can be had in any order"
        ) from error
