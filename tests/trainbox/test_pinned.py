"""The buffers of a checkpoint are one pinned block, and hold the bits of the state."""

import gc
import io
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from trainbox import checkpoint_writer, pinned
from trainbox.checkpoint_writer import Snapshot
from trainbox.pinned import pinned_like

_TENSORS = [
    torch.arange(7, dtype=torch.float32),
    torch.tensor(3, dtype=torch.int64),
    torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).t(),
    torch.zeros(0, 5),
    torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    torch.tensor([True, False]),
]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Return the size of each pinned block by its address."""
    blocks: dict[int, int] = {}

    def register(address: int, size: int, _flags: int) -> int:
        blocks[address] = size
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=blocks.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    return blocks


def test_all_buffers_are_in_one_block_of_their_size(registered: dict[int, int]) -> None:
    buffers = pinned_like(_TENSORS)
    assert list(registered.values()) == [5 * 512]  # the empty tensor needs no memory
    (begin,) = registered
    for buffer, tensor in zip(buffers, _TENSORS, strict=True):
        assert buffer.equal(torch.zeros_like(tensor))
        assert (buffer.dtype, buffer.stride()) == (tensor.dtype, tensor.stride())
        assert not buffer.numel() or begin <= buffer.data_ptr() < begin + 5 * 512


def test_a_checkpoint_of_the_buffers_has_the_bits_and_the_size_of_the_state(
    registered: dict[int, int],
) -> None:
    buffers = pinned_like(_TENSORS)
    torch._foreach_copy_(buffers, _TENSORS)
    assert _saved(buffers) == _saved(_TENSORS)


def _saved(tensors: list[Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save(tensors, file)
    return file.getvalue()


def test_the_block_is_released_with_its_last_buffer(registered: dict[int, int]) -> None:
    first, *others = pinned_like(_TENSORS)
    del others
    gc.collect()
    assert len(registered) == 1
    assert first.sum() == 0
    del first
    gc.collect()
    assert registered == {}


@pytest.mark.parametrize(("local_rank", "lines"), [("0", 1), ("1", 0)])
def test_the_block_is_pageable_where_cuda_cannot_pin_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    local_rank: str,
    lines: int,
) -> None:
    kept: list[int] = []  # errors that CUDA reports to the next kernel, whatever it does

    def refuse(*_: int) -> int:
        kept.append(2)
        return 2

    def launch(*_: object, **__: object) -> None:
        raise torch.AcceleratorError(f"CUDA error {kept.pop()}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=refuse))
    monkeypatch.setattr(torch, "ones", launch)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    pinned._report_pageable.cache_clear()
    for _ in range(2):
        buffers = pinned_like(_TENSORS)
        torch._foreach_copy_(buffers, _TENSORS)
        assert _saved(buffers) == _saved(_TENSORS)
    assert kept == []
    pinned._report_pageable.cache_clear()
    assert capsys.readouterr().err.splitlines() == lines * [
        "trainbox: CUDA cannot pin memory on this machine (CUDA error 2), as on WSL2: copies "
        "between the host and the GPU are slower"
    ]


def test_a_snapshot_pins_buffers_only_for_tensors_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OnGpu(Tensor):
        device = torch.device("cuda", 0)

    asked: list[int] = []

    def allocate(tensors: list[Tensor]) -> list[Tensor]:
        asked.append(len(tensors))
        return [torch.full((2,), 7.0) for _ in tensors]

    monkeypatch.setattr(checkpoint_writer, "pinned_like", allocate)
    weight = torch.zeros(2).as_subclass(OnGpu)
    buffers = Snapshot()._buffers_for([torch.zeros(3), weight, torch.zeros(1)])
    assert [buffer.tolist() for buffer in buffers] == [[0, 0, 0], [7, 7], [0]]
    Snapshot()._buffers_for([torch.zeros(3)])
    assert asked == [1]
