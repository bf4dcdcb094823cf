"""Run each test of a device on this CPU, without a fault and with each kind of fault."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.parallel.world import World
from trainer.programs.machine import devices as device_tests
from trainer.programs.machine.devices import all_reduce, matrix_product, memory_copy

_CPU = torch.device("cpu")


def test_the_error_of_a_correct_product_is_far_below_the_bound() -> None:
    measured = matrix_product(_CPU)
    assert measured.right
    error, differing = measured.detail.split()[2], measured.detail.split()[6]
    assert 1e-4 < float(error) < 0.1
    assert differing == "0"
    assert 1e8 < measured.speed < 1e14


def _in_half_precision(factors_MM: tuple[Tensor, ...], out: Tensor) -> None:
    out.copy_(
        (factors_MM[0].bfloat16().double() @ factors_MM[1].bfloat16().double()).float() * 1.001
    )


def _one_value(factors_MM: tuple[Tensor, ...], out: Tensor) -> None:
    out[3, 5] += 0.1


def _not_a_number(factors_MM: tuple[Tensor, ...], out: Tensor) -> None:
    out[511, 511] = torch.nan


def _not_computed(factors_MM: tuple[Tensor, ...], out: Tensor) -> None:
    out.zero_()


@pytest.mark.parametrize("fault", [_in_half_precision, _one_value, _not_a_number, _not_computed])
def test_the_error_of_a_wrong_product_exceeds_the_bound(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any, Tensor], None]
) -> None:
    mm = torch.mm

    def broken(*factors_MM: Tensor, out: Tensor) -> None:
        mm(*factors_MM, out=out)
        fault(factors_MM, out)

    monkeypatch.setattr(torch, "mm", broken)
    measured = matrix_product(_CPU)
    assert not measured.right
    assert float(measured.detail.split()[2]) > 1
    assert "0 values differ" in measured.detail  # the fault is the same each time


def test_a_product_with_one_wrong_bit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    mm, calls = torch.mm, []

    def broken(*factors_MM: Tensor, out: Tensor) -> None:
        mm(*factors_MM, out=out)
        calls.append(out)
        if len(calls) == 21:
            out.view(torch.int32)[0, 0] ^= 1

    monkeypatch.setattr(torch, "mm", broken)
    measured = matrix_product(_CPU)
    assert not measured.right
    assert "1 values differ in 20 repeats" in measured.detail


def test_a_correct_copy_passes() -> None:
    measured = memory_copy(_CPU)
    assert (measured.right, measured.detail) == (True, "0 wrong values in 5 copies of 64 MiB")
    assert 1e7 < measured.speed < 1e13


def _last_value(target_N: Tensor, source_N: Tensor) -> None:
    target_N[:-1] = source_N[:-1]


def _one_bit(target_N: Tensor, source_N: Tensor) -> None:
    target_N[:] = source_N
    target_N[123_456] ^= 1


def _rolled_pages(target_N: Tensor, source_N: Tensor) -> None:
    target_N[:] = source_N.roll(1024)


def _only_the_first(target_N: Tensor, source_N: Tensor) -> None:
    if not hasattr(source_N, "copied"):
        source_N.copied = True  # type: ignore[attr-defined]
        target_N[:] = source_N


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [(_last_value, 5), (_one_bit, 5), (_rolled_pages, 5 * 2**18), (_only_the_first, 4 * 2**18)],
)
def test_each_wrong_value_of_a_copy_is_counted(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Tensor, Tensor], None], wrong: int
) -> None:
    monkeypatch.setattr(device_tests, "_CPU_BYTES", 2**20)
    monkeypatch.setattr(device_tests, "_PIECE_N", 100_000)
    monkeypatch.setattr(Tensor, "copy_", fault)
    measured = memory_copy(_CPU)
    assert (measured.right, measured.detail) == (
        False,
        f"{wrong} wrong values in 5 copies of 1 MiB",
    )


class _OneOfThree(World):
    """The second of three processes, whose sum is made of `parts`, by rank."""

    parts: tuple[int, ...] = (0, 1, 2)
    rolled = 0

    def all_reduce(self, values_N: Tensor) -> None:
        assert values_N[7] == (7 + 31) % 251  # its own term, before the sum
        values_N.zero_()
        for rank in self.parts:
            values_N += device_tests._part(rank, len(values_N), _CPU)
        if self.rolled:
            values_N[:] = values_N.roll(self.rolled)

    def barrier(self) -> None:
        """Return at once, because no other rank exists."""


def _one_of_three() -> _OneOfThree:
    return _OneOfThree(rank=1, world_size=3, device=_CPU)


def test_a_correct_sum_passes() -> None:
    measured = all_reduce(_one_of_three())
    assert (measured.right, measured.detail) == (True, "0 wrong values in 6 sums of 4 MiB")


@pytest.mark.parametrize("parts", [(0, 1), (0, 1, 1), (2, 1, 1), (0, 1, 2, 2), (1,)], ids=str)
def test_a_sum_of_other_terms_fails(parts: tuple[int, ...]) -> None:
    process = _one_of_three()
    process.parts = parts
    assert not all_reduce(process).right


@pytest.mark.parametrize("positions", [1, 4096, 2**19])
def test_a_sum_at_the_wrong_positions_fails(positions: int) -> None:
    process = _one_of_three()
    process.rolled = positions
    assert not all_reduce(process).right


def test_the_speed_of_a_sum_is_nccls_bus_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(device_tests, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    assert all_reduce(_one_of_three()).speed == pytest.approx(2 * (2 / 3) * 4 * 2**20)
    assert memory_copy(_CPU).speed == 2 * 64 * 2**20
    assert matrix_product(_CPU).speed == 2 * 512**3
