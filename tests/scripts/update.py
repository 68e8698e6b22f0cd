"""One process, no wrapper: an update divides 0 by 0, because the optimizer has no eps and a gradient is zero."""

import sys

import torch
from torch import nn

from ddp_nanguard import NanGuard


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=0.0 if "--no-eps" in sys.argv else 1e-8)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with NanGuard(model, optimizer, keep_previous=True) as guard:
        while guard.step < 6:
            x = torch.rand(8, 4)
            x[:, guard.step % 4] = 0.0
            loss = guard(x).square().mean()
            guard.watch(loss=loss)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            print(f"step {guard.step} done", flush=True)


if __name__ == "__main__":
    main()
