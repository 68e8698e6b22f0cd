"""``manifest.json``, ``report.txt`` and ``state.json``: files that one rank writes for all that share a directory."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_nanguard.capture.backends import backend_settings, environment, matmul_precision
from ddp_nanguard.errors import DumpError
from ddp_nanguard.report.text import report_text
from ddp_nanguard.report.types import FaultReport
from ddp_nanguard.tensors.dtypes import dtype_name

from .files import list_file, write_json, write_text
from .json_files import MAX_CONTENT_BYTES, well_formed
from .names import FILES_JSON, MANIFEST, REPORT, STATE_JSON, FileEntry, rank_name, ranks_in
from .plain_state import packed_state, unpacked_state
from .rank_records import Device, PlainState, RankFileList, UnpackedState
from .records import Manifest, Run, Settings, Weights, read_record, read_versioned, record_of
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
    """Write state.json, report.txt and, last and in one step, the manifest.

    Args:
        request: of the writing rank.
        dump: the directory.
        final: its name once it is finished.
        outcome: of all ranks.
    """
    notes = request.report.notes + tuple(f"replicas disagree: {line}" for line in outcome.replicas_disagree)
    report = dataclasses.replace(request.report, dump_path=str(final), notes=notes)
    files = [] if outcome.alone else _rank_entries(dump)
    files.append(write_json(dump, STATE_JSON, packed_state(request.plain_state).to_dict()))
    manifest = dataclasses.replace(
        manifest_of(request),
        report=report,
        ranks_present=tuple(ranks_in(dump)),
        alone=outcome.alone,
        weights=Weights(outcome.weights_problem is None, outcome.weights_problem),
        problems=tuple(outcome.problems),
        replicas_disagree=tuple(outcome.replicas_disagree),
        size_bytes=sum(entry.size_bytes for entry in files),
    )
    _write_manifest(dump, dataclasses.replace(manifest, files=tuple(files)))


def amend_report(dump: Path, report: FaultReport, rank: int) -> None:
    """Replace the report of a whole dump, in its manifest and in its text; a reader finds the old one or the new.

    Args:
        dump: the directory.
        report: of the same fault; path and notes stay those of the dump.
        rank: that amends it: several may at once, where they have lost each other.

    Raises:
        DumpError, OSError: the manifest cannot be read or written; it is the old one then.
    """
    manifest = read_versioned(dump, MANIFEST, Manifest)
    then = manifest.report
    notes = tuple(dict.fromkeys((*then.notes, *report.notes)))
    report = dataclasses.replace(report, dump_path=then.dump_path, notes=notes)
    _write_manifest(dump, dataclasses.replace(manifest, report=report), f".{rank}-")


def _write_manifest(dump: Path, manifest: Manifest, hidden: str = ".") -> None:
    """The text for people, then the manifest, which marks a dump as whole; each renamed, so that no reader finds half.

    The text is not among the files with a checksum: it says nothing that the manifest does not.
    """
    write_text(dump, f"{hidden}{REPORT}", report_text(manifest.report, manifest))
    write_json(dump, f"{hidden}{MANIFEST}", manifest.to_dict())
    for name in (REPORT, MANIFEST):
        (dump / f"{hidden}{name}").rename(dump / name)


def _rank_entries(dump: Path) -> list[FileEntry]:
    entries: list[FileEntry] = []
    for rank in ranks_in(dump):
        path = f"{rank_name(rank)}/{FILES_JSON}"
        try:
            entries += read_versioned(dump, path, RankFileList, MAX_CONTENT_BYTES).files
            entries.append(list_file(dump, path))
        except (DumpError, OSError):
            continue  # the reader says which rank has no list
    return entries


def manifest_of(request: DumpRequest) -> Manifest:
    """The manifest as far as a rank knows it before anything is written."""
    return Manifest(
        report=request.report,
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        run=_run(request),
        wrapper_description=request.wrapper,
        options=request.config,
        recipe=request.recipe,
        versions=versions(),
        settings=settings(),
        aliases=request.aliases,
        shapes=request.shapes,
    )


def _run(request: DumpRequest) -> Run:
    return Run(
        id=request.run_id,
        argv=tuple(request.argv),
        recipe_directory=request.recipe_directory,
        command=tuple(request.command),
        directory=request.directory,
        launcher=dict(request.launcher),
    )


def versions() -> dict[str, str]:
    """Versions of software and platform that decide whether a replay can give the same bits."""
    try:
        own = importlib.metadata.version("ddp-nanguard")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    found = {"ddp_nanguard": own, "torch": str(torch.__version__), "numpy": np.__version__}
    found |= {"python": platform.python_version(), "platform": platform.platform()}
    return {**found, "cuda": str(torch.version.cuda), **_device_versions(), "byteorder": sys.byteorder}


def _device_versions() -> dict[str, str]:
    """Of the libraries of an NVIDIA GPU; a missing one, or one that cannot be asked any more, is left out."""
    questions: dict[str, Callable[[], Any]] = {
        "cudnn": torch.backends.cudnn.version,
        "nccl": lambda: ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]  # torch's own
        "driver": lambda: Path("/proc/driver/nvidia/version").read_text().splitlines()[0],
    }
    found = {}
    for name, ask in questions.items():
        with contextlib.suppress(Exception):
            found[name] = str(ask() or "")
    return {name: version for name, version in found.items() if version}


def settings() -> Settings:
    """The present settings of torch in this process that decide bits."""
    return Settings(
        num_threads=torch.get_num_threads(),
        num_interop_threads=torch.get_num_interop_threads(),
        float32_matmul_precision=matmul_precision(),
        deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
        deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn_deterministic=torch.backends.cudnn.deterministic,
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        default_dtype=dtype_name(torch.get_default_dtype()),
        backends=backend_settings(),
        environment=environment(),
    )


def device_of(device: torch.device) -> Device:
    """Type, and of an accelerator its index, and name and uuid as far as it tells them."""
    if device.type in ("cpu", "meta"):
        return Device(device.type)
    properties: Any = None
    with contextlib.suppress(Exception):  # a device that has failed may answer nothing any more
        properties = torch.get_device_module(device).get_device_properties(device)
    name, uuid = getattr(properties, "name", None), getattr(properties, "uuid", None)
    return Device(device.type, device.index, name and str(name), uuid and str(uuid))


# -- state.json ------------------------------------------------------------------------------------------------------


def read_plain_state(dump: Path) -> dict[str, Any]:
    """The content of ``state.json``, unpacked; its fields are those of `UnpackedState`.

    Raises:
        DumpError: it is missing or damaged.
    """
    stored = read_record(dump, STATE_JSON, PlainState, MAX_CONTENT_BYTES)
    with well_formed(dump / STATE_JSON):
        state: dict[str, Any] = unpacked_state(stored)
    record_of(dump / STATE_JSON, state, UnpackedState)
    return state
