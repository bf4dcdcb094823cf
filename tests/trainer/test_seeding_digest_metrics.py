"""The three small leaves: seeds that are computed, digests that miss nothing, metrics that agree
with scikit-learn.
"""

import math
from collections.abc import Callable

import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score
from torch import Tensor

from trainbox import metrics
from trainbox.order import derive_seed
from trainer.records.digest import value_digest


# Frozen: another value would give every old run another result on resume.
@pytest.mark.parametrize(
    ("parts", "seed"),
    [
        ((0, "order", 0), 1829853113658518448),
        ((0, "order", 1), 2961819992523135983),
        ((1, "order", 0), 8401410035462850704),
        ((0, "example", 0, 5), 1499564754864087518),
        ((42, "forward", 1000, 3, 1), 6121695588923932757),
        ((9223372036854775807, "model"), 390199425896511442),
    ],
)
def test_seeds_are_frozen(parts: tuple[int | str, ...], seed: int) -> None:
    assert derive_seed(*parts) == seed


def test_seeds_of_similar_purposes_differ_and_fit_every_generator() -> None:
    seeds = {derive_seed(seed, "order", epoch) for seed in range(50) for epoch in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 23) != derive_seed(12, 3)
    torch.Generator().manual_seed(max(seeds))


def _tensors() -> dict[str, Tensor]:
    return {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)}


def test_the_digest_is_frozen_and_does_not_depend_on_the_order() -> None:
    tensors = _tensors()
    assert (
        value_digest(tensors) == "fb64d4c769ed6e36d5249d9c18f125499c513adeff9dbdcf3e52b3bcf3972253"
    )
    assert value_digest(dict(reversed(tensors.items()))) == value_digest(tensors)
    assert value_digest({name: tensor.clone() for name, tensor in tensors.items()}) == value_digest(
        tensors
    )


def _flip_a_bit(tensor: Tensor) -> Tensor:
    flipped = tensor.clone()
    flipped.view(torch.uint8)[0] ^= 1
    return flipped


# fmt: off
_CHANGES = [
    pytest.param(lambda t: {"c" if name == "a" else name: tensor for name, tensor in t.items()},
     id="name"),
    pytest.param(lambda t: t | {"a": t["a"].view(torch.int32)}, id="dtype of the same bytes"),
    pytest.param(lambda t: t | {"a": t["a"].double()}, id="dtype of the same values"),
    pytest.param(lambda t: t | {"b": t["b"].view(4)}, id="shape"),
    pytest.param(lambda t: t | {"b": t["b"].T}, id="transposed"),
    pytest.param(lambda t: t | {"a": _flip_a_bit(t["a"])}, id="one bit"),
    pytest.param(lambda t: t | {"c": torch.zeros(0)}, id="an empty tensor more"),
    pytest.param(lambda t: {"a": t["a"]}, id="a tensor less"),
]
# fmt: on


@pytest.mark.parametrize("change", _CHANGES)
def test_the_digest_differs_after_every_change(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> None:
    assert value_digest(change(_tensors())) != value_digest(_tensors())


def test_nans_and_zeros_of_different_bits_have_different_digests() -> None:
    quiet, other = (
        torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        for bits in (0x7FC00000, 0x7FC00001)
    )
    assert quiet.isnan()
    assert other.isnan()
    assert value_digest({"x": quiet}) != value_digest({"x": other})
    assert value_digest({"x": torch.tensor(0.0)}) != value_digest({"x": torch.tensor(-0.0)})


def test_the_digest_takes_any_type_and_layout() -> None:
    wide = torch.arange(12.0).view(3, 4)
    assert value_digest({"x": wide.T}) == value_digest({"x": wide.T.contiguous()})
    last_1, empty = wide[:1, -1], wide[:0, -1]
    assert last_1.stride() == (4,)
    for part in (last_1, empty, wide[1, 1]):
        assert value_digest(part) == value_digest(part.clone())
    parameter = torch.nn.Parameter(wide)
    assert value_digest({"x": parameter}) == value_digest({"x": wide})
    for dtype in (torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.complex64):
        assert value_digest({"x": torch.ones((), dtype=dtype)}) != value_digest(
            {"x": torch.zeros((), dtype=dtype)}
        )


def _confusion(labels: Tensor, predictions: Tensor, classes: int) -> Tensor:
    return metrics.confusion_matrix(labels, predictions, classes).double()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_accuracy_f1_and_confusion_agree_with_scikit_learn(classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (200,), generator=generator)
    right = torch.rand(200, generator=generator) < 0.7
    predictions = torch.where(right, labels, torch.randint(0, classes, (200,), generator=generator))
    confusion = _confusion(labels, predictions, classes)
    assert (
        confusion.tolist() == confusion_matrix(labels, predictions, labels=range(classes)).tolist()
    )
    assert metrics.accuracy(confusion) == pytest.approx(
        accuracy_score(labels, predictions), rel=1e-12
    )
    assert metrics.macro_f1(confusion) == pytest.approx(
        f1_score(labels, predictions, average="macro"), rel=1e-12
    )


def test_a_validation_in_bf16_counts_a_large_batch_exactly() -> None:
    labels = torch.tensor([0] * 1001 + [1] * 511)
    with torch.autocast("cpu", torch.bfloat16):
        assert _confusion(labels, labels, 2).tolist() == [[1001, 0], [0, 511]]


@pytest.mark.parametrize(
    ("labels", "predictions"),
    [
        pytest.param([0, 0, 1, 1], [0, 0, 1, 1], id="all right, one class absent"),
        pytest.param([0, 0, 1, 1], [1, 1, 0, 0], id="all wrong"),
        pytest.param([0, 0, 0, 0], [0, 0, 2, 0], id="a class only predicted"),
        pytest.param([0, 2, 2, 0], [0, 0, 0, 0], id="a class never predicted"),
    ],
)
def test_macro_f1_counts_the_classes_that_occur_as_scikit_learn_does(
    labels: list[int], predictions: list[int]
) -> None:
    confusion = _confusion(torch.tensor(labels), torch.tensor(predictions), 3)
    expected = f1_score(labels, predictions, average="macro", zero_division=0)
    assert metrics.macro_f1(confusion) == pytest.approx(expected, rel=1e-12)


def test_no_examples_have_no_accuracy() -> None:
    assert math.isnan(metrics.accuracy(torch.zeros(2, 2)))
