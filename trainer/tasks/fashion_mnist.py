"""Classify Fashion-MNIST, which has the format of MNIST and harder pictures."""

from dataclasses import dataclass
from typing import ClassVar

from trainer.tasks.mnist import Mnist


@dataclass(frozen=True)
class FashionMnist(Mnist):
    """28x28 pictures of clothes: 60,000 to train, 10,000 to validate; downloaded once."""

    class_names: ClassVar[tuple[str, ...]] = (
        "t-shirt",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "boot",
    )
    torchvision_name: ClassVar[str] = "FashionMNIST"
    mean: ClassVar[float] = 0.2860
    std: ClassVar[float] = 0.3530
