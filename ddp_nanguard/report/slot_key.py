"""`SlotKey`: which slot of a step is meant, in a dump and in its replay alike."""

from __future__ import annotations

from dataclasses import dataclass

from .types import Phase

ROOT_OUTPUT = "root output"
PARAMETER_GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class SlotKey:
    """Names one slot of a step. A replay of the same step gives the same keys in the same order.

    State has none: it says nothing about the arithmetic of a step.

    Attributes:
        phase: ``forward``, ``loss``, ``backward`` or ``reduce``.
        micro_batch: index in the window; None where a gradient belongs to none: after the reduce, or changed by the
            loop since the backward.
        name: the layer of an activation, the parameter of a gradient, the name of a loss.
        call: number of the module's call in the micro-batch, from 1; None for losses and parameters, and in compiled
            code, where calls have no numbers.
        slot: ``output``, ``input``, `ROOT_OUTPUT`, ``gradient of output``, ``gradient of input``,
            `PARAMETER_GRADIENT`, or "" for a loss.
        occurrence: from 1, among slots that are the same in all of this.
    """

    phase: Phase
    micro_batch: int | None
    name: str
    call: int | None
    slot: str
    occurrence: int = 1

    @property
    def is_parameter_gradient(self) -> bool:
        """Whether it is the gradient of a parameter, before or after communication."""
        return self.slot == PARAMETER_GRADIENT

    def to_label(self) -> str:
        """One line of text, as ``history.npz`` holds it; ``-`` stands for None."""
        name = self.name.replace("%", "%25").replace("|", "%7C")
        fields = (self.phase, self.micro_batch, name, self.call, self.slot, self.occurrence)
        return "|".join("-" if field is None else str(field) for field in fields)

    @classmethod
    def from_label(cls, label: str) -> SlotKey:
        """The inverse of `to_label`.

        Raises:
            ValueError: it is no label.
        """
        fields = label.split("|")
        if len(fields) != 6:
            raise ValueError(f"{label!r} is no label of a slot")
        phase, micro_batch, name, call, slot, occurrence = fields
        return cls(
            Phase(phase),
            _index(micro_batch),
            name.replace("%7C", "|").replace("%25", "%"),
            _index(call),
            slot,
            int(occurrence),
        )

    def __str__(self) -> str:
        if self.phase is Phase.LOSS:
            return f"{self.name} of micro-batch {self.micro_batch}"
        if self.is_parameter_gradient:
            return f"{self.phase} · gradient of {self.name}"
        return f"{self.phase} · {self.name or '(root)'} (call {self.call}) {self.slot}, micro-batch {self.micro_batch}"


def _index(text: str) -> int | None:
    return None if text == "-" else int(text)
