"""`TensorShard`: the part of one stored tensor that a rank holds. Wrappers cut shards, dumps write them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorShard:
    """The part of one stored tensor that this rank holds.

    Attributes:
        name: ``model.<parameter>`` or ``optim.<index>.<parameter>.<key>``.
        tensor: local, plain and dense, on any device; a 0-dim tensor becomes one of shape (1,).
        stored_shape: global shape under which it is stored: the true one, or (numel,) where shards are flat ranges.
        offsets: position of ``tensor`` within ``stored_shape``.
        true_shape: shape after loading.
    """

    name: str
    tensor: torch.Tensor
    stored_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    true_shape: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> TensorShard:
        """The shard of a tensor that this rank holds entirely."""
        # A shard is addressed by offsets, of which a 0-dim tensor has none.
        stored = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
        return cls(name, stored, tuple(stored.shape), (0,) * stored.dim(), tuple(tensor.shape))
