"""Digests of tensors: two are equal exactly where the bytes are, whichever way they are made."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp_nanguard.dump import tensor_digest
from ddp_nanguard.dump.tensor_digest import digest_on_host, digests, word_sum

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)
CHANGES = ("none", "bits", "swap", "roll", "strides", "both signs")


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    size = max(1, torch.Size(shape).numel()) * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    values = torch.randint(0, high, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return values.view(dtype)[: torch.Size(shape).numel()].view(shape)


def _changed(tensor: Tensor, change: str, index: int) -> Tensor:
    if change == "strides":
        return tensor.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
    changed = tensor.clone(memory_format=torch.contiguous_format)
    values = _bytes_of(changed)
    if change == "roll":
        values.copy_(values.roll(tensor.itemsize))
    elif change == "swap" and len(values) > 8:
        first, second = index % len(values), (index * 7 + 8) % len(values)
        values[[first, second]] = values[[second, first]]
    elif change in ("bits", "both signs") and len(values):
        bit = 1 if tensor.dtype is torch.bool else 128
        values[index % len(values)] ^= bit
        if change == "both signs":
            values[(index + 8) % len(values)] ^= bit
    return changed


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    st.sampled_from(CHANGES),
    st.integers(0, 2**16),
    st.sampled_from((16, 64, tensor_digest.PIECE_BYTES)),
)
def test_the_sum_tells_apart_what_differs_and_nothing_else(
    dtype: torch.dtype, shape: tuple[int, ...], change: str, seed: int, piece_bytes: int
) -> None:
    one = _tensor(dtype, shape, seed)
    other = _changed(one, change, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_digest, "PIECE_BYTES", piece_bytes)
        sums = [word_sum(tensor) for tensor in (one, other, other)]
        assert sums[1] == word_sum(other, on_host=True) == sums[2]
    same = torch.equal(_bytes_of(one), _bytes_of(other))
    assert (sums[0] == sums[1]) == same
    assert (digest_on_host(one) == digest_on_host(other)) == same


def test_no_two_of_many_tensors_that_differ_in_few_bits_have_one_sum() -> None:
    """Sign bits alone, two at a time: what a sum with factors, without scattering, tells apart least."""
    words = torch.zeros(64, dtype=torch.float32)
    found = set()
    for first in range(64):
        for second in range(first + 1):
            changed = words.clone()
            changed[first], changed[second] = -0.0, -0.0
            found.add(word_sum(changed))
    assert len(found) == 64 * 65 // 2
    halves = {(word_sum(torch.eye(1, 64)[0] * 2.0**n) & 0xFFFFFFFF) for n in range(-120, 120)}
    assert len(halves) == 240, "the lower half alone tells them apart"


def test_shape_and_dtype_belong_to_a_digest() -> None:
    tensors = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(0), torch.zeros(4)]
    found = digests(tensors)
    assert found[0] == found[-1] and len(set(found)) == 4
