"""A character-level transformer on Python's own source text, sharded by FSDP2, that diverges by its learning rate.

    torchrun --nproc-per-node 2 examples/char_gpt.py --lr 1
    torchrun --nproc-per-node 2 examples/char_gpt.py --lr 1 --amp

Nothing is planted: the learning rate is ten times too high. Values grow from step to step until one overflows; the
guard stops every rank before the update. Why, says the history in the dump, without running anything:

    ddp-nanguard explain nan_dumps/step-... --no-replay

``--amp`` trains in float16 autocast with a GradScaler. Everything that concerns the guard is marked with (guard).
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from ddp_nanguard import NanGuard, Recipe

MODULES = ("argparse", "ast", "calendar", "inspect", "typing")
CONTEXT, WIDTH, NUM_HEADS, NUM_BLOCKS, BATCH_SIZE, NUM_MICRO_BATCHES = 64, 64, 4, 2, 8, 3
USES_AMP = False


def source_text() -> Tensor:
    """Bytes of a few modules of the standard library, int64, one dimension."""
    specs = [importlib.util.find_spec(name) for name in MODULES]
    files = [Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None]
    return torch.tensor(list(b"".join(path.read_bytes() for path in files)), dtype=torch.int64)


class Block(nn.Module):
    """Attention and a feed-forward part, each around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, time, width) in and out."""
        batch, time, _ = x.shape
        query, key, value = (
            part.view(batch, time, NUM_HEADS, -1).transpose(1, 2) for part in self.mix(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]  # modules return Any


class CharGPT(nn.Module):
    """About 110 000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (batch * time, 256)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.token(tokens) + self.position(places))
        return self.head(x.flatten(0, 1))  # type: ignore[no-any-return]  # modules return Any


def train_step(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss that is backpropagated; training and replay share it."""
    device_type = batch["tokens"].device.type
    with torch.autocast(device_type, dtype=torch.float16, enabled=USES_AMP):
        logits = model(batch["tokens"][:, :-1])
    loss = F.cross_entropy(logits.float(), batch["tokens"][:, 1:].flatten())
    return loss / NUM_MICRO_BATCHES


def recipe() -> Recipe:
    """What a replay needs to build everything again (guard)."""
    return Recipe(model=CharGPT(), step=train_step)


def amp_recipe() -> Recipe:
    """The same, in float16 autocast (guard)."""
    global USES_AMP
    USES_AMP = True
    return recipe()


def batches(text: Tensor, rank: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Random windows of the text, other ones on every rank, without end."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH_SIZE,), generator=generator)
        yield {"tokens": torch.stack([text[start : start + CONTEXT + 1] for start in starts]).to(device)}


def train(learning_rate: float, num_steps: int, out: str, device: torch.device) -> None:
    """Trains for ``num_steps`` steps, or until the guard stops it."""
    torch.manual_seed(0)
    model = CharGPT().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8) if USES_AMP else None
    name = "char_gpt:amp_recipe" if USES_AMP else "char_gpt:recipe"
    guard = NanGuard(model, optimizer, scaler=scaler, dump_dir=out, replay=name)  # (guard)

    for index, batch in enumerate(guard.steps(batches(source_text(), dist.get_rank(), device))):  # (guard)
        is_last = index % NUM_MICRO_BATCHES == NUM_MICRO_BATCHES - 1
        model.set_requires_gradient_sync(is_last)
        loss = train_step(guard, batch)
        guard.watch(loss=loss)  # (guard)
        (scaler.scale(loss) if scaler is not None else loss).backward()  # type: ignore[no-untyped-call]
        if is_last:
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
        if guard.step >= num_steps:
            break
    guard.close()  # (guard)


def main() -> None:
    """Parses the command line and runs one worker of the job."""
    global USES_AMP
    parser = argparse.ArgumentParser(description="A small transformer on Python's sources. Start it with torchrun.")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--amp", action="store_true", help="float16 autocast with a GradScaler")
    parser.add_argument("--steps", type=int, default=200, help="number of steps after which the training ends")
    parser.add_argument("--out", default="nan_dumps", help="directory for dumps")
    options = parser.parse_args()
    USES_AMP = options.amp
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(options.lr, options.steps, options.out, device)
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
