"""Train a small model with plain PyTorch, on one GPU or the CPU.

The script saves its own checkpoints, resumes from the newest one, and stops at SIGTERM or Ctrl-C.
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--out", type=Path, default=os.environ.get("TRAINBOX_RUN", "out"))
arguments = parser.parse_args()
arguments.out.mkdir(parents=True, exist_ok=True)
checkpoint = arguments.out / "checkpoint.pt"
device = "cuda" if torch.cuda.is_available() else "cpu"

# SIGTERM and Ctrl-C mean: save and exit. The loop below looks at this list after each step.
stops = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: stops.append(True))

# Points of the plane, inside or outside a circle.
torch.manual_seed(1)
points = torch.randn(2048, 2)
labels = (points.norm(dim=1) > 1.2).long()

model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
sampler = torch.Generator().manual_seed(2)
step = 0


def save(path, value):
    """Write a file so that a kill leaves the old one or the new one, and never a part of it."""
    torch.save(value, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


if checkpoint.exists():
    state = torch.load(checkpoint, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    sampler.set_state(state["sampler"].cpu())
    step = state["step"]

while step < arguments.steps:
    batch = torch.randint(len(points), (64,), generator=sampler)
    loss = F.cross_entropy(model(points[batch].to(device)), labels[batch].to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 20 == 0:
        print(json.dumps({"step": step, "loss": loss.item()}))
    if step % 20 == 0 or stops:
        # All that the next step depends on.
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save(checkpoint, {**state, "sampler": sampler.get_state()})
    if stops:
        sys.exit(75)  # stopped: the same command resumes

save(arguments.out / "model.pt", model.state_dict())
