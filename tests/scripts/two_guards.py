"""A generator and a critic, each with a guard of its own; the dump is that of the critic, whose guard is made last.

In step 2 the norm in the critic's penalty is 0 on the last rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard


def penalised(critic: nn.Module, batch: Tensor) -> Tensor:
    return critic(batch).mean() + batch.sum(1).norm() / batch.norm()  # type: ignore[no-any-return]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    generator, critic = DistributedDataParallel(nn.Linear(3, 4)), DistributedDataParallel(nn.Linear(4, 1))
    steps = torch.optim.SGD(generator.parameters(), lr=0.01), torch.optim.SGD(critic.parameters(), lr=0.01)
    first = NanGuard(generator, steps[0], dump_dir="other_dumps")
    second = NanGuard(critic, steps[1], dump_dir="nan_dumps")
    last = rank == dist.get_world_size() - 1
    batches = [torch.ones(2, 4) * (0.0 if last and step == 2 else 1.0) for step in range(4)]
    for batch in second.steps(batches):
        loss = first.run(lambda model, noise: model(noise).pow(2).mean(), torch.ones(2, 3))
        loss.backward()
        steps[0].step()
        steps[0].zero_grad()
        second.run(penalised, batch).backward()
        steps[1].step()
        steps[1].zero_grad()


if __name__ == "__main__":
    main()
