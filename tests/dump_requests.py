"""Requests for dumps, small and with everything that is awkward, for the tests of `ddp_nanguard.dump`."""

from __future__ import annotations

import hashlib
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddp_nanguard.capture.rng import capture
from ddp_nanguard.capture.window import MicroBatch
from ddp_nanguard.config import GuardConfig
from ddp_nanguard.dump import DumpRequest, write_dump
from ddp_nanguard.dump.history import SERIES
from ddp_nanguard.dump.manifest import settings
from ddp_nanguard.dump.rank_records import Device, RankEvidence
from ddp_nanguard.dump.records import WrapperDescription
from ddp_nanguard.dump.request import no_plain_state
from ddp_nanguard.report.slot_key import SlotKey
from ddp_nanguard.report.types import Evidence, FaultReport, Phase, Site
from ddp_nanguard.tensors.shards import TensorShard

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
]


def random_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits, NaN payloads included; the same for equal arguments in every process."""
    seed = int.from_bytes(hashlib.blake2b(f"{name}{shape}{dtype}".encode(), digest_size=4).digest(), "big")
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    numel = int(np.prod(shape))
    data = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape) if numel else torch.empty(shape, dtype=dtype)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """For comparing bit for bit."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def site(rank: int | None = 0, step: int = 7) -> Site:
    evidence = Evidence((4, 4), "float32", 3, 1, 0, 16, 2.5)
    return Site(rank, step, 1, Phase.FORWARD, "layers.2.act", 1, "output", "nan", evidence=evidence)


def report(step: int = 7, world_size: int = 1, wrapper: str = "ddp") -> FaultReport:
    where = site(step=step)
    return FaultReport(step, world_size, wrapper, where, (where,), (), 1, (0,), "the log of a negative number")


def window() -> list[MicroBatch]:
    batch = {"x": torch.arange(12.0).reshape(3, 4)[:, :2], "y": [1, 2], 3: (None, b"raw")}
    return [MicroBatch(0, batch, capture(), {"loss": torch.tensor(float("nan"))}, ["['x']"], {"scale": 2.0**16})]


def history() -> dict[str, np.ndarray[Any, Any]]:
    """Of two clean steps without slots, and of a fault in a layer whose name is a path."""
    labels = np.array([SlotKey(Phase.FORWARD, 0, "layers/2|a", 1, "output", 1).to_label()])
    numbers = dict.fromkeys(SERIES, np.array([1.0, np.nan]))
    slots = {f"step.{step}.{part}": empty for step in (5, 6) for part, empty in _NO_SLOTS.items()}
    return {"steps": np.array([5, 6]), **numbers, **slots, "fault.labels": labels, "fault.values": np.zeros((1, 2))}


_NO_SLOTS = {"labels": np.array([], dtype=np.str_), "values": np.zeros((0, 2))}


def request(dump_dir: Any, *, rank: int = 0, world_size: int = 1, step: int = 7, **changes: Any) -> DumpRequest:
    """A whole request of one rank; ``options`` go to `GuardConfig`, everything else to `DumpRequest`."""
    options = {"dump_dir": str(dump_dir), **changes.pop("options", {})}
    group = changes.pop("group", dist.group.WORLD if world_size > 1 else None)
    defaults: dict[str, Any] = {
        "report": report(step, world_size),
        "state": [TensorShard.whole("model.w", random_tensor("w", (5, 3), torch.float32))],
        "window": window(),
        "buffers": {"bn.running_mean": torch.arange(3.0)},
        "history": history(),
        "evidence": RankEvidence(rank, step, settings(), "host", Device("cpu"), (site(rank),)),
        "wrapper": WrapperDescription.from_dict({"kind": "ddp", "compiled": False}),
        "plain_state": {**no_plain_state(), "registered": {"lr": 0.1, "betas": (0.9, nan), "step": torch.tensor(3)}},
        "recipe": "train:recipe",
        "replica_index": rank,
    }
    config = GuardConfig(**options)
    return DumpRequest(rank=rank, world_size=world_size, group=group, config=config, **{**defaults, **changes})


def dumped(root, **kwargs):
    """One rank's part in a dump of a replicated model."""
    return write_dump(request(root, **kwargs))


def files_below(root):
    return sorted(str(path.relative_to(root)) for path in Path(root).rglob("*") if path.is_file())


def replicated(rank, world_size, root, own_value, damaged=()):
    """One rank's part in a dump of equal replicas, of which the last may have an element of its own."""
    weight = torch.arange(6.0).reshape(2, 3)
    if own_value is not None and rank == world_size - 1:
        weight[1, 1] = own_value
    state = [TensorShard.whole("model.w", weight), TensorShard.whole("model.same", torch.ones(4))]
    state.append(TensorShard.whole("optim.0.w.step", torch.tensor(3.0)))
    wanted = request(root, rank=rank, world_size=world_size, state=state, damaged=set(damaged))
    return write_dump(wanted)
