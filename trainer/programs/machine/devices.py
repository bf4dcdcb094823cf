"""Test devices and their links with a matrix product, a copy in memory and a sum over processes.

Shape suffixes: N positions of a buffer, MM a square matrix.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.parallel.world import World

_MIB = 2**20
_PATTERN = 0x5A5A5A5A
# The number of positions checked at a time. The expected values need memory, too.
_PIECE_N = 16 * _MIB
# An exchange splits a buffer into chunks. No chunk size is a multiple of this prime, so a chunk in
# the wrong position is noticed.
_PRIME = 251
_REPEATS = 5
_CPU_BYTES = 64 * _MIB  # of the copy in the host's memory


@dataclass(frozen=True)
class DeviceResult:
    """The result of one test of one device.

    `detail` is the result as text. `speed` is in FLOP/s or bytes/s.
    """

    test: str
    right: bool
    detail: str
    speed: float


def matrix_product(device: torch.device) -> DeviceResult:
    """Test a product in float32 against float64 on the CPU, and repeat it to compare the bits.

    The limit is a bound for any order of the additions: n u / (1 - n u) of |A| |B| (Higham,
    Accuracy and Stability of Numerical Algorithms, section 3.1). Here n is the size, and u is half
    the distance from 1 to the next number. A device with smaller, random errors gives other bits in
    a repeat.
    """
    # TF32 rounds the factors, so its bound would be 2^13 times as wide.
    torch.backends.cuda.matmul.allow_tf32 = False
    size, repeats = (2048, 500) if device.type == "cuda" else (512, 20)
    generator = torch.Generator().manual_seed(0)
    factors_MM = [torch.randn(size, size, generator=generator) for _ in range(2)]
    left_MM, right_MM = (factor_MM.to(device) for factor_MM in factors_MM)
    first_MM, product_MM = torch.empty_like(left_MM), torch.empty_like(left_MM)
    torch.mm(left_MM, right_MM, out=first_MM)
    worst = _largest_error(first_MM.cpu(), *factors_MM)
    differing, best_s = 0, float("inf")
    for _ in range(repeats):
        _finish(device)
        begin_s = time.perf_counter()
        torch.mm(left_MM, right_MM, out=product_MM)
        _finish(device)
        best_s = min(best_s, time.perf_counter() - begin_s)
        differing += int((product_MM.view(torch.int32) != first_MM.view(torch.int32)).sum())
    detail = (
        f"largest error {worst:.4f} of the bound, {differing} values differ in {repeats} repeats"
    )
    return DeviceResult("matmul", worst <= 1 and differing == 0, detail, 2 * size**3 / best_s)


def _largest_error(product_MM: Tensor, left_MM: Tensor, right_MM: Tensor) -> float:
    """Return the largest error as a fraction of the bound, or inf if a value is not finite."""
    unit = torch.finfo(product_MM.dtype).eps / 2
    size = product_MM.shape[0]
    bound = size * unit / (1 - size * unit)
    left_MM, right_MM = left_MM.double(), right_MM.double()
    errors_MM = (product_MM.double() - left_MM @ right_MM).abs() / (left_MM.abs() @ right_MM.abs())
    return float(errors_MM.nan_to_num(nan=torch.inf).max()) / bound


def memory_copy(device: torch.device) -> DeviceResult:
    """Test copies of a large buffer within the device's memory, and check each value.

    The speed counts the bytes that are read and the bytes that are written.
    """
    free = torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else _CPU_BYTES
    count = min(1024 * _MIB, free) // 4
    source_N, target_N = (
        _pattern(0, count, device),
        torch.empty(count, dtype=torch.int32, device=device),
    )
    wrong, best_s = 0, float("inf")
    for _ in range(_REPEATS):
        target_N.zero_()
        _finish(device)
        begin_s = time.perf_counter()
        target_N.copy_(source_N)
        _finish(device)
        best_s = min(best_s, time.perf_counter() - begin_s)
        for start in range(0, count, _PIECE_N):
            piece_N = target_N[start : start + _PIECE_N]
            wrong += int((piece_N != _pattern(start, start + len(piece_N), device)).sum())
    detail = f"{wrong} wrong values in {_REPEATS} copies of {count * 4 // _MIB} MiB"
    return DeviceResult("memory", wrong == 0, detail, 2 * count * 4 / best_s)


def _pattern(start: int, stop: int, device: torch.device) -> Tensor:
    """Return a different value for each position from `start` to `stop`, shape (N,) int32."""
    return torch.arange(start, stop, dtype=torch.int32, device=device).bitwise_xor_(_PATTERN)


def all_reduce(world: World) -> DeviceResult:
    """Test a sum over all processes whose exact value is known at each position.

    The speed is NCCL's bus bandwidth. It counts 2 (n - 1) / n of the buffer's bytes for n processes
    (nccl-tests, doc/PERFORMANCE.md).
    """
    size_mib = 256 if world.device.type == "cuda" else 4
    count = size_mib * _MIB // 4
    own_N = _part(world.rank, count, world.device)
    right_N = torch.zeros_like(own_N)
    for rank in range(world.world_size):
        right_N += _part(rank, count, world.device)
    sum_N = torch.empty_like(own_N)
    wrong, best_s = 0, float("inf")
    for _ in range(1 + _REPEATS):  # the first sum creates the connections
        sum_N.copy_(own_N)
        world.barrier()
        _finish(world.device)
        begin_s = time.perf_counter()
        world.all_reduce(sum_N)
        _finish(world.device)
        best_s = min(best_s, time.perf_counter() - begin_s)
        wrong += int((sum_N != right_N).sum())
    detail = f"{wrong} wrong values in {1 + _REPEATS} sums of {size_mib} MiB"
    moved = 2 * (world.world_size - 1) / world.world_size * count * 4
    return DeviceResult("all-reduce", wrong == 0, detail, moved / best_s)


def _part(rank: int, count: int, device: torch.device) -> Tensor:
    """Return the term of `rank`: small integers, whose sums are exact in float32."""
    return (
        torch.arange(count, dtype=torch.int32, device=device)
        .add_(31 * rank)
        .remainder_(_PRIME)
        .float()
    )


def _finish(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
