"""RNN modules compute in float32 under bf16 on a GPU, where autocast would use fp16.

Autocast on the CPU computes RNNs in bf16, so the CPU shows whether autocast applies.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from tests.support.here import Here
from tests.support.processor import has_bf16_lstm
from trainer.loop import model as model_module
from trainer.loop.model import WithoutAutocast, keep_rnns_out_of_autocast

# Shape suffixes: T times, B examples, C channels.


class _Named(nn.GRU):
    """A subclass with another signature."""

    def forward(self, *, signal_TBC: Tensor) -> Any:  # type: ignore[override]
        return super().forward(signal_TBC)


def _outputs(model: nn.Module, *inputs: Any, **named: Any) -> list[Tensor]:
    """Return all tensors of the model's answer under bf16 autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        answer = model(*inputs, **named)
    return _tensors(answer)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, PackedSequence):
        return [value.data]
    return [value] if isinstance(value, Tensor) else [t for part in value for t in _tensors(part)]


_SIGNAL_TBC = torch.linspace(-1, 1, 5 * 2 * 3).reshape(5, 2, 3)
_STATE = torch.ones(1, 2, 4)
_LSTM = pytest.mark.skipif(not has_bf16_lstm(), reason="this CPU has no LSTM in bf16")


@pytest.mark.parametrize(
    ("model", "inputs", "named"),
    [
        (nn.RNN(3, 4), (_SIGNAL_TBC,), {}),
        (nn.GRU(3, 4, num_layers=2, bidirectional=True), (_SIGNAL_TBC.bfloat16(),), {}),
        pytest.param(nn.LSTM(3, 4), (_SIGNAL_TBC, (_STATE.bfloat16(), _STATE)), {}, marks=_LSTM),
        pytest.param(nn.LSTM(3, 4), (_SIGNAL_TBC,), {"hx": None}, marks=_LSTM),
        (_Named(3, 4), (), {"signal_TBC": _SIGNAL_TBC.bfloat16()}),
    ],
    ids=["rnn", "gru", "lstm", "no state", "subclass"],
)
def test_rnns_compute_in_float32(
    model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> None:
    before = _outputs(copy.deepcopy(model), *inputs, **named)
    assert {tensor.dtype for tensor in before} == {torch.bfloat16}
    kind, state = type(model), model.state_dict()
    keep_rnns_out_of_autocast(model, "cuda", torch.bfloat16)
    keep_rnns_out_of_autocast(model, "cuda", torch.bfloat16)
    assert isinstance(model, kind)
    assert repr(model) == repr(copy.deepcopy(model))
    assert model.state_dict().keys() == state.keys()
    after = _outputs(model, *inputs, **named)
    assert {tensor.dtype for tensor in after} == {torch.float32}
    for one, other in zip(after, before, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=0.05, atol=0.05)


def test_packed_sequences_are_cast_too() -> None:
    model = nn.LSTM(3, 4)
    packed = pack_sequence([torch.ones(4, 3), torch.ones(2, 3)])
    expected = _tensors(model(packed))
    keep_rnns_out_of_autocast(model, "cuda", torch.bfloat16)
    found = _outputs(model, packed.to(dtype=torch.bfloat16))
    assert [tensor.dtype for tensor in found] == [torch.float32] * 3
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("device_type", "dtype"),
    [("cpu", torch.bfloat16), ("cuda", torch.float16), ("cuda", None)],
)
def test_other_trainings_keep_their_rnns(device_type: str, dtype: torch.dtype | None) -> None:
    """Under fp16 there is a scaler. The bits of CPU runs stay."""
    model = nn.Sequential(nn.LSTM(3, 4), nn.LSTMCell(3, 4))
    keep_rnns_out_of_autocast(model, device_type, dtype)
    assert [type(part) for part in model] == [nn.LSTM, nn.LSTMCell]


_TASK = """
from dataclasses import dataclass
import torch
from torch import nn
from tests.support.tiny import Tiny

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, inputs_B4):
        features_B3 = self.lstm(inputs_B4[:, None])[0][:, 0]
        assert features_B3.dtype == torch.float32
        return self.head(features_B3)[:, 0]

@dataclass(frozen=True)
class Recurrent(Tiny):
    def build_model(self):
        return Model()

    def losses(self, model, batch):
        inputs_B4, targets_B = batch
        return {"squared_error": (model(inputs_B4) - targets_B) ** 2}
"""


def test_a_training_in_bf16_names_the_precision_of_its_rnns(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("recurrent.py").write_text(_TASK)
    asked: list[str] = []

    def as_on_a_gpu(model: nn.Module, device_type: str, dtype: torch.dtype | None) -> None:
        asked.append(device_type)
        keep_rnns_out_of_autocast(model, "cuda", dtype)

    monkeypatch.setattr(model_module, "keep_rnns_out_of_autocast", as_on_a_gpu)
    out = here.train(task="recurrent.py:Recurrent", precision="bf16", max_steps=2)
    assert asked == ["cpu"]
    assert "precision  bf16 (RNN modules in fp32), deterministic" in out
    assert WithoutAutocast.__name__ not in out
