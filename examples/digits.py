"""Tutorial: handwritten digits, trained on several ranks with the guard on, until a NaN comes that nobody planted.

    torchrun --nproc-per-node 2 examples/digits.py --wrapper ddp

The loss weighs classes by how often they occur in the batch. Sooner or later a batch lacks a digit, its weight is
0/0, and the loss is NaN by itself. Then every rank stops before the update with the same message, which names the
operator, its line and the reason, and a dump lies in ``--out``. Run that step again, the guilty rank alone:

    ddp-nanguard replay nan_dumps/step-... --trace -- python examples/digits.py --wrapper ddp

Needs scikit-learn for the images. Everything that concerns the guard is marked with (guard).
"""

from __future__ import annotations

import argparse
import gc
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddp_nanguard import NanGuard, Recipe

NUM_CLASSES = 10
BATCH_SIZE = 56


class Digits(Dataset[dict[str, Any]]):
    """1797 grey images of 8 x 8 pixels, with the label and the number in the data set."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16
        self.labels = torch.from_numpy(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.images[index], "label": self.labels[index], "index": index}


class Block(nn.Module):
    """Two convolutions with BatchNorm around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, values: Tensor) -> Tensor:
        """Same shape in and out."""
        inner = self.norm1(self.conv1(values)).relu()
        return (values + self.norm2(self.conv2(inner))).relu()


class DigitsNet(nn.Module):
    """A residual network of about 20 000 parameters."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        """Logits of shape (batch, 10)."""
        values = self.blocks(self.stem(image))
        return self.head(self.dropout(values.mean((2, 3))))  # type: ignore[no-any-return]  # modules return Any


def balanced_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross entropy per class, divided by the number of samples of that class: 0/0 where there are none."""
    targets = F.one_hot(labels, NUM_CLASSES).float()
    errors = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    present = (errors * targets).sum(0) / targets.sum(0)
    absent = (errors * (1 - targets)).sum(0) / (1 - targets).sum(0)
    return (present + absent).mean()


def train_step(model: Any, batch: dict[str, Any]) -> Tensor:
    """One step up to the loss: what the guard runs once more where something went bad."""
    return balanced_loss(model(batch["image"]), batch["label"])


def recipe() -> Recipe:
    """For replays that run the step many times, such as ``--minimize --recipe examples/digits.py:recipe``."""
    return Recipe(model=DigitsNet(), step=train_step)


def wrap(net: nn.Module, wrapper: str, device: torch.device) -> nn.Module:
    """The network in the wrapper asked for."""
    if wrapper == "ddp":
        return DistributedDataParallel(net)
    if wrapper == "fsdp1":
        return FullyShardedDataParallel(net, device_id=device, use_orig_params=True)
    if wrapper == "fsdp2":
        for block in net.blocks:  # type: ignore[union-attr]  # a Sequential
            fully_shard(block)
        return fully_shard(net)
    return net


def train(wrapper: str, num_steps: int, out: str, device: torch.device) -> None:
    """Trains for ``num_steps`` steps, or until the guard stops it."""
    torch.manual_seed(0)
    model = wrap(DigitsNet().to(device), wrapper, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    guard = NanGuard(model, optimizer, dump_dir=out)  # (guard)

    data = Digits()
    sampler = DistributedSampler(data, num_replicas=int(os.environ["WORLD_SIZE"]), rank=int(os.environ["RANK"]))
    loader = DataLoader(data, BATCH_SIZE, sampler=sampler, drop_last=True)
    epoch = 0
    while guard.step < num_steps:
        sampler.set_epoch(epoch)
        for batch in guard.steps(loader):  # (guard)
            batch = {name: value.to(device) for name, value in batch.items()}
            loss = guard.run(train_step, batch)  # (guard)
            loss.backward()
            optimizer.step()  # the verdict falls here, before the update
            optimizer.zero_grad()
        epoch += 1
        if os.environ["RANK"] == "0":
            print(f"epoch {epoch}, step {guard.step}: loss {loss.item():.3f}", flush=True)
    guard.close()  # (guard)


def shut_down() -> None:
    """Ends the process group once nothing refers to the model any more.

    With gloo, a DDP module that is still alive when its group is destroyed can hang or abort the process at exit.
    """
    gc.collect()
    dist.destroy_process_group()


def main() -> None:
    """Parses the command line and runs one worker of the job."""
    parser = argparse.ArgumentParser(description="Trains on digits with the guard on. Start it with torchrun.")
    parser.add_argument("--wrapper", choices=["plain", "ddp", "fsdp1", "fsdp2"], default="ddp")
    parser.add_argument("--steps", type=int, default=1000, help="number of steps after which the training ends")
    parser.add_argument("--out", default="nan_dumps", help="directory for dumps")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(options.wrapper, options.steps, options.out, device)
    shut_down()


if __name__ == "__main__":
    main()
