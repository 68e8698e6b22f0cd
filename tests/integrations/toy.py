"""The failure that began it all, shrunk: a loss per class over the number of its members, and a batch that lacks one.

Twenty classes, BatchNorm, Dropout and Adam at 0.02. Rank ``BAD_RANK`` finds no member of class ``ABSENT`` in its batch
``BAD_BATCH``, so that 0 is divided by 0 there and nowhere else.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CLASSES, PER_CLASS, FEATURES = 20, 2, 16
BATCH_SIZE = CLASSES * PER_CLASS
ABSENT, BAD_BATCH, BAD_RANK = 7, 3, 1
NUM_BATCHES = 6


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Index i belongs to rank ``i % num_ranks``; ``is_bad`` takes a class out of one batch of one rank."""

    def __init__(self, num_ranks: int, is_bad: bool) -> None:
        number = NUM_BATCHES * BATCH_SIZE * num_ranks
        self.x = torch.randn(number, FEATURES, generator=torch.Generator().manual_seed(0))
        self.y = torch.arange(number) // num_ranks % CLASSES
        if is_bad:
            own = torch.arange(BAD_BATCH * BATCH_SIZE, (BAD_BATCH + 1) * BATCH_SIZE) * num_ranks + BAD_RANK % num_ranks
            self.y[own] = torch.where(self.y[own] == ABSENT, ABSENT + 1, self.y[own])

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Data(pl.LightningDataModule):
    """Of the rank that asks, in order."""

    def __init__(self, is_bad: bool = True) -> None:
        super().__init__()
        self.is_bad = is_bad

    def train_dataloader(self) -> DataLoader[Any]:
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        samples = Samples(ranks, self.is_bad)
        sampler = DistributedSampler(samples, ranks, rank, shuffle=False) if ranks > 1 else None
        return DataLoader(samples, BATCH_SIZE, sampler=sampler)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Samples(1, is_bad=False), BATCH_SIZE)


class Toy(pl.LightningModule):
    """Trains with either kind of optimization, and counts its steps in what is no buffer."""

    def __init__(
        self, manual: bool = False, returns_dict: bool = False, is_half: bool = False, step_every: int = 1
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(32, CLASSES)
        self.automatic_optimization = not manual
        self.returns_dict = returns_dict
        self.is_half = is_half
        self.num_steps, self.step_every = 0, step_every
        self.kept: dict[str, Any] = {"labels": [], "steps": torch.zeros(())}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))

    def balanced(self, logits: Tensor, y: Tensor) -> Tensor:
        members = F.one_hot(y, CLASSES).float()
        errors = F.binary_cross_entropy_with_logits(logits, members, reduction="none")
        return ((errors * members).sum(0) / members.sum(0)).mean()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        self.num_steps += 1
        self.kept["labels"].append(len(y))
        self.kept["steps"] += 1
        loss = self.balanced(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            self.manual_backward(loss)
            if self.num_steps % self.step_every == 0:
                optimizer.step()
                optimizer.zero_grad()
            return None
        if self.is_half:
            return loss.half()  # times 65536 it overflows, which the scaler is there for
        return {"loss": loss, "y": y} if self.returns_dict else loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)


class Drawing(Toy):
    """Takes its batches from the loader itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]  # Lightning goes by the name
        (x, y), *_ = next(dataloader_iter)
        return self.balanced(self(x), y)
