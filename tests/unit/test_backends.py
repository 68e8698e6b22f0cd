"""Settings of torch's backends: none raises when it is read, and what was recorded is set again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ddp_nanguard.capture.backends import backend_settings, environment, set_backend_settings
from ddp_nanguard.capture.surroundings import surroundings
from ddp_nanguard.dump.manifest import settings, versions


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    before = backend_settings()
    yield
    set_backend_settings(before)
    assert backend_settings() == before


def test_a_precision_set_per_backend_is_recorded_and_raises_nowhere() -> None:
    before = surroundings([])
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    found = settings()
    assert found.float32_matmul_precision is None
    assert found.backends["cuda.matmul.fp32_precision"] == "tf32"
    assert before.different(surroundings([])) == ["cuda.matmul.fp32_precision (none then, tf32 now)"]


def test_all_that_is_recorded_is_set_again() -> None:
    before = backend_settings()
    torch.backends.fp32_precision = "tf32"
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.preferred_linalg_library("magma") if torch.cuda.is_available() else None
    changed = backend_settings()
    assert len([name for name in changed if changed[name] != before[name]]) >= 7
    set_backend_settings(before)
    assert backend_settings() == before
    set_backend_settings(changed)
    assert backend_settings() == changed


def test_what_this_torch_refuses_or_does_not_know_stays() -> None:
    before = backend_settings()
    set_backend_settings({"cuda.matmul.fp32_precision": "fp8", "cuda.of_another_torch": True, "cudnn.enabled": "yes"})
    assert backend_settings() == before


def test_variables_of_libraries_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0\n")
    assert environment() == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def test_a_library_that_is_not_there_has_no_version() -> None:
    assert all(versions().values())
