"""``verdict="deferred"`` on a device: its verdict arrives late, on the model's device, whichever the current one is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import run_ranks

from . import jobs

STEPS, BAD_STEP = 7, 4


def _trained(rank: int, world_size: int, wrapper: str, sets_device: bool, aside: bool, bad: bool) -> dict[str, Any]:
    """Steps with the guard, on a stream of the loop's own where ``aside``; batch `BAD_STEP` of rank 1 is bad."""
    from ddp_nanguard import NanGuard, NonFiniteError

    from . import simulated_cuda

    device = jobs.device_of(rank, sets_device)
    stream = torch.cuda.Stream(device) if aside else torch.cuda.current_stream(device)
    found: dict[str, Any] = {}
    with torch.cuda.stream(stream):
        model = jobs.wrapped(wrapper, device, 1)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        guard = NanGuard(model, optimizer, dump_dir=None, verdict="deferred", timeout_s=20)
        batches = list(jobs.batches(device, STEPS, BAD_STEP if bad and rank == world_size - 1 else None))
        try:
            for step, batch in enumerate(guard.steps(batches)):
                with simulated_cuda.logging() as log:
                    jobs.train(guard, optimizer, batch)
                found.setdefault("waits", []).append(log.host_waits())
                found["step"] = step
            guard.close()
        except NonFiniteError as error:
            found["text"], found["origin"] = str(error), error.report.to_dict()["origin"]
        found["finite"] = all(bool(p.to("cpu").isfinite().all()) for p in model.parameters())
    return found


@pytest.mark.parametrize(
    ("wrapper", "sets_device", "aside"),
    [("plain", True, False), ("ddp", False, False), ("ddp", True, True), ("fsdp2", True, False)],
)
def test_the_host_waits_for_nothing_but_what_has_arrived(
    simulated: str, wrapper: str, sets_device: bool, aside: bool
) -> None:
    ranks = 1 if wrapper == "plain" else 2
    given = {"wrapper": wrapper, "sets_device": sets_device, "aside": aside}
    for each in run_ranks(_trained, ranks, 60, device=simulated, bad=False, **given):
        assert "text" not in each
        # an event of the step before, which has long arrived
        assert each["waits"][3:] == [{"event synchronize": 1}] * (STEPS - 3)
    found = run_ranks(_trained, ranks, 60, device=simulated, bad=True, **given)
    for each in found:
        assert each["text"] == found[0]["text"] and each["finite"]
        assert each["step"] == BAD_STEP  # told when the next one is judged
    origin = found[0]["origin"]
    named = [origin[name] for name in ("rank", "step", "phase", "layer")]
    assert named == [ranks - 1, BAD_STEP, "forward", "divide"], found[0]["text"]
