"""Settings of torch's backends that decide bits: read one by one, recorded in dumps, and set again by a replay.

A setting may raise when it is read: ``torch.get_float32_matmul_precision`` does once the precision was set through
``torch.backends.*.fp32_precision``. Another release of torch may have none of that name. Both leave out that one alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, cast

import torch

Value = bool | str

ENVIRONMENT = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "NCCL_ALGO",
    "NCCL_PROTO",
)
"""Variables that libraries read once, and that decide bits."""

_ATTRIBUTES = (
    "fp32_precision",
    "cudnn.fp32_precision",
    "cuda.matmul.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
    "mkldnn.rnn.fp32_precision",
    "cudnn.allow_tf32",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    "cudnn.enabled",
    "mkldnn.enabled",
)
"""Below ``torch.backends``; the general before the special, which the general one would change."""

_FUNCTIONS = (
    ("cuda.flash_sdp_enabled", "cuda.enable_flash_sdp"),
    ("cuda.mem_efficient_sdp_enabled", "cuda.enable_mem_efficient_sdp"),
    ("cuda.math_sdp_enabled", "cuda.enable_math_sdp"),
    ("cuda.cudnn_sdp_enabled", "cuda.enable_cudnn_sdp"),
    ("cuda.fp16_bf16_reduction_math_sdp_allowed", "cuda.allow_fp16_bf16_reduction_math_sdp"),
    ("cuda.preferred_blas_library", "cuda.preferred_blas_library"),
    ("cuda.preferred_linalg_library", "cuda.preferred_linalg_library"),
)
"""Functions that return a setting, and those that set it."""


@dataclass(frozen=True)
class _Setting:
    read: Callable[[], object]
    write: Callable[[Any], object]


def _settings() -> Iterator[tuple[str, _Setting]]:
    for path in _ATTRIBUTES:
        owner, _, name = f"backends.{path}".rpartition(".")
        yield path, _attribute(owner, name)
    for reading, writing in _FUNCTIONS:
        yield reading, _Setting(lambda r=reading: _backend(r)(), lambda value, w=writing: _backend(w)(value))  # type: ignore[misc]


def _attribute(owner: str, name: str) -> _Setting:
    of = attrgetter(owner)
    return _Setting(lambda: getattr(of(torch), name), lambda value: setattr(of(torch), name, value))


def _backend(path: str) -> Any:
    return attrgetter(path)(torch.backends)


def backend_settings() -> dict[str, Value]:
    """Every setting that this torch has, by its name below ``torch.backends``. Host sync: none."""
    found = {}
    for name, setting in _settings():
        with contextlib.suppress(Exception):
            found[name] = _plain(setting.read())
    return found


def set_backend_settings(recorded: dict[str, Value]) -> None:
    """Set what is another here; what this torch refuses stays, and is told by who compares afterwards.

    Args:
        recorded: what `backend_settings` returned, here or in another process.
    """
    for name, setting in _settings():
        with contextlib.suppress(Exception):
            if name in recorded and _plain(setting.read()) != recorded[name]:
                setting.write(recorded[name])


def _plain(value: object) -> Value:
    """True, false or a text: an enum of torch by the name that its setter takes."""
    if isinstance(value, bool | str):
        return value
    return str(getattr(value, "name", value)).lower()


def matmul_precision() -> Literal["highest", "high", "medium"] | None:
    """As `torch.get_float32_matmul_precision`; None where that has no answer, see the module's docstring."""
    try:
        return cast(Literal["highest", "high", "medium"], torch.get_float32_matmul_precision())
    except RuntimeError:
        return None


def environment() -> dict[str, str]:
    """Those of `ENVIRONMENT` that are set and can be shown on a line."""
    return {name: value for name in ENVIRONMENT if (value := os.environ.get(name)) is not None and value.isprintable()}
