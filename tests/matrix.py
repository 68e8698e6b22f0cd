"""The matrix of faults as data: which place, on which wrapper, rank and micro-batch, and what every rank must say."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from tests.faults import Fault
from tests.training import WRAPPERS, Job
from tests.training.jobs import STATE_BUFFER, STATE_PARAMETER, UPDATED_PARAMETER

FAULT_STEP = 1


@dataclass(frozen=True)
class Expected:
    """The planted origin, as the report must give it.

    Attributes:
        in_micro_batch: whether the phase belongs to a micro-batch at all.
        has_rank: False for the reduce, which no rank began.
    """

    phase: str
    layer: str | None
    call: int | None
    slot: str
    kind: str = "nan"
    inline_code: tuple[str | None, str | None, str | None] | None = None
    in_micro_batch: bool = True
    has_rank: bool = True


EXPECTED = {
    "input": Expected("input", None, None, '["image"]'),
    "parameter": Expected("state", "blocks.0.conv", None, STATE_PARAMETER, in_micro_batch=False),
    "buffer": Expected("state", "blocks.1.norm", None, STATE_BUFFER, in_micro_batch=False),
    "optimizer_state": Expected(
        "state", "blocks.0.conv", None, f"{STATE_PARAMETER}.momentum_buffer", in_micro_batch=False
    ),
    "gate.forward": Expected("forward", "blocks.1.gate", 1, "output"),
    "second_call.forward": Expected("forward", "twice", 2, "output", kind="inf"),
    "between.forward": Expected("forward", "", 1, "input", inline_code=("", "twice", "head")),
    "loss.forward": Expected("loss", None, None, "loss.cls", kind="inf"),
    "loss.backward": Expected("backward", "", 1, "grad", inline_code=(None, "loss", "")),
    "gate.backward": Expected("backward", "blocks.1.gate", 1, "grad"),
    "second_call.backward": Expected("backward", "twice", 2, "grad", kind="inf"),
    "between.backward": Expected("backward", "", 1, "grad", inline_code=("", "head", "twice")),
    "weight.backward": Expected("backward", "head", 1, "head.weight"),
    "reduce": Expected("reduce", "head", None, "head.weight", kind="inf", in_micro_batch=False, has_rank=False),
    "lr": Expected("optimizer", None, None, "g0.lr", in_micro_batch=False),
    "update": Expected("optimizer", "stem", None, UPDATED_PARAMETER, in_micro_batch=False),
}

EVERYWHERE = (
    *("input", "parameter", "buffer", "optimizer_state", "gate.forward", "loss.forward", "weight.backward", "reduce"),
    *("lr", "update"),
)
"""Places that are crossed with ranks and accumulation; the others have one cell per wrapper."""


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix."""

    wrapper: str
    place: str
    rank: int
    num_micro_batches: int
    keep_previous: bool = False
    world_size: int = 2

    @property
    def expected(self) -> Expected:
        return EXPECTED[self.place]

    @property
    def is_exhaustive(self) -> bool:
        """Whether a crossed cell is left to a run of everything.

        Otherwise a place comes once per wrapper: on the first rank without accumulation, on the last one with it, from
        place to place and from wrapper to wrapper in turn. What is crossed with nothing comes with DDP and FSDP2.
        """
        if self.place not in EVERYWHERE:
            return self.wrapper in ("plain", "fsdp1")
        turn = (WRAPPERS.index(self.wrapper) + EVERYWHERE.index(self.place)) % 2
        is_first = turn == 0 or (self.wrapper, self.place) == ("ddp", "buffer")  # of which rank 1 has no cell
        return (self.rank, self.num_micro_batches) != ((0, 1) if is_first else (1, 3))

    @property
    def fault(self) -> Fault:
        step = 0 if self.place == "optimizer_state" else FAULT_STEP
        micro_batch = 1 if self.num_micro_batches > 1 and self.place not in STATE_PLACES else 0
        return Fault(self.place, self.expected.kind, self.rank, step, micro_batch)

    @property
    def error_step(self) -> int:
        """The step whose verdict stops the job: a bad update is seen one step later."""
        return self.fault.step + (self.place == "update")

    def __str__(self) -> str:
        kept = "-kept" if self.keep_previous else ""
        return f"{self.wrapper}-{self.place}-rank{self.rank}-x{self.num_micro_batches}{kept}"

    def job(self, dump_root: str) -> Job:
        options = {"keep_previous": True} if self.keep_previous else {}
        return Job(
            self.wrapper,
            num_steps=FAULT_STEP + 3,
            num_micro_batches=self.num_micro_batches,
            fault=self.fault,
            options=options,
            dump_dir=f"{dump_root}/{self}",
        )

    def origin(self) -> dict[str, Any]:
        expected = self.expected
        inline_code = (
            dict(zip(("layer", "after", "before"), expected.inline_code, strict=True)) if expected.inline_code else None
        )
        return {
            "rank": self.rank if expected.has_rank else None,
            "step": self.fault.step,
            "micro_batch": self.fault.micro_batch if expected.in_micro_batch else None,
            "phase": expected.phase,
            "layer": expected.layer,
            "call": expected.call,
            "slot": expected.slot,
            "kind": expected.kind,
            "inline_code": inline_code,
        }


STATE_PLACES = {"parameter", "buffer", "optimizer_state", "lr", "update"}
"""Places that are no part of a micro-batch."""


def exists(cell: Cell) -> bool:
    if cell.place == "reduce":
        return cell.wrapper != "plain"  # nothing is communicated
    if cell.place == "buffer" and cell.wrapper == "ddp":
        return cell.rank == 0  # the broadcast heals the others; tests/ranks/test_quiet.py
    return True


def cells_of(wrapper: str, place: str) -> list[Cell]:
    if place in EVERYWHERE:
        crossed = [Cell(wrapper, place, rank, count) for rank in (0, 1) for count in (1, 3)]
    else:
        crossed = [Cell(wrapper, place, 1, 3)]
    if place == "update":
        crossed += [dataclasses.replace(cell, keep_previous=True) for cell in crossed]
    return [cell for cell in crossed if exists(cell)]


def all_cells() -> list[Cell]:
    return [cell for wrapper in WRAPPERS for place in EXPECTED for cell in cells_of(wrapper, place)]


def usual_cell(wrapper: str, place: str) -> Cell:
    """The cell of a place that every run has."""
    return next(cell for cell in cells_of(wrapper, place) if not cell.is_exhaustive)
