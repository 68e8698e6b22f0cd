"""The one collective of a clean step, and the fault round.

[Note: severity]
Each rank turns its slots into one integer on the device; the verdict is the MAX over ranks. Integers, because NaN is
lost in a MAX over floats
(and which rank holds it decides whether). Only when the verdict is not clean do ranks talk about details, on a CPU
group of its own with a timeout of its own, so that neither a watchdog of the training group nor a dead peer takes the
evidence along.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_nanguard.probes.severity import Severity

_SHARE_BITS = 31


class Verdict:
    """A verdict, still on the device.

    Args:
        payload: int64, shape (2,).
    """

    def __init__(self, payload: Tensor) -> None:
        self._payload = payload
        self._host: Tensor | None = None
        self._arrival: torch.cuda.Event | None = None

    def as_found_inf(self, severity: int) -> Tensor:
        """1.0 where the verdict is as severe, else 0.0; float32, shape (), on the device.

        The words set out for the host, to be read later without a wait. Host sync: none.
        """
        if self._payload.is_cuda:
            self._host = torch.empty_like(self._payload, device="cpu", pin_memory=True)
            self._host.copy_(self._payload, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
            self._arrival.record()
        return (self._payload[0] >= severity).to(torch.float32)

    def read(self) -> tuple[Severity, bool, int]:
        """Severity, whether any rank ran a backward, and the largest share. Host sync: one read."""
        if self._arrival is not None:
            self._arrival.synchronize()
        worst, most = (self._payload if self._host is None else self._host).tolist()
        return Severity(worst), bool(most >> _SHARE_BITS), most & ((1 << _SHARE_BITS) - 1)
