"""``hold_batches="host"``: what cannot be copied to pinned memory is kept where it is, and said once."""

from __future__ import annotations

import logging

import pytest
import torch

from ddp_nanguard.capture import host_copies
from ddp_nanguard.capture.window import AccumulationWindow


def test_what_has_no_pinned_copy_is_kept_by_reference_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A meta tensor stands for one of a device without pinned memory; this machine may have no accelerator at all."""
    host_copies._say_once.cache_clear()
    window = AccumulationWindow(torch.device("cpu"), copy_batch=False, hold="host")
    dense = torch.empty(2, device="meta")
    sparse = torch.sparse_coo_tensor(size=(2, 2), device="meta", check_invariants=False)
    on_host = torch.ones(2)
    with caplog.at_level(logging.WARNING, "ddp_nanguard"):
        for _ in range(3):
            kept = window.begin_micro_batch({"sparse": sparse, "dense": dense, "host": on_host}).batch
    assert kept["sparse"] is sparse and kept["host"] is on_host
    told = [record.getMessage() for record in caplog.records]
    assert len([text for text in told if "sparse_coo meta tensor stays where it is" in text]) == 1
    assert len(told) <= 2 and all("hold_batches='host'" in text for text in told)
