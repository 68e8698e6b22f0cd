"""Records in one rank's JSON files, and in ``writer.json`` and ``state.json``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddp_nanguard.report.types import Kind, Natural, Phase, Rank, Shape, Site

from .names import FileEntry
from .records import SCHEMA_VERSION, Line, Settings
from .typed_json import as_json, read_fields


@dataclass(frozen=True)
class Device:
    """The device of a rank.

    Attributes:
        type: ``cpu``, ``cuda``, ...
        index: of a GPU on its host; None for others.
        name: of a GPU, such as ``NVIDIA H200``; None for others.
        uuid: of a GPU, which identifies the device itself; None for others.
    """

    type: str
    index: Natural | None = None
    name: str | None = None
    uuid: str | None = None


@dataclass(frozen=True)
class CompiledLayers:
    """Modules inside code of torch.compile.

    Attributes:
        traced: all of them.
        watched: those of them that carry hooks.
    """

    traced: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()


@dataclass(frozen=True)
class InjectedFault:
    """A fault injected on purpose by `ddp_nanguard.testing.inject`; a replay injects it again.

    Attributes:
        rank, step, phase, layer, kind, micro_batch: as `ddp_nanguard.testing.inject` takes them.
    """

    rank: Rank
    step: Natural
    phase: Phase
    layer: str | None
    kind: Kind
    micro_batch: Natural


@dataclass(frozen=True)
class RankEvidence:
    """``rank-*/evidence.json``: what one rank observed and was configured with, without its batches and weights.

    Attributes:
        rank: global.
        step: of the fault.
        settings: of torch, on this rank.
        host: name of its machine.
        device: where the rank computed.
        sites: non-finite values found on this rank, earliest first.
        compiled_layers: modules in compiled code.
        known_nonfinite: layer, slot and kind of values that were non-finite in clean steps too.
        reduced_micro_batches: micro-batches after which gradients were communicated.
        hyper_parameters: numbers of this rank's optimizer groups, under names such as ``g0.lr``.
        eval_modules: modules in evaluation mode.
        frozen_parameters: parameters that require no gradient.
        nonfinite_state: names of non-finite parameters, buffers and optimizer state.
        unchecked: what was not inspected, in words.
        injected: faults that were injected on this rank.
        dtypes: of the parameters, by clean name.
        scaler: state of the GradScaler; None without one.
        notes: parts of the batches that could not be kept as they were.
    """

    rank: Rank
    step: Natural
    settings: Settings
    host: str
    device: Device
    sites: tuple[Site, ...] = ()
    compiled_layers: CompiledLayers = CompiledLayers()
    known_nonfinite: tuple[tuple[str, str, str], ...] = ()
    reduced_micro_batches: tuple[Natural, ...] = ()
    hyper_parameters: dict[str, float] = field(default_factory=dict)
    eval_modules: tuple[str, ...] = ()
    frozen_parameters: tuple[str, ...] = ()
    nonfinite_state: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    injected: tuple[InjectedFault, ...] = ()
    dtypes: dict[str, str] = field(default_factory=dict)
    scaler: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON-ready data, the inverse of `from_dict`."""
        return {name: as_json(value) for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RankEvidence:
        """Read the record from parsed JSON, the inverse of `to_dict`.

        Raises:
            ValueError: names the first field that is missing or does not fit, its value and the valid ones.
        """
        return cls(**read_fields(cls, data))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in ``state/`` or ``own.safetensors``.

    Attributes:
        dtype: in the model; dtypes that safetensors lacks are stored as integers.
        true_shape: in the model.
        stored_shape: in the files, over all shards; FSDP1 stores flat parameters.
    """

    dtype: str
    true_shape: Shape
    stored_shape: Shape


@dataclass(frozen=True)
class RankFileList:
    """``rank-*/files.json``: the last file that a rank writes.

    Attributes:
        rank: global.
        run_id: as in the manifest.
        shard_index, replica_index: ranks with equal shard_index hold the same bytes.
        problems: files that this rank could not write, one line each.
        files: files that it wrote, those of ``state/`` included.
        tensors: tensors of which it holds a part, by name.
    """

    rank: Rank
    run_id: str
    shard_index: Natural
    replica_index: Natural
    problems: tuple[Line, ...]
    files: tuple[FileEntry, ...]
    tensors: dict[str, StoredTensor]

    def to_dict(self) -> dict[str, Any]:
        """All fields and the schema version as JSON-ready data, the inverse of `from_dict`."""
        return {"schema_version": SCHEMA_VERSION, **{name: as_json(value) for name, value in vars(self).items()}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RankFileList:
        """Read the record from parsed JSON, the inverse of `to_dict`; errors as `RankEvidence.from_dict`."""
        return cls(**read_fields(cls, data))


@dataclass(frozen=True)
class Writer:
    """``writer.json``: the process that created a dump directory.

    Attributes:
        host: name of the machine.
        pid: of the process.
        time: in seconds since 1970.
        nonce: the same on all ranks that write this dump; by it they recognise the directory as theirs.
    """

    host: str
    pid: Natural
    time: float
    nonce: str


@dataclass(frozen=True)
class InlineTensor:
    """A small tensor within ``state.json``.

    Attributes:
        dtype: without ``torch.``.
        shape: of the tensor.
        base64: its bytes in row-major order.
    """

    dtype: str
    shape: Shape
    base64: str


@dataclass(frozen=True)
class PlainState:
    """``state.json``: the state of optimizers, scaler and registered objects that is not in ``state/``.

    Attributes:
        structure: as `ddp_nanguard.dump.batch_codec.pack` gives it.
        tensors: the small tensors in it.
        notes: what could not be kept as it was.
    """

    structure: Any
    tensors: dict[str, InlineTensor]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON-ready data; the structure, which is JSON-ready already, unchanged."""
        return {"structure": self.structure, "tensors": as_json(self.tensors), "notes": as_json(self.notes)}


@dataclass(frozen=True)
class WindowContent:
    """``rank-*/window.json``: structures of `ddp_nanguard.dump.batch_codec.pack`.

    Their tensors are in ``window.safetensors``.

    Attributes:
        micro_batches: of the step, with the fields of `ddp_nanguard.capture.window.MicroBatch`.
        buffers: from before the step, by name.
        special: tensors that are not dense, by name.
    """

    micro_batches: Any
    buffers: Any
    special: Any


@dataclass(frozen=True)
class ParameterGroup:
    """The part of an optimizer's parameter group that every optimizer has.

    Attributes:
        params: names of its parameters.
    """

    params: list[str]


@dataclass(frozen=True)
class OptimizerState:
    """The part of an optimizer in an unpacked ``state.json`` that every optimizer has, beside its ``class``.

    Attributes:
        groups: in the optimizer's order.
        state: per parameter, the state that is not a tensor.
    """

    groups: list[ParameterGroup]
    state: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class UnpackedState:
    """The fields of an unpacked ``state.json``.

    Attributes:
        optimizers: those of the guard, in its order.
        scaler: state of the GradScaler; None without one.
        registered: states of objects given to ``guard.register``, by name.
    """

    optimizers: list[OptimizerState]
    scaler: dict[str, Any] | None
    registered: dict[str, Any]
