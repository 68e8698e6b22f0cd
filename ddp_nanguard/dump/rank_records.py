"""What one rank's files say in JSON, and what is said of whoever writes: `RankEvidence`, `RankFileList`, `Writer`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddp_nanguard.report.types import Kind, Natural, Phase, Rank, Shape, Site

from .format import FileEntry
from .records import SCHEMA_VERSION, Line, Settings
from .typed_json import as_json, read_fields


@dataclass(frozen=True)
class Device:
    """Where a rank computed.

    Attributes:
        type: ``cpu``, ``cuda``, ...
        index: of a GPU on its host; None for others.
        name: of a GPU, ``NVIDIA H200``; None for others.
        uuid: of a GPU, by which the very device is found again; None for others.
    """

    type: str
    index: Natural | None = None
    name: str | None = None
    uuid: str | None = None


@dataclass(frozen=True)
class CompiledLayers:
    """Modules that code of torch.compile has to do with.

    Attributes:
        traced: all of them.
        watched: those of them that carry hooks.
    """

    traced: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()


@dataclass(frozen=True)
class InjectedFault:
    """A fault that was planted on purpose, as `ddp_nanguard.testing.inject` takes it: its replay plants it again."""

    rank: Rank
    step: Natural
    phase: Phase
    layer: str | None
    kind: Kind
    micro_batch: Natural


@dataclass(frozen=True)
class RankEvidence:
    """``rank-*/evidence.json``: what one rank saw and had, beyond its batches and its weights.

    Attributes:
        rank: global.
        step: of the fault.
        settings: of torch, on this rank.
        host: its name.
        device: where the rank computed.
        sites: what was seen non-finite here, earliest first.
        budget_level: how finely modules were watched, 0 for all; an index into `ddp_nanguard.probes.budget`'s levels.
        compiled_layers: modules in compiled code.
        known_nonfinite: layer, slot and kind of what was non-finite in clean steps too.
        reduced_micro_batches: micro-batches after which gradients were communicated.
        hyper_parameters: this rank's numbers of the optimizers' groups, ``g0.lr``.
        eval_modules: modules in evaluation mode.
        frozen_parameters: parameters that require no gradient.
        nonfinite_state: names of non-finite parameters, buffers and optimizer state.
        unchecked: what was not looked at, in words.
        injected: faults that were planted here.
        dtypes: of the parameters.
        scaler: state of the GradScaler; None without one.
        notes: what of the batches could not be kept as it was.
        rerun: what the option ``rerun`` showed on this rank, for people; None without it.
    """

    rank: Rank
    step: Natural
    settings: Settings
    host: str
    device: Device
    sites: tuple[Site, ...] = ()
    budget_level: Natural = 0
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
    rerun: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {name: as_json(value) for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RankEvidence:
        """The inverse of `to_dict`.

        Raises:
            ValueError: names the first field that is missing or does not fit, its value and what would.
        """
        return cls(**read_fields(cls, data))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in ``state/`` or ``own.safetensors``.

    Attributes:
        dtype: as the model has it; exotic ones are stored as integers.
        true_shape: as the model has it.
        stored_shape: as it lies in the files, over all shards; FSDP1 stores flat parameters.
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
        problems: what this rank could not write, one line per file.
        files: that it wrote, those of ``state/`` included.
        tensors: of which it holds a part, by name.
    """

    rank: Rank
    run_id: str
    shard_index: Natural
    replica_index: Natural
    problems: tuple[Line, ...]
    files: tuple[FileEntry, ...]
    tensors: dict[str, StoredTensor]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {"schema_version": SCHEMA_VERSION, **{name: as_json(value) for name, value in vars(self).items()}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RankFileList:
        """The inverse of `to_dict`; see `RankEvidence.from_dict`."""
        return cls(**read_fields(cls, data))


@dataclass(frozen=True)
class Writer:
    """``writer.json``: who began a dump directory.

    Attributes:
        host: name of the machine.
        pid: of the process.
        time: in seconds since 1970.
        nonce: by it ranks know the directory as that of their own dump.
    """

    host: str
    pid: Natural
    time: float
    nonce: str


@dataclass(frozen=True)
class InlineTensor:
    """A small tensor within ``state.json``: its bytes in row-major order, in base64."""

    dtype: str
    shape: Shape
    base64: str


@dataclass(frozen=True)
class PlainState:
    """``state.json``: what of optimizers, scaler and registered objects is no tensor of ``state/``.

    Attributes:
        structure: of `ddp_nanguard.dump.pack`.
        tensors: the small ones in it.
        notes: what could not be kept as it was.
    """

    structure: Any
    tensors: dict[str, InlineTensor]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data; the structure is, to the letter."""
        return {"structure": self.structure, "tensors": as_json(self.tensors), "notes": as_json(self.notes)}


@dataclass(frozen=True)
class WindowContent:
    """``rank-*/window.json``: structures of `ddp_nanguard.dump.pack`, whose tensors lie in ``window.safetensors``.

    Attributes:
        micro_batches: of the step, as `ddp_nanguard.window.MicroBatch` has them.
        buffers: from before the step, by name.
        special: tensors that are not dense, by name.
    """

    micro_batches: Any
    buffers: Any
    special: Any


@dataclass(frozen=True)
class ParameterGroup:
    """What every group of an optimizer has; its numbers are the optimizer's own.

    Attributes:
        params: names of its parameters.
    """

    params: list[str]


@dataclass(frozen=True)
class OptimizerState:
    """What every optimizer of an unpacked ``state.json`` has, beside the name of its ``class``.

    Attributes:
        groups: in the optimizer's order.
        state: of each parameter what is no tensor.
    """

    groups: list[ParameterGroup]
    state: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class UnpackedState:
    """What an unpacked ``state.json`` has.

    Attributes:
        optimizers: those of the guard, in its order.
        scaler: state of the GradScaler; None without one.
        registered: states of objects given to ``guard.register``, by name.
    """

    optimizers: list[OptimizerState]
    scaler: dict[str, Any] | None
    registered: dict[str, Any]
