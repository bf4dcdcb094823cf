"""Train a model of torchvision on a folder of pictures, as a good script does."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from tests.gpu.programs.by_hand import steps_per_s

_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def measure(
    device: str, folder: str, seconds: float, model: str, size: int, batch_size: int, workers: int
) -> Iterator[tuple[str, Any]]:
    """Yield the pictures per second of one batch in each memory format, by how cuDNN chooses.

    Then yield the pictures per second from files, with the channels last and the fastest choice.
    """
    augment = (v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), v2.PILToTensor())
    data = ImageFolder(folder, v2.Compose(augment))
    loader = DataLoader(
        data,
        batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=device == "cuda",
        persistent_workers=True,
        prefetch_factor=2,
    )
    endless = itertools.chain.from_iterable(itertools.repeat(loader))
    one = [tensor.to(device) for tensor in next(endless)]
    for choice in ("deterministic", "heuristics", "benchmark"):
        torch.backends.cudnn.benchmark = choice == "benchmark"
        torch.backends.cudnn.deterministic = choice == "deterministic"
        for name, order in _FORMATS.items():
            network = getattr(models, model)(num_classes=len(data.classes))
            step = _Step(network.to(device, memory_format=order), order, device)
            rate = steps_per_s(device, lambda step=step: step(one), seconds / 2)
            yield f"{name} {choice}", batch_size * rate
    yield "from files", batch_size * steps_per_s(device, lambda: step(next(endless)), seconds)


class _Step:
    def __init__(self, model: torch.nn.Module, order: torch.memory_format, device: str) -> None:
        self.model, self.order, self.device = model, order, device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device == "cuda")
        self.mean, self.std = (
            torch.tensor(values, device=device).view(3, 1, 1) * 255
            for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        )

    def __call__(self, batch: Any) -> None:
        images, labels = (tensor.to(self.device, non_blocking=True) for tensor in batch)
        images = ((images.float() - self.mean) / self.std).contiguous(memory_format=self.order)
        with torch.autocast(self.device, torch.bfloat16):
            loss = F.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
