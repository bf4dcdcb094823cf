"""Fit a line with Lightning, and resume from the newest checkpoint of the run folder."""

import argparse
import json
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EXAMPLES = 256


class Line(lightning.LightningModule):
    """A line through noisy points."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.model, self.learning_rate = nn.Linear(4, 1), learning_rate

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        x_B4, y_B1 = batch
        loss = nn.functional.mse_loss(self.model(x_B4), y_B1)
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        # Trainbox copies such a line to metrics.jsonl.
        loss = self.trainer.callback_metrics["loss"].item()
        self.print(json.dumps({"step": self.global_step, "loss": loss}))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.learning_rate)

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        generator = torch.Generator().manual_seed(0)
        x_N4 = torch.randn(EXAMPLES, 4, generator=generator)
        y_N1 = x_N4.sum(1, keepdim=True) + 0.1 * torch.randn(EXAMPLES, 1, generator=generator)
        # The order depends only on the epoch, so a resumed run has the same one. With
        # shuffle=True it would depend on random numbers that were drawn before the kill.
        order = torch.randperm(EXAMPLES, generator=generator.manual_seed(self.current_epoch))
        own = order[self.global_rank :: self.trainer.world_size].tolist()
        return DataLoader(TensorDataset(x_N4, y_N1), batch_size=16, sampler=own)


def main() -> None:
    """Train, and write the weights to model.pt in the run folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.01)
    arguments = parser.parse_args()
    run = Path(os.environ["TRAINBOX_RUN"])
    lightning.seed_everything(0)
    model = Line(arguments.lr)
    checkpoints = ModelCheckpoint(dirpath=run / "checkpoints", save_last=True)
    processes = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = lightning.Trainer(
        max_epochs=arguments.epochs,
        devices=processes,
        num_nodes=int(os.environ["WORLD_SIZE"]) // processes,
        strategy="ddp" if int(os.environ["WORLD_SIZE"]) > 1 else "auto",
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, ckpt_path="last")
    if trainer.is_global_zero:
        torch.save(model.model.state_dict(), run / "model.pt")


if __name__ == "__main__":
    main()
