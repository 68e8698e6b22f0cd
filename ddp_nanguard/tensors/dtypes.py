"""Dtypes as text and back: the form that manifests, reports and messages hold."""

from __future__ import annotations

from typing import overload

import torch


@overload
def dtype_name(dtype: torch.dtype | torch.layout) -> str: ...
@overload
def dtype_name(dtype: torch.dtype | torch.layout | None) -> str | None: ...
def dtype_name(dtype: torch.dtype | torch.layout | None) -> str | None:
    """The name of a dtype or layout without ``torch.``, such as "bfloat16"; None for None."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


@overload
def dtype_named(name: str) -> torch.dtype: ...
@overload
def dtype_named(name: str | None) -> torch.dtype | None: ...
def dtype_named(name: str | None) -> torch.dtype | None:
    """The dtype of a name such as "bfloat16", the inverse of `dtype_name`; None for None.

    Raises:
        ValueError: this torch has no such dtype.
    """
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"dtype {name!r} is unknown to torch {torch.__version__}; use the torch version of the manifest"
        )
    return dtype
