"""Memory that nobody wrote is told by what it holds: pointers, integers and texts, read as numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_nanguard import NanGuard, NonFiniteError
from ddp_nanguard.dump import open_dump
from ddp_nanguard.tensors.unwritten import unwritten_signs

POINTERS = torch.arange(0x7F12_3456_7890, 0x7F12_3456_7890 + 64 * 0x1357_9BD0, 0x1357_9BD0, dtype=torch.int64)
INTEGERS = torch.arange(1, 65, dtype=torch.int64)
TEXT = torch.frombuffer(bytearray(b"\0\0weight_norm.original0\xff\xff\xff\x7f\x01\xff\xff\x7f" * 8), dtype=torch.uint8)


def memory(held: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Tensor:
    found = held.contiguous().view(torch.uint8).view(dtype)
    return found.clone() if shape is None else found.repeat(64)[: torch.Size(shape).numel()].reshape(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("held", [POINTERS, INTEGERS], ids=["pointers", "integers"])
def test_pointers_and_integers_are_no_weights(held: Tensor, dtype: torch.dtype) -> None:
    assert "magnitudes from " in (unwritten_signs(memory(held, dtype)) or "")


def test_no_operator_makes_nan_of_many_bit_patterns() -> None:
    bits = torch.tensor([0x7F800001, 0x7FC12345, 0x3F800000, -1], dtype=torch.int32)
    assert unwritten_signs(bits.view(torch.float32)) == "NaN of 3 bit patterns"
    assert "bit patterns" in (unwritten_signs(memory(TEXT, torch.float32)) or "")


def _bad(tensor: Tensor) -> Tensor:
    tensor.view(-1)[::7] = torch.nan
    tensor.view(-1)[1::7] = -torch.tensor(torch.nan, dtype=tensor.dtype)  # the other sign, as x86 makes it
    return tensor


@pytest.mark.parametrize(
    "written",
    [
        _bad(torch.randn(4096)),
        _bad(torch.randn(4096, dtype=torch.float16) * 1e-4),  # denormals there, as ever
        _bad(torch.ones(64)),
        _bad(torch.zeros(64)),
        _bad(torch.randn(4096) * 10.0 ** torch.arange(4096).remainder(30)),  # diverged
        _bad(torch.randn(4096) * 10.0 ** -torch.arange(4096).remainder(42)),  # decayed, denormals included
        torch.full((64,), torch.nan),
        torch.full((8, 8), -torch.inf).triu(1),
        torch.full((64,), torch.finfo(torch.float32).min),
        torch.zeros(0),
        torch.arange(8),
        torch.full((64,), -1, dtype=torch.int32).view(torch.float32),  # NaN as devices make it
    ],
    ids=["normal", "half", "ones", "zeros", "diverged", "decayed", "nan", "mask", "least", "empty", "integers", "ff"],
)
def test_what_was_written_is_not_called_unwritten(written: Tensor) -> None:
    assert unwritten_signs(written) is None


def _cause(model: nn.Module, dump_dir: Any = None, first_step: int = 0) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NanGuard(model, optimizer, dump_dir=dump_dir, first_step=first_step) as guard:
        guard(torch.randn(2, 8)).sum().backward()
        with pytest.raises(NonFiniteError) as caught:
            optimizer.step()
    return caught.value.report.cause


def _model(**held: Tensor) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    for name, values in held.items():
        index, kind = name.split("_")
        model.get_parameter(f"{index[1:]}.{kind}").data.copy_(values)
    return model


def test_the_reason_names_what_an_initialisation_did_not_reach(tmp_path: Path) -> None:
    garbage = memory(TEXT, torch.float32, (8, 8))
    cause = _cause(_model(l0_bias=memory(POINTERS, torch.float32)[:8], l2_weight=garbage), tmp_path)
    assert cause.startswith("state: 2.weight held NaN before any training; it looks like memory that nobody wrote (NaN")
    assert ", and so do 1 more of this rank's 6 parameters and buffers: 0.bias (does an initialisation" in cause
    assert open_dump(tmp_path / "step-00000000").report.cause == cause


def test_finite_memory_that_overflows_is_named_too() -> None:
    held = memory(POINTERS, torch.float32, (8, 8)).nan_to_num(0.0, 0.0, 0.0)
    cause = _cause(_model(l0_weight=held.abs() + 3e38))
    assert not cause.count("nobody wrote")  # huge alone is no sign
    cause = _cause(_model(l0_weight=torch.where(held.abs() > 1e3, 3e38, held)))
    assert "; 0.weight looks like memory that nobody wrote (magnitudes from " in cause


def test_bad_weights_are_called_no_more_than_bad() -> None:
    bad = _bad(torch.randn(8, 8))
    assert _cause(_model(l2_weight=bad)) == "state: 2.weight held NaN before any training"


def test_an_overflow_in_the_step_is_not_the_reason_of_weights_that_were_bad_before() -> None:
    """A layer that overflows by itself comes before the one with bad weights: each is a fault of its own."""
    cause = _cause(_model(l0_weight=torch.full((8, 8), 3e38), l2_weight=_bad(torch.randn(8, 8))))
    assert cause == "state: 2.weight held NaN before any training"
