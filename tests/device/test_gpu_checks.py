"""The checks of ``benchmarks/gpu.py --check``, on a device where they can fail for no reason but their own."""

from __future__ import annotations

from typing import Any

from tests.ranks import run_ranks


def _checked(rank: int, world_size: int) -> dict[str, Any]:
    from benchmarks import gpu_checks

    # the last one leaves a stream that never ends
    names = ("host waits", "nan table", "captured block", "alone beside a stuck stream")
    return {name: gpu_checks.CHECKS[name][0]() for name in names}


def test_every_check_passes(simulated: str) -> None:
    (found,) = run_ranks(_checked, 1, 60, device=simulated, process_group=False)
    assert {name: each["ok"] for name, each in found.items()} == dict.fromkeys(found, True), found
