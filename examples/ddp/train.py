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
    """Exit without Python's cleanup: DDP keeps gloo's threads, and it may abort while they run."""
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(code)


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
    layers = nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2)
    model = nn.Sequential(*layers).to(device)
    wrapped = DistributedDataParallel(model) if launched else model
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)

    # The batch of a step depends only on the seed and the step.
    data = rings(9600, seed=1)
    batches = trainbox.Batches(data, options.batch_size, options.seed)
    loader = DataLoader(data, batch_sampler=batches)
    points, labels = (tensor.to(device) for tensor in rings(2000, seed=2).tensors)

    # Resume from the newest checkpoint, if this command was started before.
    state = trainbox.TrainState(model=model, optimizer=optimizer)
    checkpoints = trainbox.Checkpoints(keep=2, best="max")
    step = checkpoints.restore(state)

    while step < options.epochs * batches.steps_per_epoch:
        epoch = step // batches.steps_per_epoch + 1
        batches.set_step(step)
        for x, y in loader:
            trainbox.seed_step(options.seed, step)  # the dropout of this step
            loss = F.cross_entropy(wrapped(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 20 == 0:
                trainbox.metrics(step, epoch=epoch, loss=loss.item())
                checkpoints.save(step, state)
            if trainbox.stop_requested():  # the same answer on all processes
                checkpoints.save(step, state)
                checkpoints.wait()
                end(STOPPED)
        model.eval()
        with torch.no_grad():
            accuracy = (model(points).argmax(1) == labels).float().mean().item()
        model.train()
        trainbox.metrics(step, kind="validation", epoch=epoch, accuracy=accuracy)
        # Save again at this step, as a candidate for the best.
        checkpoints.save(step, state, metric=accuracy)

    checkpoints.wait()
    if batches.rank == 0:
        torch.save(model.state_dict(), trainbox.run_folder() / "model.pt")
        print(f"finished {step} steps in {trainbox.run_folder()}")
    end(0)


if __name__ == "__main__":
    main()
