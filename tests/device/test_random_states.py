"""Random states of every accelerator that a step may draw from, on a machine with two."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.ranks import run_ranks


def _states(rank: int, world_size: int) -> dict[str, Any]:
    from ddp_nanguard.capture import rng

    first, second = (nn.Linear(2, 2, device=f"cuda:{index}") for index in (0, 1))
    device, weights = torch.device("cuda:0"), [*first.parameters(), *second.parameters()]
    others = rng.other_devices(device, weights)
    state = rng.capture(device, others=others)
    draws = [torch.rand(4, device=f"cuda:{index}").tolist() for index in (0, 1)]
    problems = rng.restore(state, device=device)
    again = [torch.rand(4, device=f"cuda:{index}").tolist() for index in (0, 1)]
    return {
        "others": [str(each) for each in others],
        "recorded": (state.device_type, sorted(state.others)),
        "problems": problems,
        "same": draws == again,
        "offloaded": [str(each) for each in rng.other_devices(torch.device("cpu"), [torch.zeros(1)])],
        "absent": rng.restore(rng.RandomState(state.python, state.numpy, state.torch, others={"cuda:5": state.torch})),
    }


def test_the_states_of_all_devices_are_taken_and_put_back(device: str) -> None:
    (found,) = run_ranks(_states, 1, device=device, process_group=False)
    assert found["others"] == ["cuda:1"]
    assert found["recorded"] == ("cuda", ["cuda:1"])
    assert found["problems"] == [] and found["same"]
    assert found["offloaded"] == ["cuda:0"], "weights are kept on the CPU, and computed with on the current device"
    assert found["absent"] == ["cuda:5: recorded on cuda:5, which this machine does not have"]
