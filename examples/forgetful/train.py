"""Train a small model with a mistake: the checkpoint does not have the state of the sampler."""

import argparse
import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--out", type=Path, default=os.environ.get("TRAINBOX_RUN", "out"))
arguments = parser.parse_args()
arguments.out.mkdir(parents=True, exist_ok=True)
checkpoint = arguments.out / "checkpoint.pt"

# Points of the plane, inside or outside a circle.
torch.manual_seed(1)
points = torch.randn(2048, 2)
labels = (points.norm(dim=1) > 1.2).long()

model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
sampler = torch.Generator().manual_seed(2)
step = 0


def save(path, value):
    """Write a file so that a kill leaves the old one or the new one, and never a part of it."""
    torch.save(value, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


if checkpoint.exists():
    state = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]

while step < arguments.steps:
    batch = torch.randint(len(points), (64,), generator=sampler)
    loss = F.cross_entropy(model(points[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 20 == 0:
        print(json.dumps({"step": step, "loss": loss.item()}))
        # The mistake: sampler.get_state() is missing. After a resume, the sampler draws the first
        # batches again.
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save(checkpoint, state)

save(arguments.out / "model.pt", model.state_dict())
