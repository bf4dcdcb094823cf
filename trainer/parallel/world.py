"""This rank's view of the process group.

`tests/test_imports.py` lists the few other files that import torch.distributed.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainbox.batches import seed_cpu
from trainbox.order import derive_seed
from trainbox.processes.environment import Internal
from trainbox.processes.streams import message
from trainer.parallel.device import choose_device
from trainer.parallel.plain_values import checked_size, packed, refuse_foreign_objects, unpacked
from trainer.parallel.stalled_gpu import GpuWatch
from trainer.system.background import in_background

Transfer = dist.Work  # an unfinished exchange; call its `wait`

TIMEOUT = timedelta(minutes=10)  # of one collective; gloo's default is 30 minutes
# NCCL aborts the process after its limit, so gloo's error and `GpuWatch` must come first.
_NCCL_TIMEOUT = 3 * TIMEOUT
# `wait_for_all` exchanges at first after this time, and later 20 times in the time limit.
_FIRST_TURN_S, _TURNS = 0.1, 20
_BUSY, _FINISHED, _FAILED = range(3)  # states of the body of `wait_for_all`


@dataclass
class World:
    """This rank's view of the process group: its position, its device and the collectives."""

    rank: int
    world_size: int
    device: torch.device
    # A group of its own for `wait_for_all`, so that a task may use collectives meanwhile.
    _waits: Any = field(default=None, repr=False)
    _watch: GpuWatch | None = field(default=None, repr=False)
    _pending_vote: "tuple[dist.Work, Tensor] | None" = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # `seed` needs the type in each step, and torch makes a new string at each access.
        self._seeds_cuda, self._seeds_mps = self.device.type == "cuda", self.device.type == "mps"

    @classmethod
    def start(cls, device_name: str) -> "World":
        """Join the process group that torchrun's variables describe, or be the only process.

        Raises:
            DeviceMissing: `device_name` is not available; the CPU never replaces it.
        """
        rank, local_rank, world_size, nnodes = (
            int(os.environ.get(name, default))
            for name, default in (
                ("RANK", "0"),
                ("LOCAL_RANK", "0"),
                ("WORLD_SIZE", "1"),
                ("GROUP_WORLD_SIZE", "1"),
            )
        )
        device = choose_device(device_name, local_rank)
        watch = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if "LOCAL_RANK" in os.environ:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            file = os.environ.get(Internal.STORE)
            rendezvous = f"file://{file}" if file else "env://"
            if nnodes > 1:
                refuse_foreign_objects()
            dist.init_process_group(backend, rendezvous, TIMEOUT, world_size, rank)
            if device.type == "cuda" and world_size > 1:
                assert dist.group.WORLD is not None
                nccl = dist.group.WORLD._get_backend(device)
                # torch 2.11 has only the second name.
                set_limit = getattr(nccl, "set_timeout", None) or nccl._set_default_timeout
                set_limit(_NCCL_TIMEOUT)
                watch = GpuWatch(device, TIMEOUT.total_seconds())
        waits = dist.new_group(backend="gloo", timeout=TIMEOUT) if world_size > 1 else None
        return cls(rank, world_size, device, waits, watch)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def nnodes(self) -> int:
        """The number of machines in the process group."""
        return int(os.environ.get("GROUP_WORLD_SIZE", "1"))

    def owned(self, count: int) -> range:
        """Return the contiguous block of `count` shards or batches that this rank owns."""
        return self.owned_by(self.rank, count)

    def owned_by(self, rank: int, count: int) -> range:
        """Return the block of `rank`; the block of rank 0 is one of the largest."""
        start, stop = (-(-count * bound // self.world_size) for bound in (rank, rank + 1))
        return range(start, stop)

    def all_to_all(
        self, received_N: Tensor, sent_N: Tensor, received_counts: list[int], sent_counts: list[int]
    ) -> Transfer:
        """Send each rank its part of `sent_N`, and receive the parts of all ranks in `received_N`.

        The parts are in the order of the ranks, and the counts are numbers of elements.
        """
        work = dist.all_to_all_single(
            received_N, sent_N, received_counts, sent_counts, async_op=True
        )
        assert work is not None
        return work

    def all_gather(self, received_N: Tensor, sent_N: Tensor) -> Transfer:
        """Receive the `sent_N` of all ranks in `received_N`, in the order of the ranks."""
        work = dist.all_gather_into_tensor(received_N, sent_N, async_op=True)
        assert work is not None
        return work

    def all_reduce(self, values_N: Tensor) -> None:
        """Replace each value by its sum over all ranks. On a GPU, do not wait for it."""
        dist.all_reduce(values_N)

    def gather_rows(self, rows_NK: Tensor, counts: Sequence[int] = ()) -> Tensor:
        """Return the rows of all ranks on the CPU, in the order of the ranks.

        `counts` has the number of rows of each rank, by default one.
        """
        rows_NK, counts = rows_NK.cpu(), counts or [1] * self.world_size
        if self.world_size == 1:
            return rows_NK
        padded = rows_NK.new_zeros((max(counts), rows_NK.shape[1]))
        padded[: len(rows_NK)] = rows_NK
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def first_difference(self, digests: Mapping[str, str]) -> str | None:
        """Return the name of the first digest that differs between ranks, or None.

        The digests are hexadecimal, and their first 16 digits count.
        """
        if self.world_size == 1:
            return None
        names = list(digests)
        counts_N1 = self.gather_rows(torch.tensor([[len(names)]]))
        if (counts_N1 != counts_N1[0]).any():
            # The numbers of digests differ. Return the last name that all ranks have.
            return names[int(counts_N1.min()) - 1]
        if not names:
            return None
        row_K = torch.tensor([int(digest[:16], 16) - 2**63 for digest in digests.values()])
        rows_NK = self.gather_rows(row_K[None])
        differing = (rows_NK != rows_NK[0]).any(0).nonzero()
        return names[int(differing[0])] if len(differing) else None

    def from_first(self, value: Any) -> Any:
        """Return the `value` (plain JSON) of rank 0 on each rank."""
        if self.world_size == 1:
            return value
        packed_N = packed(value) if self.is_first else torch.empty(0, dtype=torch.uint8)
        size_1 = torch.tensor([len(packed_N)])
        dist.broadcast(size_1, src=0)
        if not self.is_first:
            packed_N = torch.empty(checked_size(int(size_1)), dtype=torch.uint8)
        dist.broadcast(packed_N, src=0)
        return unpacked(packed_N)

    def vote(self, *wishes: int) -> list[int]:
        """Return for each wish the largest number of all ranks; all ranks get the same answer.

        The answer is for the wishes of the previous call, and 0 at the first call. The exchange
        thus overlaps the steps between two calls, and costs no time.
        """
        if self.world_size == 1:
            return list(wishes)
        answer = [0] * len(wishes)
        if self._pending_vote is not None:
            work, votes = self._pending_vote
            work.wait()
            answer = votes.tolist()
        votes = torch.tensor(wishes, dtype=torch.int32)
        work = dist.all_reduce(votes, dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._pending_vote = (work, votes)
        return answer

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each of the flags whether any rank has set it; all ranks must call this."""
        if self.world_size == 1:
            return list(flags)
        set_N = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(set_N, dist.ReduceOp.MAX)
        return [bool(flag) for flag in set_N.tolist()]

    def from_each(self, value: Any) -> list[Any]:
        """Return the `value` (plain JSON) of each rank, in the order of the ranks."""
        if self.world_size == 1:
            return [value]
        packed_N1 = packed(value)[:, None]
        sizes_N1 = self.gather_rows(torch.tensor([[len(packed_N1)]]))
        counts = [checked_size(size) for size in sizes_N1.flatten().tolist()]
        return [unpacked(part_N1) for part_N1 in self.gather_rows(packed_N1, counts).split(counts)]

    def seed(self, *parts: int | str) -> None:
        """Seed all generators that a task may use by `parts`, such as the seed and the epoch.

        Never seed by the rank: any number of ranks must compute the same.
        """
        self.seed_with(derive_seed(*parts))

    def seed_with(self, value: int) -> None:
        """Seed all generators that a task may use with `value`, a result of `derive_seed`."""
        seed_cpu(value)
        if self._seeds_cuda:
            # DataParallel computes on several GPUs.
            for index, generator in enumerate(torch.cuda.default_generators):
                generator.manual_seed(value + index - (self.device.index or 0))
        elif self._seeds_mps:
            torch.mps.manual_seed(value)

    def compute_on(self, stream: "torch.cuda.Stream") -> None:
        """Compute on another stream of the GPU from now on."""
        torch.cuda.set_stream(stream)
        if self._watch is not None:
            self._watch.stream = stream

    def recording(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for the recording of a CUDA graph, in which no thread uses the GPU."""
        return contextlib.nullcontext() if self._watch is None else self._watch.recording

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        if self.world_size > 1:
            dist.all_reduce(torch.zeros(1))

    @contextlib.contextmanager
    def wait_for_all(self, what: str) -> Iterator[None]:
        """Run the body, and wait until all ranks have run theirs, however long this takes.

        Meanwhile, a thread of each rank exchanges a value twice a minute. So the time limit of
        collectives (10 minutes) ends only the wait for a process that is lost or stopped. After
        each 10 minutes, rank 0 prints which ranks still work on `what`.

        If the body of a rank raises an error, the other ranks wait no longer, and all ranks may use
        collectives again, for example to agree on smaller micro-batches.
        """
        if self.world_size == 1:
            yield
            return
        ended = Future[int]()
        exchanged = in_background(lambda: self._exchange_until_all(ended, what), "wait for all")
        try:
            yield
        except BaseException:
            ended.set_result(_FAILED)
            exchanged.exception()
            raise
        ended.set_result(_FINISHED)
        exchanged.result()

    def _exchange_until_all(self, ended: Future[int], what: str) -> None:
        """Exchange the states of the bodies, until all have finished or one has failed."""
        limit_s = TIMEOUT.total_seconds()
        begin_s = time.monotonic()
        report_s = begin_s + limit_s
        longest_s = limit_s / _TURNS
        turn_s = min(_FIRST_TURN_S, longest_s)
        while True:
            wait([ended], turn_s)
            own = ended.result() if ended.done() else _BUSY
            turn_s = min(2 * turn_s, longest_s)
            states = self._states(own)
            busy = [str(rank) for rank, state in enumerate(states) if state == _BUSY]
            if not busy or _FAILED in states:
                return
            if self.is_first and time.monotonic() >= report_s:
                report_s += limit_s
                line = (
                    f"{what}: waiting for rank{'s' if busy[1:] else ''} {', '.join(busy)} for "
                    f"{(time.monotonic() - begin_s) / 60:.0f} min"
                )
                message(line)

    def _states(self, own: int) -> list[int]:
        """Return the state of the body on each rank; `own` is this rank's state."""
        states_1 = [torch.empty(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(states_1, torch.tensor([own]), group=self._waits)
        return [int(state_1) for state_1 in states_1]

    @contextlib.contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """Run the body on rank 0, then on the first rank of each other machine, then on the rest.

        The first of a machine may download files, to a folder that machines may share. Downloads
        have no time limit.
        """
        first_of_machine = os.environ.get("LOCAL_RANK", "0") == "0"
        own_turn = 0 if self.is_first else 1 if first_of_machine else 2
        for turn in range(3):
            with self.wait_for_all("data"):
                if turn == own_turn:
                    yield

    def leave(self) -> None:
        """Wait until all ranks have finished their work.

        `trainer.cli.commands` then ends the process and does not destroy the process group.
        """
        if self._pending_vote is not None:
            self._pending_vote[0].wait()
            self._pending_vote = None
        self.barrier()
