"""This process among its equals: the only importer of torch.distributed besides torchrun.py and
sharding.py.
"""

import contextlib
import json
import os
import pickle
import random
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from trainer.data.seeding import derive_seed
from trainer.errors import STORE, DeviceMissing, NetworkFailure, WrongUse
from trainer.system.hints import command

Transfer = dist.Work  # under way; `wait` for it

_LONGEST_VALUE = 2**24  # bytes of JSON: settings, metrics and short texts
_SAME_VERSION = "start the same version of Trainbox on each machine"

TIMEOUT = timedelta(minutes=10)  # of one exchange; gloo would wait 30 minutes


@dataclass
class Process:
    """One of `world_size` processes that train together; `strategy` is single, ddp, fsdp or dp."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    strategy: str
    _pending_vote: "tuple[dist.Work, Tensor] | None" = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # Asked at each step: torch makes a new string for each look at a device's type.
        self._seeds_cuda, self._seeds_mps = self.device.type == "cuda", self.device.type == "mps"

    @classmethod
    def start(cls, device_name: str) -> "Process":
        """Join the others, as torchrun's variables say; without them this process is alone.

        Raises:
            DeviceMissing: the device asked for is not there; it is never replaced by the CPU.
        """
        strategy, world_size = launched_as()
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = choose_device(device_name, local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if strategy in ("ddp", "fsdp"):
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            file = os.environ.get(STORE)
            meeting = f"file://{file}" if file else "env://"
            if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
                _refuse_foreign_objects()
            dist.init_process_group(backend, meeting, TIMEOUT, world_size, int(os.environ["RANK"]))
        return cls(int(os.environ.get("RANK", "0")), local_rank, world_size, device, strategy)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def nnodes(self) -> int:
        """How many machines train together."""
        return int(os.environ.get("GROUP_WORLD_SIZE", "1"))

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds a share of each parameter, and not the whole."""
        return self.strategy == "fsdp"

    def owned(self, count: int) -> range:
        """The contiguous block of `count` shards or batches that this process owns."""
        return self.owned_by(self.rank, count)

    def owned_by(self, rank: int, count: int) -> range:
        """The block of the process `rank`; the first process never goes without."""
        start, stop = (-(-count * bound // self.world_size) for bound in (rank, rank + 1))
        return range(start, stop)

    def wrap(self, module: nn.Module, autocast_dtype: torch.dtype | None) -> nn.Module:
        """`module` on this process's device, such that one forward of it uses all its GPUs, or the
        shares of all processes.
        """
        if self.is_sharded:
            from trainer.parallel.fsdp import shard

            # puts share by share on the device
            shard(module, self.device, self.world_size, autocast_dtype)
            return module
        module.to(self.device)
        return nn.DataParallel(module) if self.strategy == "dp" else module

    def all_to_all(
        self, received_N: Tensor, sent_N: Tensor, received_counts: list[int], sent_counts: list[int]
    ) -> Transfer:
        """Send each process its part of `sent_N`; the parts of all come to stand in `received_N`,
        the first's first.
        """
        work = dist.all_to_all_single(
            _bytes(received_N),
            _bytes(sent_N),
            [count * received_N.element_size() for count in received_counts],
            [count * sent_N.element_size() for count in sent_counts],
            async_op=True,
        )
        assert work is not None
        return work

    def all_gather(self, received_N: Tensor, sent_N: Tensor) -> Transfer:
        """The `sent_N` of all processes, one behind the other."""
        work = dist.all_gather_into_tensor(_bytes(received_N), _bytes(sent_N), async_op=True)
        assert work is not None
        return work

    def all_reduce(self, values_N: Tensor) -> None:
        """Put the sum over all processes in the place of each value; on a GPU it may be under way
        yet.
        """
        dist.all_reduce(values_N)

    def gather_rows(self, rows_NK: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all processes, those of the first on top; `counts` tells each one's number.

        On the CPU.
        """
        rows_NK = rows_NK.cpu()
        if self.world_size == 1:
            return rows_NK
        padded = rows_NK.new_zeros((max(counts), rows_NK.shape[1]))
        padded[: len(rows_NK)] = rows_NK
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def peak_memory_mib(self) -> list[float]:
        """The most that tensors took on each GPU, of all processes; without a GPU, the most RAM of
        each. All must call it.
        """
        if self.device.type == "cuda":
            used = (
                range(torch.cuda.device_count()) if self.strategy == "dp" else [self.device.index]
            )
            own = [torch.cuda.max_memory_allocated(index) / 2**20 for index in used]
        else:
            own = [
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                / 2 ** (20 if sys.platform == "darwin" else 10)
            ]
        found: list[float] = (
            self.gather_rows(torch.tensor([own]), [1] * self.world_size).flatten().tolist()
        )
        return found

    def whole(self, value: Any) -> Any:
        """A tensor that is shared out, put together on each process, all of which must call this;
        anything else as it is.
        """
        if not self.is_sharded:
            return value
        from trainer.parallel.fsdp import whole

        return whole(value)

    def share(self, value: Any, like: Any) -> Any:
        """This process's share of the whole tensor `value`, where `like` is one that is shared out;
        else `value`.
        """
        if not self.is_sharded:
            return value
        from trainer.parallel.fsdp import share

        return share(value, like)

    def gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """Where tensors are shared out, a copy of `state` with whole ones, on the first process;
        all must call this.
        """
        if not self.is_sharded:
            return state
        from trainer.parallel.fsdp import gathered

        whole: dict[str, Any] = gathered(state, self.is_first)
        return whole

    def moves_noted(self, module: nn.Module) -> contextlib.AbstractContextManager[list[str]]:
        """Notes what a forward in the body writes to shared-out parameters that are not trained: it
        is lost.
        """
        if not self.is_sharded:
            return contextlib.nullcontext([])
        from trainer.parallel.fsdp import moves_noted

        return moves_noted(module)

    def own_numel(self, module: nn.Module) -> int:
        """How many numbers of the parameters of `module` this process holds."""
        if not self.is_sharded:
            return sum(parameter.numel() for parameter in module.parameters())
        from trainer.parallel.fsdp import own_numel

        return sum(map(own_numel, module.parameters()))

    def first_difference(self, digests: Sequence[str]) -> int | None:
        """The place of the first digest (16 hex digits) that is not the same on all processes; None
        if all are.
        """
        if self.world_size == 1:
            return None
        counts_N1 = self.gather_rows(torch.tensor([[len(digests)]]), [1] * self.world_size)
        if (counts_N1 != counts_N1[0]).any():
            # some have more: it is the last that all have, or one after it
            return int(counts_N1.min()) - 1
        if not digests:
            return None
        row_K = torch.tensor([int(digest, 16) - 2**63 for digest in digests])
        rows_NK = self.gather_rows(row_K[None], [1] * self.world_size)
        places = (rows_NK != rows_NK[0]).any(0).nonzero()
        return int(places[0]) if len(places) else None

    def from_first(self, value: Any) -> Any:
        """Return the first process's `value` (plain JSON) on each process."""
        if self.world_size == 1:
            return value
        packed_N = _packed(value) if self.is_first else torch.empty(0, dtype=torch.uint8)
        size_1 = torch.tensor([len(packed_N)])
        dist.broadcast(size_1, src=0)
        if not self.is_first:
            packed_N = torch.empty(_checked_size(int(size_1)), dtype=torch.uint8)
        dist.broadcast(packed_N, src=0)
        return _unpacked(packed_N)

    def vote(self, *wishes: bool) -> list[bool]:
        """Whether any process had each wish; all get the same answer in the same step.

        The answer is to the wishes of the call before, so that the exchange runs beside a training
        step and costs none.
        """
        if self.world_size == 1:
            return list(wishes)
        answer = [False] * len(wishes)
        if self._pending_vote is not None:
            work, votes = self._pending_vote
            work.wait()
            answer = [bool(vote) for vote in votes.tolist()]
        votes = torch.tensor(wishes, dtype=torch.int32)
        work = dist.all_reduce(votes, dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._pending_vote = (work, votes)
        return answer

    def from_each(self, value: Any) -> list[Any]:
        """Return every process's `value` (plain JSON) in the order of ranks; each process waits for
        the slowest.
        """
        if self.world_size == 1:
            return [value]
        packed_N = _packed(value)
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(packed_N)]))
        counts = [_checked_size(int(size_1)) for size_1 in sizes]
        padded_M = torch.zeros(max(counts), dtype=torch.uint8)
        padded_M[: len(packed_N)] = packed_N
        parts = [torch.empty_like(padded_M) for _ in counts]
        dist.all_gather(parts, padded_M)
        return [_unpacked(part_M[:count]) for part_M, count in zip(parts, counts, strict=True)]

    def seed(self, *parts: int | str) -> None:
        """Seed all generators that a task may draw from by what is computed, never by who computes
        it.
        """
        value = derive_seed(*parts)
        random.seed(value)
        numpy.random.seed(value % 2**32)
        torch.default_generator.manual_seed(value)
        if self._seeds_cuda:
            # more than one under DataParallel
            for index, generator in enumerate(torch.cuda.default_generators):
                generator.manual_seed(value + index - (self.device.index or 0))
        elif self._seeds_mps:
            torch.mps.manual_seed(value)

    def barrier(self) -> None:
        """Wait until all are here."""
        if self.world_size > 1:
            dist.all_reduce(torch.zeros(1))

    @contextlib.contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """The first process runs the body alone (it may download), then the others do (they find it
        there).
        """
        if not self.is_first:
            self.barrier()
        yield
        if self.is_first:
            self.barrier()

    def leave(self) -> None:
        """Wait until all have done their work; `trainer.cli.commands` then ends the process without
        tearing the group down.
        """
        if self._pending_vote is not None:
            self._pending_vote[0].wait()
            self._pending_vote = None
        self.barrier()


def _bytes(tensor: Tensor) -> Tensor:
    """As bytes, which every backend moves, whatever numbers they are."""
    return tensor.view(torch.uint8)


def _packed(value: Any) -> Tensor:
    """`value` as bytes (N,) of JSON: torch's object collectives would unpickle, which runs code
    that a peer chooses.

    JSON as Python writes it: floats come back bit by bit, and so do NaN and infinities, which a
    metric may be.
    """
    text = json.dumps(value)
    assert repr(json.loads(text)) == repr(value), (
        f"JSON would change {value!r}: use lists and names of type str"
    )
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _unpacked(packed_N: Tensor) -> Any:
    """The value that another process has packed.

    Raises:
        NetworkFailure: it is not JSON.
    """
    try:
        return json.loads(packed_N.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise NetworkFailure(
            f"another process sent bytes that are not JSON: {_SAME_VERSION}"
        ) from error


def _checked_size(size: int) -> int:
    if not 0 < size <= _LONGEST_VALUE:
        raise NetworkFailure(
            f"another process announced {size} bytes, and 1 to {_LONGEST_VALUE} are "
            f"possible: {_SAME_VERSION}"
        )
    return size


class _PlainUnpickler(pickle.Unpickler):
    """Loads numbers, texts and containers; a name that would import and call code is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise WrongUse(
            "a collective of torch.distributed received an object of "
            f"{module_name}.{global_name} from another machine: "
            "exchange tensors or plain values, since an unpickled object runs code"
        )


def _refuse_foreign_objects() -> None:
    """Let torch's object collectives, which a task or torch.compile may call, load plain values
    only.
    """
    distributed_c10d._unpickler = _PlainUnpickler


def launched_as() -> tuple[str, int]:
    """(strategy, world_size) as the launcher has set them: torchrun's ranks are ddp's or fsdp's."""
    strategy = os.environ.get("TRAINBOX_STRATEGY", "single")
    if "LOCAL_RANK" in os.environ and strategy != "fsdp":
        strategy = "ddp"
    return strategy, int(os.environ.get("WORLD_SIZE", "1"))


def choose_device(name: str, local_rank: int) -> torch.device:
    """The torch device for `auto`, `cuda`, `mps` or `cpu`.

    Raises:
        DeviceMissing: torch does not have it here.
        WrongUse: several processes on one Apple GPU.
    """
    if name == "auto":
        name = (
            "cuda"
            if torch.cuda.is_available()
            else "mps"
            if torch.backends.mps.is_available()
            else "cpu"
        )
    if name == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if local_rank >= count:
            raise DeviceMissing(
                f"process {local_rank} was given a GPU, torch {torch.__version__} (CUDA "
                f"{torch.version.cuda}) sees {count}: "
                "the driver may be too old for this image, or the container has lost its "
                f"GPUs; see `{command('health')}`"
            )
        return torch.device("cuda", local_rank)
    if name == "mps":
        if not torch.backends.mps.is_available():
            raise DeviceMissing(
                "--device mps asked, and torch finds no Apple GPU here: use --device cpu"
            )
        if local_rank > 0:
            raise WrongUse(
                "--device mps is one GPU, and several processes are asked: use --device "
                "cpu, or 1 process"
            )
    return torch.device(name)


def is_network_error(error: BaseException) -> bool:
    """Whether `error` is another process's end or a broken network, seen from this one."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
        return True
    # gloo says it in plain RuntimeErrors
    signs = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Timed out waiting",
        "gloo",
        "Broken pipe",
    )
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
