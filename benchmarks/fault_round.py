"""What the fault round says to other ranks: counted, at several world sizes, with more bad sites than it may name.

Every rank runs a model of parallel branches, and in the same step each branch of each rank divides by zero. What the
faulty step issued beyond a clean one is the fault round.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.report.types import MAX_SITES
from tests.counting import counting
from tests.rank_processes import run_ranks

BRANCHES = 100
TIMEOUT_S = 120.0


class Branch(nn.Module):
    """Divides by the divisor that comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, divisor: Tensor) -> Tensor:
        return self.linear(x) / divisor


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch() for _ in range(BRANCHES))

    def forward(self, x: Tensor, divisor: Tensor) -> Tensor:
        return torch.stack([branch(x, divisor) for branch in self.branches]).sum(0)


def fault_round(rank: int, world_size: int) -> dict[str, Any]:
    """Body of a rank: a clean step and a faulty one, counted."""
    model = DistributedDataParallel(Branches())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = NanGuard(
        model, optimizer, dump_dir=None, look_again=False, layers="every"
    )  # as many sites as the round can tell
    counts = []
    report = None
    for divisor in (1.0, 1.0, 1.0, 0.0):
        with counting() as counted:
            try:
                guard(torch.ones(2, 4), torch.tensor(divisor)).square().mean().backward()
                optimizer.step()
            except NonFiniteError as error:
                report = error.report
        optimizer.zero_grad()
        counts.append(counted)
    clean, faulty = counts[-2:]
    assert report is not None, "the fault was not seen"
    return {
        "collectives": faulty.operators.total() - clean.operators.total(),
        "bytes": sum(faulty.operator_bytes) - sum(clean.operator_bytes),
        "names": sorted(faulty.operators - clean.operators),
        "sites": len(report.sites),
    }


def measured(worlds: list[int]) -> list[dict[str, Any]]:
    """A row per world size; all ranks must have counted the same.

    Raises:
        AssertionError: ranks differ, or the round is not bounded.
    """
    rows = []
    for ranks in worlds:
        first, *others = run_ranks(fault_round, ranks, TIMEOUT_S)
        assert all(other == first for other in others), f"{ranks} ranks counted differently"
        assert first["sites"] <= MAX_SITES
        rows.append({"ranks": ranks, "bad_sites_per_rank": BRANCHES, **first})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """For people."""
    lines = [f"{'ranks':>6}{'bad sites':>11}{'named':>7}{'collectives':>13}{'KiB':>8}   operators"]
    for row in rows:
        sites = row["ranks"] * row["bad_sites_per_rank"]
        counted = f"{row['collectives']:>13}{row['bytes'] / 1024:>8.1f}   {', '.join(row['names'])}"
        lines.append(f"{row['ranks']:>6}{sites:>11}{row['sites']:>7}{counted}")
    return "\n".join(lines)
