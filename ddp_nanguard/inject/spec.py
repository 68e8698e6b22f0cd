"""`InjectionSpec`: which fault is injected where, and whether a model allows it. Nothing is injected here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from ddp_nanguard.config import ENV_INJECT
from ddp_nanguard.report.types import KINDS, PHASES, Phase
from ddp_nanguard.report.wording import listed
from ddp_nanguard.wrappers import Wrapper

from .parameters import held_parts

WITHOUT_LAYER = (Phase.INPUT, Phase.LOSS)
IN_PARAMETERS = (Phase.STATE, Phase.REDUCE, Phase.OPTIMIZER)
MAX_NAMES = 12  # of layers or ranks in an error text, which would grow with the model otherwise


@dataclass(frozen=True)
class InjectionSpec:
    """One fault that is to be injected: where, when and of which kind.

    Attributes:
        rank: global rank.
        step: of the optimizer, as the guard counts them.
        phase: one of `PHASES`.
        layer: name in the unwrapped model, "" for the root; None for input and loss.
        kind: ``nan``, ``inf`` or ``-inf``. The latter two may come to nothing (-inf through a ReLU is 0), and the guard
            blames -inf only where nothing else is NaN or +inf.
        micro_batch: index in the step; state, reduce and optimizer belong to none.
    """

    rank: int
    step: int
    phase: str
    layer: str | None = None
    kind: str = "nan"
    micro_batch: int = 0

    def __str__(self) -> str:
        position = "" if self.phase in IN_PARAMETERS else f" · micro-batch {self.micro_batch}"
        layer = "" if self.layer is None else f" · {self.layer or '(root)'}"
        return f"rank {self.rank} · step {self.step}{position} · {self.phase}{layer}: {self.kind}"


def validate_spec(spec: InjectionSpec, wrapper: Wrapper, ranks: list[int], own_rank: int) -> InjectionSpec:
    """Check that a spec fits a model; returns it with its layer filled in.

    Args:
        spec: to be checked.
        wrapper: of the model.
        ranks: global ranks that step together.
        own_rank: this one. Only the rank of the fault checks that it holds a part of the layer's parameters.

    Raises:
        ValueError: names the option, the value and the valid ones.
    """
    _require("phase", spec.phase, spec.phase in PHASES, ", ".join(PHASES))
    _require("kind", spec.kind, spec.kind in KINDS, ", ".join(KINDS))
    _require("rank", spec.rank, _is_index(spec.rank) and spec.rank in ranks, listed(ranks, MAX_NAMES))
    _require("step", spec.step, _is_index(spec.step), "a whole number from 0")
    _require("micro_batch", spec.micro_batch, _is_index(spec.micro_batch), "a whole number from 0")
    if spec.phase == Phase.REDUCE and not wrapper.communicates:
        others = ", ".join(phase for phase in PHASES if phase != "reduce")
        raise ValueError(f"option phase='reduce': a plain model communicates nothing; valid here: {others}")
    if spec.phase in WITHOUT_LAYER:
        _require("layer", spec.layer, spec.layer is None, f"None, since phase {spec.phase} belongs to no layer")
        return spec
    valid = valid_layers(wrapper, spec.phase, here=spec.rank == own_rank)
    if spec.layer is None:
        _require("layer", spec.layer, bool(valid), "a layer; this rank holds parameters of none")
        return dataclasses.replace(spec, layer=_middle(wrapper, valid))
    _require("layer", spec.layer, spec.layer in valid, listed([name or '""' for name in valid], MAX_NAMES))
    return spec


def valid_layers(wrapper: Wrapper, phase: str, here: bool) -> list[str]:
    """Names of the layers in which a fault of a phase can be injected.

    Args:
        wrapper: of the model.
        phase: one of `PHASES` that has a layer.
        here: whether this is the rank of the fault: it must hold a part of the layer's parameters to corrupt it.
    """
    names = [name for name, _ in wrapper.named_modules()]
    if phase not in IN_PARAMETERS:
        return names
    owners = {name.rpartition(".")[0] for name in wrapper.all_shapes()}
    trained = phase != Phase.STATE
    holding = [name for name in names if name in owners]
    return [name for name in holding if not here or next(held_parts(wrapper, name, trained), None) is not None]


def _middle(wrapper: Wrapper, valid: list[str]) -> str:
    """The layer in the middle of the model, among leaves that hold parameters and are called as modules."""
    owners = {name.rpartition(".")[0] for name in wrapper.all_shapes()}
    modules = dict(wrapper.named_modules())
    # `MultiheadAttention` uses its projection's weights without calling it, so hooks there would never run
    inside = tuple(f"{name}." for name, module in modules.items() if isinstance(module, nn.MultiheadAttention))
    runs = [name for name in valid if type(modules[name]).forward is not nn.Module.forward]
    leaves = [name for name in runs if name in owners and not name.startswith(inside or ("\0",))] or runs or valid
    return leaves[len(leaves) // 2]


def _require(name: str, value: object, holds: bool, valid: str) -> None:
    if not holds:
        raise ValueError(f"option {name}={value!r} does not fit; valid: {valid}")


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def parse_spec(text: str) -> InjectionSpec:
    """Parse the text of ``NANGUARD_INJECT``: ``key=value`` pairs with commas between them.

    Raises:
        ValueError: names the variable, what does not fit and what does.
    """
    keys = [field.name for field in dataclasses.fields(InjectionSpec)]
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals or key not in keys or key in values:
            valid = f"valid keys, each once: {', '.join(keys)}"
            raise ValueError(f"environment variable {ENV_INJECT}={text!r}: {part!r} does not fit; {valid}")
        try:
            values[key] = int(value) if key in ("rank", "step", "micro_batch") else value
        except ValueError:
            raise ValueError(
                f"environment variable {ENV_INJECT}={text!r}: {key}={value!r} is no whole number"
            ) from None
    missing = [key for key in ("rank", "step", "phase") if key not in values]
    if missing:
        raise ValueError(f"environment variable {ENV_INJECT}={text!r} lacks {', '.join(missing)}")
    if values.get("layer") in ("(root)", '""'):
        values["layer"] = ""
    return InjectionSpec(**values)
