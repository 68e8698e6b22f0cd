"""`SlotKey`: the name of one slot of a step, equal in a dump and in its replay."""

from __future__ import annotations

from dataclasses import dataclass

from .types import Phase

# both are written to dumps as they stand here
ROOT_OUTPUT = "root output"
PARAMETER_GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class SlotKey:
    """Names one slot of a step. A replay of the same step gives the same keys in the same order.

    Slots of state and norms have no key: they tell nothing about the arithmetic of a step.

    Attributes:
        phase: ``forward``, ``loss``, ``backward``, ``reduce`` or ``loop``.
        micro_batch: index in the window; None where a gradient belongs to none: after the reduce, or changed by the
            loop since the backward.
        name: the layer of an activation, the parameter of a gradient, the name of a loss.
        call: number of the module's call in the micro-batch, from 1; None for losses and parameters, and in compiled
            code, where calls have no numbers.
        slot: ``output``, ``input``, `ROOT_OUTPUT`, ``gradient of output``, ``gradient of input``, `PARAMETER_GRADIENT`,
            or "" for a loss.
        occurrence: number of this slot among those that are equal in all other fields, from 1.
    """

    phase: Phase
    micro_batch: int | None
    name: str
    call: int | None
    slot: str
    occurrence: int = 1

    @property
    def is_parameter_gradient(self) -> bool:
        """Whether the slot is the gradient of a parameter, before or after communication."""
        return self.slot == PARAMETER_GRADIENT

    def to_label(self) -> str:
        """The key as one line of text, as ``history.npz`` holds it: six fields with ``|`` between, ``-`` for None."""
        # a name may hold the separator; "%" goes first, or the escapes themselves would be escaped
        name = self.name.replace("%", "%25").replace("|", "%7C")
        fields = (self.phase, self.micro_batch, name, self.call, self.slot, self.occurrence)
        return "|".join("-" if field is None else str(field) for field in fields)

    @classmethod
    def from_label(cls, label: str) -> SlotKey:
        """Parse a text that `to_label` made.

        Raises:
            ValueError: the text is no label.
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
