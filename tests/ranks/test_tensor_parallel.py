"""FSDP2 over tensor parallelism, whose layers return tensors that a collective still writes to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.ranks import run_ranks

VOCABULARY, SIZE, LENGTH, STEPS, BAD_STEP = 32, 16, 8, 5, 3


class Feed(nn.Module):
    """The block of a transformer that tensor parallelism splits: columns, then rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, values: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(values)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed = nn.LayerNorm(SIZE), Feed()

    def forward(self, values: Tensor) -> Tensor:
        return values + self.feed(self.norm(values))  # type: ignore[no-any-return]


class Scale(nn.Module):
    def forward(self, values: Tensor, divisor: Tensor) -> Tensor:
        return values * divisor / divisor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, SIZE)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.scale, self.output = nn.LayerNorm(SIZE), Scale(), nn.Linear(SIZE, VOCABULARY)

    def forward(self, tokens: Tensor, divisor: Tensor) -> Tensor:
        values = self.tokens(tokens)
        for block in self.blocks:
            values = block(values)
        return self.output(self.scale(self.norm(values), divisor))  # type: ignore[no-any-return]


def _parallel() -> nn.Module:
    """As in PyTorch's own example: sequence parallel norms, columns and rows in between, shards over the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = Model()
    parallelize_module(
        model,
        mesh["tensor"],
        {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "feed": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed.up": ColwiseParallel(),
            "feed.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh["tensor"], plan)
    return fully_shard(model, mesh=mesh["data"])


def _trained(rank: int, world_size: int) -> dict[str, Any]:
    """Weights after clean steps with the guard and without, and what is said of a bad batch of ranks 2 and 3."""
    from ddp_nanguard import NanGuard, NonFiniteError

    found: dict[str, Any] = {"weights": []}
    for enabled, bad_step in ((False, None), (True, None), (True, BAD_STEP)):
        model = _parallel()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        guard = NanGuard(model, optimizer, dump_dir=None, enabled=enabled, layers="every", timeout_s=20)
        generator = torch.Generator().manual_seed(rank // 2)  # ranks of one tensor-parallel group share their batches
        try:
            for step in range(STEPS):
                tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
                is_bad = step == bad_step and rank >= 2
                logits = guard(tokens, torch.full((1,), 0.0 if is_bad else 1.0))
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
                guard.watch(loss=loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        except NonFiniteError as error:
            found["text"], found["origin"] = str(error), error.report.to_dict()["origin"]
        else:
            found["weights"].append([p.to_local().detach().clone() for p in model.parameters()])
        guard.close()
    return found


def test_what_is_in_flight_is_never_blamed() -> None:
    found = run_ranks(_trained, 4, 60)
    for each in found:
        without, guarded = each["weights"]
        assert all(torch.equal(one, other) for one, other in zip(without, guarded, strict=True))
    assert len({each["text"] for each in found}) == 1
    origin = found[0]["origin"]
    assert (origin["rank"], origin["step"], origin["phase"], origin["layer"]) == (2, BAD_STEP, "forward", "scale")
    assert origin["kind"] == "nan"
