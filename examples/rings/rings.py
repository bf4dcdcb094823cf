import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainbox import Classification


class Rings(Classification):
    class_names = ("inside", "outside")
    learning_rate = 0.03

    def train_dataset(self, data_dir, seed=1):
        points = torch.randn(2048, 2, generator=torch.Generator().manual_seed(seed))
        return TensorDataset(points, (points.norm(dim=1) > 1.2).long())

    def validation_dataset(self, data_dir):
        return self.train_dataset(data_dir, seed=2)

    def build_model(self):
        return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
