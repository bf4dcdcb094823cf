"""Fit a plane with Hugging Face Accelerate, and resume by the same command."""

import argparse
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainbox


def main() -> int:
    """Train, write the weights to model.pt in the run folder, and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.01)
    arguments = parser.parse_args()
    set_seed(0)
    # Without GPUs, Accelerate uses several processes only with `cpu=True`.
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    plain = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    model, optimizer = accelerator.prepare(
        plain, torch.optim.Adam(plain.parameters(), arguments.lr)
    )

    # Batches has this process's part of each batch. `prepare` would split the batches once more.
    x_N4 = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x_N4, x_N4.sum(1, keepdim=True))
    batches = trainbox.Batches(data, batch_size=16, seed=0)
    loader = DataLoader(data, batch_sampler=batches)

    state = trainbox.TrainState(model=model, optimizer=optimizer)
    checkpoints = trainbox.Checkpoints()
    step, stop = checkpoints.restore(state), False
    while step < arguments.epochs * batches.steps_per_epoch and not stop:
        batches.set_step(step)
        for x_B4, y_B1 in loader:
            trainbox.seed_step(0, step)
            predicted_B1 = model(x_B4.to(accelerator.device))
            loss = nn.functional.mse_loss(predicted_B1, y_B1.to(accelerator.device))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if (stop := trainbox.stop_requested()) or step % batches.steps_per_epoch == 0:
                trainbox.metrics(step, loss=loss)
                checkpoints.save(step, state)
            if stop:
                break
    checkpoints.wait()
    if accelerator.is_main_process and not stop:
        torch.save(plain.state_dict(), trainbox.run_folder() / "model.pt")
    accelerator.end_training()
    return 75 if stop else 0  # 75: the same command resumes


if __name__ == "__main__":
    sys.exit(main())
