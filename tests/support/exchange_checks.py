"""Checks of the values that two ranks exchange.

Run `python -m tests.support.exchange_checks NAME MARKER` on each rank. Rank 0 prints the result of
the check NAME as JSON. If code of another rank runs, it writes the file MARKER.
"""

import copy
import json
import math
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support import hostile
from tests.support.hostile import Evil
from trainbox.errors import NetworkFailure, WrongUse
from trainer.data.schedule import micro_batches
from trainer.parallel import exchange
from trainer.parallel import world as distributed
from trainer.parallel.world import World

VALUES: list[Any] = [
    *(
        None,
        True,
        0,
        -(2**62),
        0.1,
        -0.0,
        1e-310,
        math.pi,
        math.inf,
        math.nan,
        "",
        "ä\n\x1b[31m\ud800",
        [],
        {},
    ),
    {"accuracy": 0.1 + 0.2, "loss": math.nan, "deep": [[1, [2.5, None]], {"x": []}]},
]


def values(process: Any) -> list[str]:
    first = [
        repr(process.from_first(value if process.is_first else "rank 1's own")) for value in VALUES
    ]
    each = [[repr(one) for one in process.from_each([process.rank, value])] for value in VALUES]
    assert each == [[repr([rank, value]) for rank in range(2)] for value in VALUES]
    return first


def sends_a_pickle(process: Any) -> str:
    if not process.is_first:
        distributed.packed = hostile.packed
    try:
        return repr(process.from_each(Evil() if process.rank else 0))
    except NetworkFailure as failure:
        return str(failure)


def sends_other_bytes(process: Any) -> list[str]:
    """Return the errors of rank 0 for sizes and bytes that another rank chose."""
    found = []
    for size, sent in (
        (-1, b""),
        (0, b""),
        (2**40, b""),
        (8, b"[" * 8),
        (3, b"\xff\xfe\x00"),
        (4, b"nul]"),
    ):
        if process.is_first:
            try:
                process.from_each(None)
            except NetworkFailure as failure:
                found.append(str(failure))
        else:
            dist.all_gather(
                [torch.empty(1, dtype=torch.int64) for _ in range(2)], torch.tensor([size])
            )
            if sent:
                bytes_N = torch.zeros(max(len(sent), 4), dtype=torch.uint8)
                bytes_N[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
                dist.all_gather([torch.empty_like(bytes_N) for _ in range(2)], bytes_N)
    return found


def gradients_of_many_buckets(process: Any) -> list[bool]:
    """Return for each step whether the gradients have the bits of a single process."""
    exchange._BUCKET_BYTES = 1  # each parameter is a bucket
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(5, 5) for _ in range(6)))
    alone = copy.deepcopy(net)
    found = []
    reductions = [
        exchange.Reduction(world, 3, 1, module, list(module.parameters()))
        for world, module in ((process, net), (World(0, 1, process.device), alone))
    ]
    for _step in range(3):
        inputs_B5 = torch.randn(6, 5)
        for reduction, module, shards in zip(
            reductions, (net, alone), (process.owned(3), range(3)), strict=True
        ):
            module.zero_grad()
            for micro in micro_batches(6, 3, 1, shards):
                with reduction.of(micro):
                    module(inputs_B5[micro.start : micro.stop]).square().sum().backward()
            reduction.finish()
        pairs = zip(net.parameters(), alone.parameters(), strict=True)
        found.append(all(torch.equal(own.grad, right.grad) for own, right in pairs))  # type: ignore[arg-type]
    return found


def uses_objects(process: Any) -> list[str]:
    """Call torch's own object collectives between two machines, as torch.compile may do."""
    plain: list[Any] = [None, None]
    dist.all_gather_object(plain, [0.5, "a", {"b": (1, None)}])
    found = [repr(plain[1])]
    values: list[Any] = [None, None]
    try:
        dist.all_gather_object(values, Evil() if process.rank else 0)
    except WrongUse as refused:
        found.append(str(refused))
    return found


def _wait_for_all(process: Any, beside: Callable[[], None], exchanges: int) -> int:
    """Return the number of exchanges while rank 0 waits for `exchanges` of them.

    `beside` runs in the body of each rank, on rank 0 after its wait.
    """
    states, found, outlasted = process._states, list[Any](), threading.Event()

    def counted(own: int) -> Any:
        found.append(states(own))
        if len(found) == exchanges:
            outlasted.set()
        return found[-1]

    process._states = counted
    with process.wait_for_all("the data"):
        assert not process.is_first or outlasted.wait(60)
        beside()
    return len(found)


def waits_for_all(process: Any) -> int:
    """Return the number of exchanges during the body of rank 0, which outlasts the time limit."""
    distributed.TIMEOUT = timedelta(seconds=0.2)
    return _wait_for_all(process, lambda: None, 30)  # each takes a twentieth of the limit


def waits_while_a_task_exchanges(process: Any) -> int:
    """Return the number of exchanges beside a collective of the body, where rank 1 waits."""
    return _wait_for_all(process, process.barrier, 3)


def waits_for_a_failed_rank(process: Any) -> list[Any]:
    """Return what the ranks exchange after the body of rank 1 has raised an error."""
    errors = list[str]()
    try:
        with process.wait_for_all("the data"):
            if not process.is_first:
                raise MemoryError("no memory")
    except MemoryError as error:
        errors.append(str(error))
    alive = [thread.name for thread in threading.enumerate() if thread.name == "wait for all"]
    return [*process.from_each([errors, alive])]


def waits_for_a_lost_rank(process: Any) -> str:
    """Return the error of rank 0 if rank 1 exits in its body."""
    with process.wait_for_all("connections"):  # rank 0 may still connect when rank 1 is ready
        pass
    try:
        with process.wait_for_all("the data"):
            if not process.is_first:
                os._exit(0)
    except RuntimeError as error:
        print(json.dumps(str(error)), flush=True)
        os._exit(0)
    return ""


if __name__ == "__main__":
    name, Evil.marker = sys.argv[1:]
    process = distributed.World.start("cpu")
    found = globals()[name](process)
    if process.is_first:
        print(json.dumps(found), flush=True)
    process.barrier()
