"""The verdict: the one collective of a clean step.

[Note: the verdict]
Each rank turns its slots into one integer on the device (`probes.severity`); the verdict is the MAX over ranks.
Integers, because NaN is lost in a MAX over floats, and which rank holds it decides whether. Only where the verdict is
not clean do ranks talk about details, on a CPU group of its own with a timeout of its own (`RankGroup.fault_group`), so
that neither a watchdog of the training group nor a dead peer takes the evidence along.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ddp_nanguard.probes.severity import Severity


def packed(severity: Tensor, ran_backward: bool) -> Tensor:
    """What a rank sends: int64, shape (2,), of which the MAX over ranks is the verdict."""
    return torch.stack((severity, _flag(severity.device, ran_backward)))


@functools.cache
def _flag(device: torch.device, value: bool) -> Tensor:
    return torch.full((), int(value), dtype=torch.int64, device=device)


class Verdict:
    """A verdict, still on the device.

    Args:
        payload: the MAX of what `packed` gave on each rank.
    """

    def __init__(self, payload: Tensor) -> None:
        self._payload = payload
        self._host: Tensor | None = None
        self._arrival: torch.cuda.Event | None = None

    def as_found_inf(self, severity: int) -> Tensor:
        """1.0 where the verdict is as severe, else 0.0; float32, shape (), on the device.

        A copy of the payload sets out for the host, to be read later without a wait. Host sync: none.
        """
        if self._payload.is_cuda:
            self._host = torch.empty_like(self._payload, device="cpu", pin_memory=True)
            self._host.copy_(self._payload, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
            self._arrival.record()
        return (self._payload[0] >= severity).to(torch.float32)

    def read(self) -> tuple[Severity, bool]:
        """Severity, and whether any rank ran a backward. Host sync: one read."""
        if self._arrival is not None:
            self._arrival.synchronize()
        worst, ran_backward = (self._payload if self._host is None else self._host).tolist()
        return Severity(worst), bool(ran_backward)
