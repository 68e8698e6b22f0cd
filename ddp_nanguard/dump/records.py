"""`Manifest`: the record in ``manifest.json``, and the version of the dump format.

A record is read completely or not at all: every field must be present and fit its type and the `Rule` beside it.
Adding, renaming or dropping a field of a record, of a report or of the options needs a new `SCHEMA_VERSION` and a new
dump in ``tests/golden``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from ddp_nanguard.config import GuardConfig
from ddp_nanguard.errors import DumpError
from ddp_nanguard.report.command_text import script_text
from ddp_nanguard.report.text import replay_lacks
from ddp_nanguard.report.types import FaultReport, Natural, Rank, Rule, Shape

from .json_files import AGAIN, MAX_JSON_BYTES, read_json
from .names import FileEntry
from .typed_json import MisfitError, as_json, read_as, read_fields

SCHEMA_VERSION = 2
"""Version of the files of a dump. Version 1, before any release, had records that were not checked."""

MAX_THREADS = 4096
"""More than the cores of any machine. Without a bound torch would start as many threads as a forged file names."""

NumThreads = Annotated[
    int, Rule(lambda count: 1 <= count <= MAX_THREADS, f"a number of threads from 1 to {MAX_THREADS}")
]

Line = Annotated[str, Rule(lambda text: len(text.splitlines()) <= 1, "one line of text")]
"""A text that error messages repeat, which are one line themselves."""

Word = Annotated[str, Rule(str.isprintable, "printable text")]
"""A word of a command that is shown to be copied."""

LauncherNumber = Annotated[
    str, Rule(lambda text: text == "set" or (text.isdigit() and 0 < int(text) < 2**31), "a number of ranks, or set")
]

_R = TypeVar("_R")


@dataclass(frozen=True)
class TensorShape:
    """Shape and dtype of a parameter or an optimizer state tensor in the model.

    Attributes:
        shape: of the whole tensor, over all shards.
        dtype: ``float32``, ``bfloat16``, ...
    """

    shape: Shape
    dtype: str


@dataclass(frozen=True)
class Weights:
    """Whether the dump holds the weights.

    Attributes:
        complete: all ranks together have written all of ``state/``.
        problem: why not, or "not asked for"; None where it is complete.
    """

    complete: bool
    problem: Line | None


@dataclass(frozen=True)
class Run:
    """The run that wrote the dump.

    Attributes:
        id: the same on all ranks of a run and on no others; it identifies parts of one dump on several nodes.
        argv: its command line, as the script saw it.
        recipe_directory: where the module of the recipe lay; None without a recipe.
        command: program and arguments that start the script again; empty where none do.
        directory: the working directory.
        launcher: numbers that the launcher had set, and ``TORCHELASTIC_RUN_ID`` where it was torchrun; from a fixed
            list of names.
    """

    id: str = ""
    argv: tuple[str, ...] = ()
    recipe_directory: str | None = None
    command: tuple[Word, ...] = ()
    directory: str = ""
    launcher: dict[str, LauncherNumber] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """Settings of torch that decide bits, as `torch.get_num_threads` and similar functions return them.

    Attributes:
        float32_matmul_precision: None where torch has no answer, because it was set per backend.
        backends: of `capture.backends.backend_settings`.
        environment: of `capture.backends.ENVIRONMENT`, those that were set.
    """

    num_threads: NumThreads
    num_interop_threads: NumThreads
    float32_matmul_precision: Literal["highest", "high", "medium"] | None
    deterministic_algorithms: bool
    deterministic_warn_only: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    default_dtype: str
    backends: dict[str, bool | Line]
    environment: dict[str, Word]


@dataclass(frozen=True)
class WrapperDescription:
    """The result of `Wrapper.describe`, from which `wrap_like` wraps an equal module again.

    Attributes:
        kind: of the wrapper.
        compiled: whether any part of the model was compiled by torch.compile.
        details: all of it, including the fields that only this kind of wrapper has.
    """

    kind: Literal["plain", "ddp", "fsdp1", "fsdp2"]
    compiled: bool
    details: dict[str, Any]

    JSON_FORMS: ClassVar[dict[str, Any]] = {"details": None}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> WrapperDescription:
        """Make the record from the result of `Wrapper.describe`."""
        return cls(data["kind"], data["compiled"], data)

    def to_dict(self) -> dict[str, Any]:
        """The result of `Wrapper.describe`, the inverse of `from_dict`."""
        return self.details


@dataclass(frozen=True)
class Manifest:
    """``manifest.json``: the fault, the contents of the dump, and what is needed to run the step again.

    Attributes:
        report: of the fault; its fields are beside the others in the JSON.
        created: ISO 8601 with the offset from UTC.
        run: the run that wrote the dump.
        wrapper_description: how the model was wrapped.
        options: of the guard.
        recipe: ``module:function`` of the user; None where none was given.
        versions: of ``ddp_nanguard``, ``torch``, ``numpy``, ``python``, ``platform``, ``cuda``; of ``cudnn``, ``nccl``
            and ``driver`` where there are; and the ``byteorder``.
        settings: of torch, on the rank that wrote the manifest.
        aliases: further names of tied tensors, each with the name under which it is stored.
        shapes: of all weights and optimizer tensors, by stored name, also of those of which this rank holds no part.
        ranks_present: ranks whose files were in this directory when the manifest was written.
        alone: the ranks wrote without each other, each its own weights.
        weights: whether the dump holds them.
        problems: files that could not be written, one line each.
        replicas_disagree: ``rank 1: model.w`` for replicated tensors that differ from replica 0's.
        size_bytes: total of the listed files.
        files: all but the manifest, each with its length and digest.
    """

    report: FaultReport
    created: str
    run: Run
    wrapper_description: WrapperDescription
    options: GuardConfig
    recipe: str | None
    versions: dict[str, str]
    settings: Settings
    aliases: dict[str, str]
    shapes: dict[str, TensorShape]
    ranks_present: tuple[Rank, ...] = ()
    alone: bool = False
    weights: Weights = Weights(True, None)
    problems: tuple[Line, ...] = ()
    replicas_disagree: tuple[str, ...] = ()
    size_bytes: Natural = 0
    files: tuple[FileEntry, ...] = ()

    JSON_FORMS: ClassVar[dict[str, Any]] = {"report": None}

    @property
    def has_weights(self) -> bool:
        """Whether all weights were written, by all ranks together or by each for itself."""
        return self.weights.complete or self.alone

    @property
    def replay_lacks(self) -> str | None:
        """What the training must be given so that its dumps can be replayed; None where nothing is missing."""
        options = self.options
        return replay_lacks(self.recipe, self.script, redact=options.redact, dump_weights=options.dump_weights)

    @property
    def script(self) -> str:
        """The command that a replay runs, in a shell's words; "" where a recipe makes it needless."""
        return script_text(self.run.command) if self.recipe is None else ""

    @property
    def weights_problem(self) -> str | None:
        """Why the weights are missing or incomplete; None where they are complete."""
        return self.weights.problem

    def to_dict(self) -> dict[str, Any]:
        """All fields and the schema version as JSON-ready data; the report's fields beside the others."""
        own = {field.name: as_json(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return {"schema_version": SCHEMA_VERSION, **own.pop("report"), **own}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Manifest:
        """Read the manifest of the present version from parsed JSON, the inverse of `to_dict`.

        Raises:
            ValueError: names the first field that is missing or does not fit, its value and the valid ones.
        """
        report: FaultReport = read_as(FaultReport, data)
        manifest = cls(report=report, **read_fields(cls, data))
        _check_ranks(report)
        _check_options(manifest.options)
        return manifest


def _check_ranks(report: FaultReport) -> None:
    ranks = {f"sites[{index}].rank": site.rank for index, site in enumerate(report.sites)}
    ranks |= {f"holders[{index}]": rank for index, rank in enumerate(report.holders)}
    ranks |= {f"ranks_affected.first[{index}]": rank for index, rank in enumerate(report.ranks_affected)}
    ranks["origin.rank"] = report.origin.rank if report.origin is not None else None
    for path, rank in ranks.items():
        if rank is not None and rank >= report.world_size:
            raise MisfitError(path, str(rank), f"a rank below world_size={report.world_size}")


def _check_options(options: GuardConfig) -> None:
    try:
        options.check()
    except ValueError as error:
        raise MisfitError("options", "refused", f"what NanGuard takes ({str(error).splitlines()[0][:200]})") from None


# -- reading -----------------------------------------------------------------------------------------------------------


def read_record(root: Path, path: str, kind: type[_R], max_bytes: int = MAX_JSON_BYTES) -> _R:
    """Read a record from a JSON file of a dump.

    Args:
        root: the dump, or a rank's directory.
        path: of the file in it.
        kind: dataclass of the record.
        max_bytes: longer files are refused without being read.

    Raises:
        DumpError: names the file, the field, its value and what is valid.
    """
    return record_of(root / path, read_json(root, path, max_bytes), kind)


def read_versioned(root: Path, path: str, kind: type[_R], max_bytes: int = MAX_JSON_BYTES) -> _R:
    """`read_record` for a file with a ``schema_version``, which must be the present one."""
    data = read_json(root, path, max_bytes)
    _check_version(root / path, data)
    return record_of(root / path, data, kind)


def record_of(file: Path, value: Any, kind: type[_R], path: str = "") -> _R:
    """Make a record of data that was read from a file.

    Args:
        file: where the data is from, for errors.
        value: the parsed data.
        kind: dataclass of the record, or any type that `typed_json.read_as` takes.
        path: keys that lead to the data within the file, for errors.

    Raises:
        DumpError: names the file, the field, its value and what is valid.
    """
    try:
        from_dict = getattr(kind, "from_dict", None)
        record: _R = read_as(kind, value, path) if from_dict is None else from_dict(value)
    except MisfitError as misfit:
        raise DumpError(f"{file}: {misfit}; {AGAIN}") from None
    return record


def _check_version(file: Path, data: dict[str, Any]) -> None:
    version = data.get("schema_version")
    if type(version) is not int or version < 1:
        raise DumpError(f"{file} has no schema_version; this is no dump of ddp-nanguard")
    if version == SCHEMA_VERSION:
        return
    remedy = "upgrade ddp-nanguard" if version > SCHEMA_VERSION else "read it with the ddp-nanguard that wrote it"
    raise DumpError(f"{file} has schema version {version}, this ddp-nanguard reads version {SCHEMA_VERSION}; {remedy}")
