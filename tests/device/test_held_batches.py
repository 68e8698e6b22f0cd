"""``hold_batches="host"``: copies on a stream of their own, which nothing waits for and which lose nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks

from . import jobs

STEPS, BAD_STEP = 6, 4


def _trained(rank: int, world_size: int, directory: str, verdict: str) -> dict[str, Any]:
    """Clean steps that are logged; then a loader that writes each batch to the same memory, and a step that does."""
    from ddp_nanguard import NanGuard

    from . import simulated_cuda

    device = jobs.device_of(rank)
    model = jobs.wrapped("plain", device, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    options: dict[str, Any] = {"hold_batches": "host", "verdict": verdict}
    guard = NanGuard(model, optimizer, dump_dir=None, history=2, **options)
    for step, batch in enumerate(guard.steps(list(jobs.batches(device, STEPS + 1)))):
        if step == STEPS - 1:
            entered = simulated_cuda.logging()
            log = entered.__enter__()
        if step == STEPS:  # from the first computation of a step to that of the next
            entered.__exit__(None, None, None)
        jobs.train(guard, optimizer, batch)
    guard.close()
    kinds = ("same memory", "changed in place")
    dumps = {kind: _fault(f"{directory}/{kind}", model, optimizer, device, kind, options) for kind in kinds}
    held = [entry for entry in log.of("D2H async") if entry.bytes in (4 * 5 * jobs.SIZE * 4, 4)]
    return {
        "waits": log.host_waits(),
        "held on": [entry.stream for entry in held],
        "recorded on": [entry.stream for entry in log.of("record_stream")],
        "computed on": {entry.stream for entry in log.of("kernel")},
        **dumps,
    }


def _fault(
    directory: str, model: Any, optimizer: Any, device: torch.device, kind: str, options: dict[str, Any]
) -> tuple[str, list[torch.Tensor]]:
    """The dump, and the batch as the loader gave it."""
    from ddp_nanguard import NanGuard, NonFiniteError

    guard = NanGuard(model, optimizer, dump_dir=directory, **options)
    given = list(jobs.batches(device, BAD_STEP + 2, bad=BAD_STEP))
    expected = [tensor.cpu() for tensor in given[BAD_STEP]]
    memory = tuple(torch.empty_like(tensor) for tensor in given[0])

    def loader() -> Any:
        for batch in given:
            if kind == "changed in place":
                yield batch
                continue
            for to, tensor in zip(memory, batch, strict=True):
                to.copy_(tensor)
            yield memory

    try:
        for values, divisor in guard.steps(loader()):
            if kind == "changed in place":
                values.mul_(2.0)
            jobs.train(guard, optimizer, (values, divisor))
    except NonFiniteError as error:
        return str(error.report.dump_path), expected
    finally:
        guard.close()
        optimizer.zero_grad()
    raise AssertionError("no fault")


@pytest.mark.parametrize("verdict", ["sync", "deferred"])
def test_copies_hold_up_neither_computation_nor_host(simulated: str, tmp_path: Path, verdict: str) -> None:
    from ddp_nanguard.dump.read import open_dump

    (found,) = run_ranks(_trained, 1, 60, device=simulated, directory=str(tmp_path), verdict=verdict)
    assert found["waits"] == ({"D2H wait": 1} if verdict == "sync" else {"event synchronize": 1})
    assert len(found["held on"]) == 2 and found["computed on"] == {0}
    assert found["recorded on"] == found["held on"] and 0 not in found["held on"]
    for kind in ("same memory", "changed in place"):
        path, expected = found[kind]
        (micro_batch,) = open_dump(path).window(0)
        assert micro_batch.modified == []
        assert all(torch.equal(kept, given) for kept, given in zip(micro_batch.batch, expected, strict=True)), kind
