"""Fit a plane with Lightning, and resume from the newest checkpoint of the run folder."""

import argparse
import json
import os

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainbox


class Plane(lightning.LightningModule):
    """A plane through noisy points."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        layers = nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)
        self.model, self.learning_rate = nn.Sequential(*layers), learning_rate

    def on_train_batch_start(self, _batch: list[torch.Tensor], _index: int) -> None:
        trainbox.seed_step(0, self.global_step)

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
        x_N4 = torch.randn(256, 4, generator=generator)
        y_N1 = x_N4.sum(1, keepdim=True) + 0.1 * torch.randn(256, 1, generator=generator)
        data = TensorDataset(x_N4, y_N1)
        # Lightning calls this for each epoch, and after a resume.
        batches = trainbox.Batches(data, batch_size=32, seed=0, step=self.global_step)
        return DataLoader(data, batch_sampler=batches)


def main() -> None:
    """Train, and write the weights to model.pt in the run folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.01)
    arguments = parser.parse_args()
    run = trainbox.run_folder()
    lightning.seed_everything(0)
    model = Plane(arguments.lr)
    checkpoints = ModelCheckpoint(dirpath=run / "checkpoints", save_last=True)
    # torchrun and `trainbox run` set these variables if there are several processes.
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        max_epochs=arguments.epochs,
        devices=processes,
        num_nodes=world_size // processes,
        strategy="ddp" if world_size > 1 else "auto",
        use_distributed_sampler=False,  # Batches has this process's part of each batch
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
