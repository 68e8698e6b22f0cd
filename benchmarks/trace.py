"""What a traced step costs: a 4-block transformer (width 256, 128 tokens, batch 8), forward and backward.

    OMP_NUM_THREADS=1 python benchmarks/trace.py

Three traced steps beside the plain one: a clean step, one whose loss alone is NaN, and one that is NaN from the first
block on, which is the dearest since every later operator is an event.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ddp_nanguard.diagnosis.trace.module_stack import ModuleStack
from ddp_nanguard.diagnosis.trace.trace import Trace

WIDTH, TOKENS, BATCH, BLOCKS, REPEATS = 256, 128, 8, 4, 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 8, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        normed = self.norm1(values)
        values = values + self.attention(normed, normed, normed, need_weights=False)[0]
        return values + self.mlp(self.norm2(values))  # type: ignore[no-any-return]


def step(model: nn.Module, batch: Tensor, at: str) -> None:
    if at == "first block":
        batch = batch * math.nan
    loss = model(batch).square().mean()
    if at == "loss":
        loss = loss / (loss.detach() * 0)
    loss.backward()
    model.zero_grad()


def traced(model: nn.Module, batch: Tensor, at: str) -> Trace:
    modules = ModuleStack(model.named_modules())
    trace = Trace(modules)
    trace.batch_size = BATCH
    with modules, trace:
        modules.begin_micro_batch()
        step(model, batch, at)
    return trace


def timed(*runs: Callable[[], object]) -> list[float]:
    """The fastest of `REPEATS` in milliseconds, taken in turns, so that other work on the machine meets all alike."""
    best = [math.inf] * len(runs)
    for _ in range(REPEATS):
        for index, run in enumerate(runs):
            start = time.perf_counter()
            run()
            best[index] = min(best[index], 1000 * (time.perf_counter() - start))
    return best


def main() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(device)
    batch = torch.randn(BATCH, TOKENS, WIDTH, device=device)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device}")
    for at in ("", "loss", "first block"):
        trace = traced(model, batch, at)
        plain, cost = timed(partial(step, model, batch, at), partial(traced, model, batch, at))
        where = f"NaN from the {at} on" if at else "clean"
        print(f"{where:<24} plain {plain:6.1f} ms, traced {cost:6.1f} ms: {cost / plain:.2f} times; "
              f"{trace.num_operators} operators, {len(trace.events)} events")  # fmt: skip


if __name__ == "__main__":
    main()
