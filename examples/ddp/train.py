"""Train a small network on one process or with DDP, and resume by the same command."""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import trainbox

STOPPED = 75  # the exit code for "start the same command again"


def rings(count, seed):
    """Return points of the plane, and whether each is inside the unit circle."""
    points = 2 * torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) - 1
    return TensorDataset(points, (points.norm(dim=1) < 0.8).long())


def parse_options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=96, help="over all processes")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def end(code):
    """Exit with `code`. While a process group exists, gloo may abort a process that exits."""
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)


def main():
    options = parse_options()
    # torchrun and `trainbox run` set RANK. Plain python is one process.
    launched = "RANK" in os.environ
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if launched:
        dist.init_process_group()

    torch.manual_seed(options.seed)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    wrapped = DistributedDataParallel(model) if launched else model
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)

    # A position is the number of finished steps. The sampler starts at any position.
    data, batch_size = rings(9600, seed=1), options.batch_size
    sampler = trainbox.Sampler(data, options.seed)
    loader = DataLoader(
        data, batch_size=batch_size // sampler.world_size, sampler=sampler, drop_last=True
    )
    steps_per_epoch = len(data) // batch_size
    points, labels = (tensor.to(device) for tensor in rings(2000, seed=2).tensors)

    # Resume from the newest checkpoint, if this command was started before.
    checkpoints, step = trainbox.Checkpoints(keep=2, best="max"), 0
    if (found := checkpoints.load()) is not None:
        state, step = found
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def save(metric=None):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoints.save(step, state, metric)

    while step < options.epochs * steps_per_epoch:
        epoch, index = divmod(step, steps_per_epoch)
        sampler.set_epoch(epoch, start=index * batch_size)
        for x, y in loader:
            loss = F.cross_entropy(wrapped(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 20 == 0:
                trainbox.metrics(step, epoch=epoch + 1, loss=loss.item())
                save()
            if trainbox.stop_requested():  # the same answer on all processes
                save()
                checkpoints.wait()
                end(STOPPED)
        with torch.no_grad():
            accuracy = (model(points).argmax(1) == labels).float().mean().item()
        trainbox.metrics(step, kind="validation", epoch=epoch + 1, accuracy=accuracy)
        save(metric=accuracy)  # again at this step, as a candidate for the best

    checkpoints.wait()
    if sampler.rank == 0:
        torch.save(model.state_dict(), trainbox.run_folder() / "model.pt")
        print(f"finished {step} steps in {trainbox.run_folder()}")
    end(0)


if __name__ == "__main__":
    main()
