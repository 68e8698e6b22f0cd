"""The accelerator of this process, of whatever kind."""

from __future__ import annotations

import torch


def accelerator() -> torch.device | None:
    """The current device of the kind of accelerator that this machine has; None where it has none."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return None if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())
