"""The user's own check, after the reduce (``--clip``: on every rank) or before the backward: the guard judges no step.

On the last rank the last batch has one row, whose distance to the mean is 0.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 16)
        self.scale = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.lin(x)
        return self.scale(hidden / (hidden - hidden.mean(0)).norm())  # type: ignore[no-any-return]


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = NanGuard(model, optimizer, dump_dir="nan_dumps", timeout_s=4)
    generator = torch.Generator().manual_seed(dist.get_rank())
    last = dist.get_rank() == dist.get_world_size() - 1
    batches = [torch.randn(1 if last and step == 2 else 8, 8, generator=generator) for step in range(4)]
    for x in guard.steps(batches):
        loss = model(x).tanh().pow(2).mean()
        guard.watch(loss=loss)
        if "--clip" not in sys.argv:
            assert torch.isfinite(loss), "the loss is not finite"
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
