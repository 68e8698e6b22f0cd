"""Digests of tensors, by which replicas are compared without copying them to each other, or to the host.

[Note: digests made on the device]
A tensor on an accelerator is read there, as 64-bit words: each, together with its position, goes through a bijection of
64 bits that scatters it (that of the generator splitmix64), and the results are summed. One changed word always changes
the sum; for several the odds are 1 to 2**64. Sums of integers do not depend on the order of the additions, so the host
finds the same number where the device has no memory left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .format import bounded_parts, host_blocks
from .thread_map import thread_map

DIGEST_BYTES = 8
PIECE_BYTES = 8 * 2**20
"""Of a tensor at a time. On a device twice as much is taken, and as much again where the tensor has gaps."""
_WORD_BYTES = 8


def _signed(number: int) -> int:
    """The number modulo 2**64, as torch's int64 has it."""
    return (number + 2**63) % 2**64 - 2**63


_STEP = _signed(0x9E3779B97F4A7C15)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))
"""Shift and factor of each round of splitmix64."""


def digests(tensors: Sequence[Tensor]) -> list[bytes]:
    """Digest of the bytes, dtype and shape of each tensor, `DIGEST_BYTES` long.

    Host sync: one per tensor on a device; see [Note: digests made on the device].
    """
    found: dict[int, bytes] = {i: _summed(t) for i, t in enumerate(tensors) if t.device.type != "cpu"}
    on_host = [index for index in range(len(tensors)) if index not in found]
    found |= zip(on_host, thread_map(lambda index: digest_on_host(tensors[index]), on_host), strict=True)
    return [found[index] for index in range(len(tensors))]


def digest_on_host(tensor: Tensor) -> bytes:
    """The digest of a tensor on the CPU. Host sync: one blocking copy per 16 MiB of another."""
    digest = _begun(tensor)
    for block in host_blocks(tensor):
        digest.update(block)
    return digest.digest()


def _begun(tensor: Tensor) -> hashlib.blake2b:
    return hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=DIGEST_BYTES)


def _summed(tensor: Tensor) -> bytes:
    try:
        total = word_sum(tensor)
    except (RuntimeError, NotImplementedError):  # no memory left, or no such operator
        total = word_sum(tensor, on_host=True)
    digest = _begun(tensor)
    digest.update(total.to_bytes(_WORD_BYTES, "little", signed=True))
    return digest.digest()


def word_sum(tensor: Tensor, on_host: bool = False) -> int:
    """The sum of the scattered words of a tensor, which depends on neither its device nor its strides.

    Args:
        tensor: of any dtype, dense.
        on_host: copies the tensor to the host piece by piece and reads it there.

    Host sync: one; with ``on_host`` one per piece.
    """
    sums, position = [], 0
    for part in bounded_parts(tensor.shape, tensor.itemsize, PIECE_BYTES) if tensor.numel() else ():
        piece = tensor[part].detach()
        words = _words(piece.cpu() if on_host else piece)
        sums.append(_scattered(words, position).sum())
        position += words.numel()
    return int(torch.stack(sums).sum()) if sums else 0


def _words(piece: Tensor) -> Tensor:
    """The bytes of a piece in row-major order as int64, a view where that is possible, else filled up with zeros."""
    piece = piece.resolve_conj().resolve_neg().contiguous()
    # not reshape, which leaves a single element any stride it had
    flat = piece.as_strided((piece.numel(),), (1,)).view(torch.uint8)
    if flat.numel() % _WORD_BYTES == 0 and flat.storage_offset() % _WORD_BYTES == 0:
        return flat.view(torch.int64)
    filled = flat.new_zeros(-(-flat.numel() // _WORD_BYTES) * _WORD_BYTES)
    filled[: flat.numel()] = flat
    return filled.view(torch.int64)


def _scattered(words: Tensor, position: int) -> Tensor:
    mixed = torch.arange(words.numel(), dtype=torch.int64, device=words.device)
    mixed.mul_(_STEP).add_(_signed(position * _STEP)).add_(words)
    shifted = torch.empty_like(mixed)
    for shift, factor in _ROUNDS:
        torch.bitwise_right_shift(mixed, shift, out=shifted)
        mixed.bitwise_xor_(shifted.bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
    return mixed
