"""DataParallel without a GPU: torch's scatter, replicate and gather, with copies on the CPU."""

import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import scatter_gather

from trainbox.task import Task
from trainer.loop.losses import LossModule

# The package has a function of the same name.
replicate_module = importlib.import_module("torch.nn.parallel.replicate")


class _CpuScatter:
    @staticmethod
    def apply(
        devices: Sequence[int], chunk_sizes: None, dim: int, tensor: Tensor
    ) -> tuple[Tensor, ...]:
        return tensor.chunk(len(devices), dim)  # as comm.scatter does


class _CpuGather:
    @staticmethod
    def apply(device: int, dim: int, *tensors: Tensor) -> Tensor:
        return torch.cat(tensors, dim)


def _cpu_broadcast(
    tensors: Sequence[Tensor], devices: Sequence[int], detach: bool = False
) -> list[list[Tensor]]:
    """Return a copy for each device. The backward adds the gradients of the copies."""
    return [
        [tensor.detach().clone() if detach else tensor * 1 for tensor in tensors] for _ in devices
    ]


@pytest.fixture
def data_parallel(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[nn.Module, Any, int], Any]]:
    """Run `nn.DataParallel(module)(batch)` on a number of devices, each forward in a thread."""
    monkeypatch.setattr(scatter_gather, "Scatter", _CpuScatter)
    monkeypatch.setattr(scatter_gather, "Gather", _CpuGather)
    monkeypatch.setattr(replicate_module, "_broadcast_coalesced_reshape", _cpu_broadcast)

    with ThreadPoolExecutor(1) as pool:

        def run(module: nn.Module, batch: Any, devices: int) -> Any:
            ids = list(range(devices))
            inputs, _ = scatter_gather.scatter_kwargs((batch,), {}, ids)
            replicas = replicate_module.replicate(module, ids[: len(inputs)])
            outputs = [
                pool.submit(replica, *arguments).result()
                for replica, arguments in zip(replicas, inputs, strict=True)
            ]
            return scatter_gather.gather(outputs, 0)

        yield run


class Pairs(Task):
    """A task with two losses of inputs and labels in a tuple, a list or a dict."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))

    def prepare(self, batch: Any, training: bool) -> Any:
        inputs_B6, labels_B = (
            (batch["inputs"], batch["labels"]) if isinstance(batch, dict) else batch
        )
        return inputs_B6 * 2, labels_B

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs_B6, labels_B = batch
        logits_B3 = model(inputs_B6)
        weight_3 = torch.tensor([1.0, 5.0, 0.5])
        return {
            "weighted": F.cross_entropy(logits_B3, labels_B, weight_3, reduction="none"),
            "size": logits_B3.square().mean(1) * 0.01,
        }


def _batch(kind: str, size: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    inputs, labels = (
        torch.randn(size, 6, generator=generator),
        torch.randint(0, 3, (size,), generator=generator),
    )
    return {
        "tuple": (inputs, labels),
        "list": [inputs, labels],
        "dict": {"inputs": inputs, "labels": labels},
    }[kind]


@pytest.mark.parametrize("kind", ["tuple", "list", "dict"])
@pytest.mark.parametrize(("size", "devices"), [(7, 3), (8, 2), (12, 4), (2, 3), (1, 2)])
def test_losses_and_gradients_equal_those_of_one_device(
    data_parallel: Callable[[nn.Module, Any, int], Any], kind: str, size: int, devices: int
) -> None:
    torch.manual_seed(0)
    task = Pairs()
    single = LossModule(task, task.build_model(), "cpu", None)
    shared = copy.deepcopy(single)
    expected = single(_batch(kind, size))
    found = data_parallel(shared, _batch(kind, size), devices)
    assert list(found) == list(expected) == ["weighted", "size"]
    for name in expected:
        assert found[name].shape == (size,)
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-7)
    for losses in (expected, found):
        sum(loss.sum() for loss in losses.values()).backward()
    gradients = [dict(module.named_parameters()) for module in (single, shared)]
    for name, parameter in gradients[0].items():
        assert parameter.grad is not None
        torch.testing.assert_close(
            gradients[1][name].grad, parameter.grad, rtol=1e-5, atol=1e-6, msg=name
        )
