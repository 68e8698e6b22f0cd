"""All at the top level: ``while True``, batches drawn by hand, the loss made in the model, DDP, accumulation.

The number of micro-batches is that of the whole job, divided by the number of ranks.
"""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard

learning_rate = float(sys.argv[1])
bad_step = int(sys.argv[2])
is_ddp = int(os.environ.get("RANK", -1)) != -1
accumulation = 4
if is_ddp:
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert accumulation % world_size == 0
    accumulation //= world_size
else:
    rank, world_size = 0, 1
torch.manual_seed(1337 + rank)
data = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
step = 0


def get_batch():
    index = torch.randint(len(data), (6,))
    x = data[index]
    lengths = x.abs().sum(1, keepdim=True)
    if step == bad_step and rank == world_size - 1:
        x, lengths = x.clone(), lengths.clone()
        x[2], lengths[2] = 0.0, 0.0  # an empty row
    return x, lengths


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x, lengths):
        scaled = x / lengths
        for block in self.blocks:
            scaled = block(scaled)
        logits = self.head(scaled)
        return logits, F.cross_entropy(logits, x[:, :4].argmax(1))


model = Net()
if is_ddp:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
guard = NanGuard(model, optimizer)

x, lengths = get_batch()
while True:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate / (1 + step)
    for micro_step in range(accumulation):
        last = micro_step == accumulation - 1
        with contextlib.nullcontext() if last or not is_ddp else model.no_sync():
            logits, loss = guard(x, lengths)
            loss = loss / accumulation
            guard.watch(loss=loss)
        step += last
        x, lengths = get_batch()  # while the model computes
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"step {step} done", flush=True)
    if step == 8:
        break
