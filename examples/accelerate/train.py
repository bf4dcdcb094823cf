"""Fit a line with Hugging Face Accelerate, and resume from the newest state in the run folder."""

import argparse
import os
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

EXAMPLES, BATCH = 256, 16


def newest(run: Path) -> tuple[int, Path | None]:
    """Return the number of finished epochs and the state after them."""
    states = sorted(run.glob("epoch-[0-9]*"))
    return (int(states[-1].name[6:]), states[-1]) if states else (0, None)


def main() -> None:
    """Train, and write the weights to model.pt in the run folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.01)
    arguments = parser.parse_args()
    run = Path(os.environ["TRAINBOX_RUN"])
    set_seed(0)
    # Without GPUs, Accelerate uses several processes only with `cpu=True`.
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    plain = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(
        plain, torch.optim.Adam(plain.parameters(), arguments.lr)
    )
    generator = torch.Generator().manual_seed(0)
    x_N4 = torch.randn(EXAMPLES, 4, generator=generator).to(accelerator.device)
    y_N1 = x_N4.sum(1, keepdim=True)

    begin, state = newest(run)
    if state is not None:
        accelerator.load_state(str(state))
    for epoch in range(begin, arguments.epochs):
        # The order depends only on the epoch, so a resumed run has the same one.
        order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            own = batch[accelerator.process_index :: accelerator.num_processes]
            loss = nn.functional.mse_loss(model(x_N4[own]), y_N1[own])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        # A kill while the state is written leaves a folder with another name.
        unfinished = run / f"unfinished-{epoch + 1:06}"
        accelerator.save_state(str(unfinished))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(run / f"epoch-{epoch - 1:06}", ignore_errors=True)
            unfinished.rename(run / f"epoch-{epoch + 1:06}")
            print(f'{{"step": {epoch + 1}, "loss": {loss.item()}}}')
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(plain.state_dict(), run / "model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
