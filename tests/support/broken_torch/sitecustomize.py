"""If this folder is on PYTHONPATH, break the programs of `trainbox health --deep`.

BROKEN has the faults as JSON: {"compute 2": "matmul", "exchange 1": "sum"}. The programs are
counted in the folder BROKEN_IN in the order of their starts: the first is "compute 1". An exchange
has its fault on rank 1.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _fault() -> str:
    kind = sys.orig_argv[-1]
    # the ranks of an exchange have the same parent
    start = os.getppid() if kind == "exchange" else os.getpid()
    folder = Path(os.environ["BROKEN_IN"])
    (folder / f"{kind}-{start}").mkdir(exist_ok=True)
    return str(
        json.loads(os.environ["BROKEN"]).get(f"{kind} {len(list(folder.glob(f'{kind}-*')))}", "")
    )


def _matmul(torch: Any) -> None:
    mm = torch.mm

    def broken(*factors: Any, out: Any) -> None:
        mm(*factors, out=out)
        out[3, 5] += 1

    torch.mm = broken


def _bit(torch: Any) -> None:
    mm, calls = torch.mm, 0

    def broken(*factors: Any, out: Any) -> None:
        nonlocal calls
        calls += 1
        mm(*factors, out=out)
        if calls == 7:
            out.view(torch.int32)[3, 5] ^= 1  # the last one: far below any bound

    torch.mm = broken


def _copy(torch: Any) -> None:
    copy = torch.Tensor.copy_

    def broken(target: Any, source: Any) -> Any:
        copy(target, source)
        target[-1] ^= 1 << 20
        return target

    torch.Tensor.copy_ = broken


def _on_rank_1(torch: Any, break_it: Callable[[Any], None]) -> None:
    all_reduce = torch.distributed.all_reduce

    def broken(values: Any, *arguments: Any, **more: Any) -> Any:
        done = all_reduce(values, *arguments, **more)
        if len(values) > 1:  # no barrier
            break_it(values)
        return done

    if os.environ["RANK"] == "1":
        torch.distributed.all_reduce = broken


def _sum(torch: Any) -> None:
    def add(values: Any) -> None:
        values[-1] += 1

    _on_rank_1(torch, add)


def _stop(torch: Any) -> None:
    _on_rank_1(torch, lambda values: os.kill(os.getpid(), signal.SIGSTOP))


def _fail(torch: Any) -> None:
    def fail(values: Any) -> None:
        raise RuntimeError(
            "CUDA error: an illegal memory access was encountered\nadvice that nobody can use"
        )

    _on_rank_1(torch, fail)


if (
    "trainer.programs.machine.selftest" in sys.orig_argv
    and "trainer.programs.ranks.torchrun" not in sys.orig_argv
):
    fault = _fault()
    if fault == "stop at once":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault:
        import torch
        import torch.distributed

        {"matmul": _matmul, "bit": _bit, "copy": _copy, "sum": _sum, "stop": _stop, "fail": _fail}[
            fault
        ](torch)
