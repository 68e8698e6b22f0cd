"""`TensorShard`: the part of one stored tensor that a rank holds. What wrappers cut and dumps write."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorShard:
    """The part of one stored tensor that this rank holds.

    Attributes:
        name: ``model.<parameter>`` or ``optim.<index>.<parameter>.<key>``.
        tensor: local, plain and dense, on any device; a 0-dim tensor comes as shape (1,).
        stored_shape: global shape in which it is stored: the true one, or (numel,) where shards are flat ranges.
        offsets: where ``tensor`` lies within ``stored_shape``.
        true_shape: shape after loading.
    """

    name: str
    tensor: torch.Tensor
    stored_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    true_shape: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> TensorShard:
        """A tensor that this rank holds entirely."""
        stored = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
        return cls(name, stored, tuple(stored.shape), (0,) * stored.dim(), tuple(tensor.shape))
