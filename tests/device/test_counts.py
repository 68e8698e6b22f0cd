"""What a clean step asks of the device: kernels, waits of the host, contexts, pinned memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_ranks

from . import jobs

FIRST, LAST = 6, 9  # steps that are counted: the ring is full by then


def _asked(
    rank: int,
    world_size: int,
    wrapper: str,
    sets_device: bool,
    num_blocks: int,
    number: float | None = None,
    **options: Any,
) -> Any:
    """What the device is asked by a step without the guard, and by one with it."""
    import torch

    from ddp_nanguard import NanGuard

    from . import simulated_cuda

    device, logs, contexts = jobs.device_of(rank, sets_device), [], []
    for enabled in (False, True):
        simulated_cuda.core().forget_contexts()
        pinned = simulated_cuda.core().pinned_bytes()
        model = jobs.wrapped(wrapper, device, num_blocks)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        guard = NanGuard(model, optimizer, dump_dir=None, enabled=enabled, history=3, **options)
        for step, batch in enumerate(guard.steps(list(jobs.batches(device, LAST)))):
            if step == FIRST:
                entered = simulated_cuda.logging()
                log = entered.__enter__()
            # as many calls as it likes: no step waits for the memory that tells how to judge its slots
            jobs.train(guard, optimizer, batch, number, num_runs=1 + step % 3)
        entered.__exit__(None, None, None)
        guard.close()
        logs.append(log)
        contexts.append(set(simulated_cuda.core().contexts()))
        kept = simulated_cuda.core().pinned_bytes() - pinned
    kernels = logs[1].kernels()
    kernels.subtract(logs[0].kernels())
    waits = {kind: count - logs[0].host_waits().get(kind, 0) for kind, count in logs[1].host_waits().items()}
    return {
        "kernels": {name: count for name, count in kernels.items() if count},
        "waits": {kind: count for kind, count in waits.items() if count},
        "extra contexts": contexts[1] - contexts[0],
        "own contexts": contexts[1],
        "events": len(logs[1].of("event record")) - len(logs[0].of("event record")),
        "pinned": kept,
    }


STEPS = LAST - FIRST
SETUPS = {
    "plain": {"waits": {"D2H wait": STEPS}},
    "ddp": {"waits": {"D2H wait": STEPS}},
    "fsdp1": {"waits": {"D2H wait": STEPS}},
    "fsdp2": {"waits": {"D2H wait": STEPS}},
    "fsdp2 offloaded": {"waits": {"D2H wait": STEPS}},
}


@pytest.mark.parametrize("wrapper", SETUPS)
def test_a_clean_step_waits_once_and_touches_its_own_device_only(simulated: str, wrapper: str) -> None:
    found = run_ranks(
        _asked,
        1 if wrapper == "plain" else 2,
        60,
        device=simulated,
        wrapper=wrapper,
        sets_device=False,
        num_blocks=1,
        number=1.0 if wrapper == "plain" else None,
    )
    for each in found:
        assert each["waits"] == SETUPS[wrapper]["waits"]
        assert each["extra contexts"] == set()
        assert each["events"] == 2 * STEPS  # after the rank's own gradients, and of the verdict's collective


def _of_144_parameters(rank: int, world_size: int) -> Any:
    return _asked(rank, world_size, "ddp", sets_device=True, num_blocks=12)


def test_a_handful_of_kernels_looks_at_every_tensor(simulated: str) -> None:
    """One for each kind of look, whatever the number of parameters: 146 here."""
    for each in run_ranks(_of_144_parameters, 2, 60, device=simulated):
        per_step = {name: count / STEPS for name, count in each["kernels"].items()}
        assert per_step.pop("aten::sum") == 3  # arguments and output of the call, for the second look
        assert per_step.pop("aten::_foreach_norm") == 3  # gradients of the rank, of all ranks; weights
        assert per_step == dict.fromkeys(
            ("aten::aminmax", "aten::cat", "aten::mul", "aten::le", "aten::where", "aten::max", "aten::addcmul"), 1
        )


def _ignore(step: int, metrics: dict[str, float]) -> None: ...


def _logged(rank: int, world_size: int) -> Any:
    """With a logger that no counted step calls, and with one that step 8 calls, of two pages of slots."""
    common: dict[str, Any] = {"wrapper": "plain", "sets_device": False, "num_blocks": 1, "number": 1.0}
    return [_asked(rank, world_size, on_metrics=_ignore, log_every=each, **common) for each in (100, 8)]


def test_a_logger_asks_for_one_wait_in_a_logged_step_and_none_in_others(simulated: str) -> None:
    ((silent, logged),) = run_ranks(_logged, 1, 60, device=simulated)
    assert silent["waits"] == {"D2H wait": STEPS}
    assert logged == {**silent, "waits": {"D2H wait": STEPS + 1}}
