"""``manifest.json``, ``report.txt`` and ``state.json``: what one rank writes for all that share a directory."""

from __future__ import annotations

import base64
import dataclasses
import importlib.metadata
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_nanguard.errors import DumpError
from ddp_nanguard.report.text import report_text

from .batch_codec import pack, unpack
from .format import (
    FILES_JSON,
    MANIFEST,
    REPORT,
    STATE_JSON,
    FileEntry,
    dtype_name,
    dtype_of,
    host_blocks,
    list_file,
    rank_name,
    ranks_in,
    read_json,
    restored,
    write_json,
    write_text,
)
from .request import DumpRequest


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the writing went, over all ranks.

    Attributes:
        alone: whether the ranks wrote without each other.
        weights_problem: why ``state/`` is missing or incomplete; None if it is whole.
        problems, replicas_disagree: as in `DumpResult`.
    """

    alone: bool
    weights_problem: str | None
    problems: list[str]
    replicas_disagree: list[str]


def write_shared_files(request: DumpRequest, dump: Path, final: Path, outcome: Outcome) -> None:
    """Writes state.json, report.txt and, last and in one step, the manifest.

    Args:
        request: of the writing rank.
        dump: the directory.
        final: what it will be called.
        outcome: of all ranks.
    """
    notes = request.report.notes + tuple(f"replicas disagree: {line}" for line in outcome.replicas_disagree)
    report = dataclasses.replace(request.report, dump_path=str(final), notes=notes)
    files = [] if outcome.alone else _rank_entries(dump)
    files.append(write_json(dump, STATE_JSON, _plain_state(request.plain_state)))
    manifest = {**report.to_dict(), **_description(request, dump, outcome)}
    manifest["size_bytes"] = sum(entry.size_bytes for entry in files)
    files.append(write_text(dump, REPORT, report_text(report, manifest)))
    manifest["files"] = [entry.to_dict() for entry in files]
    write_json(dump, f".{MANIFEST}", manifest)
    (dump / f".{MANIFEST}").rename(dump / MANIFEST)


def _rank_entries(dump: Path) -> list[FileEntry]:
    entries = []
    for rank in ranks_in(dump):
        path = f"{rank_name(rank)}/{FILES_JSON}"
        try:
            entries += [FileEntry(**entry) for entry in read_json(dump, path)["files"]]
            entries.append(list_file(dump, path))
        except (DumpError, OSError):
            continue  # the reader says which rank has no list
    return entries


def _description(request: DumpRequest, dump: Path, outcome: Outcome) -> dict[str, Any]:
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "run": {"id": request.run_id, **request.run},
        "mesh": request.mesh,
        "wrapper_description": request.wrapper,
        "options": request.config.to_dict(),
        "recipe": request.recipe,
        "versions": versions(),
        "settings": settings(),
        "aliases": request.aliases,
        "shapes": request.shapes,
        "ranks_present": ranks_in(dump),
        "alone": outcome.alone,
        "weights": {"complete": outcome.weights_problem is None, "problem": outcome.weights_problem},
        "problems": outcome.problems,
        "replicas_disagree": outcome.replicas_disagree,
    }


def versions() -> dict[str, str]:
    """Versions that decide whether a replay can be the same."""
    try:
        own = importlib.metadata.version("ddp-nanguard")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    found = {"ddp_nanguard": own, "torch": str(torch.__version__), "numpy": np.__version__}
    found |= {"python": platform.python_version(), "platform": platform.platform()}
    return {**found, "cuda": str(torch.version.cuda), "byteorder": sys.byteorder}


def settings() -> dict[str, Any]:
    """Settings of torch that decide bits."""
    return {
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "default_dtype": dtype_name(torch.get_default_dtype()),
    }


def _plain_state(value: Any) -> dict[str, Any]:
    """Tensors in it are few and small, so they go into the JSON as bytes."""
    packed = pack(value)
    return {
        "structure": packed.structure,
        "tensors": {name: _inline(tensor) for name, tensor in packed.tensors.items()},
        "notes": packed.notes,
    }


def _inline(tensor: torch.Tensor) -> dict[str, Any]:
    data = b"".join(host_blocks(tensor))
    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "base64": base64.b64encode(data).decode()}


def read_plain_state(data: dict[str, Any]) -> Any:
    """The inverse of what goes into ``state.json``."""
    return unpack(data["structure"], {name: _outline(node) for name, node in data["tensors"].items()})


def _outline(node: dict[str, Any]) -> torch.Tensor:
    data = torch.tensor(list(base64.b64decode(node["base64"])), dtype=torch.uint8)
    return restored(data, dtype_of(node["dtype"])).reshape(node["shape"])
