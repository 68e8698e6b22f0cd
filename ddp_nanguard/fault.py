"""From a verdict that is not clean to the report: rescans, blame, the fault round.

Nothing here runs in a clean step. Host reads and copies are free; collectives are not, and every rank reaches each of
them because the
verdict is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .blame import Finding, LossNote, RankedSite, StepView, habitual_layers, local_sites
from .board import Reading, Region, is_clean
from .parts import Parts
from .probes.backward import GradientHook
from .probes.calls import Sighting
from .probes.gradient import GradientNote
from .probes.state import StateNote, is_bad_number
from .scan import evidence, kind_in, kind_of, named_tensors_in, path_text
from .site import FaultReport, Phase, Site
from .verdict import LocalFault
from .window import MicroBatch


@dataclass
class Damage:
    """What the rescans of state found."""

    by_update: list[Finding]
    before: list[Finding]
    buffers: list[Finding]

    def names(self) -> list[str]:
        """Names of everything that is bad now."""
        return [finding.name for finding in (*self.by_update, *self.before, *self.buffers)]

    def lasting(self) -> list[str]:
        """Names of what putting the window's buffers back does not heal."""
        return [finding.name for finding in (*self.by_update, *self.before)]


@dataclass
class LocalView:
    """What this rank sees of the fault."""

    readings: list[Reading]
    damage: Damage
    hyper_parameters: list[Finding]
    gradients_bad_now: bool
    gradients_bad_seen: bool
    loss_bad: bool
    sites: list[RankedSite] = field(default_factory=list)
    habitual: frozenset[str] = frozenset()


def look(parts: Parts) -> LocalView:
    """Rescan this rank. Host sync: many."""
    if parts.device.type == "cuda":
        torch.cuda.synchronize(parts.device)  # batches on their way to the host must have arrived
    readings = parts.board.readings()
    seen = [r for r in readings if isinstance(r.note, GradientNote) and not is_clean(r)]
    return LocalView(
        readings=readings,
        damage=_damage(parts, readings),
        hyper_parameters=_bad_hyper_parameters(parts),
        gradients_bad_now=any(kind_in(gradient) for _, gradient in _gradients(parts)),
        gradients_bad_seen=bool(seen),
        loss_bad=any(isinstance(r.note, LossNote) and not is_clean(r) for r in readings),
    )


def report_of(parts: Parts, view: LocalView, step: int, cause: str) -> FaultReport:
    """Blame on this rank, then the fault round, then the report, the same on every rank.

    Collective: those of `Peers.share`, on the fault group. Where peers do not answer the report is this rank's own and
    says so.
    """
    blame = step_view(parts, view, step)
    view.sites, view.habitual = local_sites(blame), blame.habitual
    reduced_bad = any(ranked.site.phase is Phase.REDUCE for ranked in view.sites)
    local = LocalFault(view.sites, view.damage.lasting(), reduced_bad, unchecked(parts))
    notes: list[str] = []
    try:
        shared = (parts.peers.alone() if parts.peers.lost else parts.peers).share(local, step)
    except RuntimeError:
        parts.peers.lost = True
        shared = parts.peers.alone().share(local, step)
    if parts.peers.lost:
        notes.append(f"peers were not asked or did not answer: this is rank {parts.peers.rank}'s own view")
    origin = shared.sites[0] if shared.sites else None
    is_reduce = origin is not None and origin.phase is Phase.REDUCE
    return FaultReport(
        step=origin.step if origin is not None else step,
        world_size=parts.peers.world_size,
        wrapper=parts.wrapper.kind,
        origin=origin,
        sites=shared.sites,
        holders=shared.holders if is_reduce else (),
        num_ranks_affected=shared.num_affected,
        ranks_affected=shared.affected,
        cause=cause or _cause_of(origin),
        state=shared.damaged,
        unchecked=shared.unchecked,
        notes=tuple(notes),
    )


def unchecked(parts: Parts) -> list[str]:
    """What this rank did not look at, in words."""
    found = sorted(parts.forward.unchecked)
    if parts.window.micro_batches:
        silent = parts.forward.silent_modules()
        if silent:
            shown = ", ".join(name or "(root)" for name in silent[:8]) + (", ..." if len(silent) > 8 else "")
            found.append(f"{len(silent)} modules whose hooks did not fire (not run, or compiled): {shown}")
    watched = set(parts.config.watch)
    found += [f"phase {phase} (not watched)" for phase in Phase if str(phase) not in watched]
    return found


def _cause_of(origin: Site | None) -> str:
    if origin is None:
        return "unknown: no probe saw where the value came from"
    return {
        Phase.STATE: "a parameter, buffer or optimizer state was bad before the step",
        Phase.INPUT: "the loader delivered a non-finite value",
        Phase.LOSS: "the loss function made it from a finite model output" if origin.taken_in is None else "unknown",
        Phase.REDUCE: "finite on every rank before communication, non-finite after it",
        Phase.OPTIMIZER: "the update itself, or its hyper-parameters; gradients were finite",
    }.get(origin.phase, "unknown")


# -- rescans
# ------------------------------------------------------------------------------------------------------------------


def _damage(parts: Parts, readings: list[Reading]) -> Damage:
    updated = {
        r.note.name for r in readings if isinstance(r.note, StateNote) and r.note.when == "update" and not is_clean(r)
    }
    by_update: list[Finding] = []
    before: list[Finding] = []
    for holder, name, tensor in named_parameter_tensors(parts):
        if not parts.is_ignored(name):
            (by_update if holder in updated else before).extend(_found(name, tensor))
    for name, tensor in optimizer_tensors(parts):
        if not parts.is_ignored(name):
            (by_update if updated else before).extend(_found(name, tensor))
    buffers_before, buffers = _damaged_buffers(parts)
    return Damage(by_update, before + buffers_before, buffers)


def named_parameter_tensors(parts: Parts) -> Iterator[tuple[str, str, Tensor]]:
    """(name as the optimizer holds it, original name, local tensor) of every parameter."""
    own = dict(parts.wrapper.named_parameters())
    for name, parameter in parts.state.parameters():
        if name in own:
            for piece in parts.wrapper.pieces("", name, own[name], parameter):
                yield name, piece.name, piece.tensor
        else:
            yield name, name, parts.wrapper.local(parameter)


def optimizer_tensors(parts: Parts) -> Iterator[tuple[str, Tensor]]:
    """(``<parameter>.<key>``, local tensor) of every optimizer state tensor."""
    for name, tensor in parts.state.optimizer_state():
        yield name, parts.wrapper.local(tensor)


def _damaged_buffers(parts: Parts) -> tuple[list[Finding], list[Finding]]:
    before: list[Finding] = []
    written: list[Finding] = []
    copies = parts.window.buffers()
    for name, buffer in parts.state.buffers():
        if parts.is_ignored(name):
            continue
        copied = copies.get(name)
        was_bad = copied is None or kind_in(copied, allow_negative_inf=True) is not None
        (before if was_bad else written).extend(_found(name, buffer, allow_negative_inf=True))
    return before, written


def _found(name: str, tensor: Tensor, allow_negative_inf: bool = False) -> list[Finding]:
    kind = kind_in(tensor, allow_negative_inf)
    return [] if kind is None else [Finding(name, kind, evidence(tensor))]


def _bad_hyper_parameters(parts: Parts) -> list[Finding]:
    found: list[Finding] = []
    for name, value in parts.state.hyper_parameters():
        number = float(value)
        if is_bad_number(name, number):
            kind = kind_of(number, number)
            assert kind is not None
            found.append(Finding(name, kind, None))
    return found


def _gradients(parts: Parts) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in parts.wrapper.named_parameters():
        if parameter.grad is not None and not parts.is_ignored(name):
            yield name, parts.wrapper.local(parameter.grad)


def _reduced_findings(parts: Parts, readings: list[Reading]) -> list[Finding]:
    """Non-finite gradients after the reduce. The kind is that of the slot: clipping may have spread it since."""
    own = dict(parts.wrapper.named_parameters())
    found: list[Finding] = []
    for reading in readings:
        if isinstance(reading.note, GradientNote) and reading.note.reduced and not is_clean(reading):
            kind = kind_of(reading.minimum, reading.maximum)
            assert kind is not None
            found += _reduced_pieces(parts, reading.note.name, own[reading.note.name], kind)
    return list({finding.name: finding for finding in found}.values())


def _reduced_pieces(parts: Parts, name: str, parameter: nn.Parameter, kind: str) -> list[Finding]:
    if parameter.grad is None:
        return [Finding(name, kind, None)]
    pieces = parts.wrapper.pieces("", name, parameter, parameter.grad)
    bad = [piece for piece in pieces if kind_in(piece.tensor) == kind]
    return [Finding(piece.name, kind, evidence(piece.tensor)) for piece in bad] or [Finding(name, kind, None)]


def _batch_findings(micro_batches: list[MicroBatch]) -> list[Finding]:
    found: list[Finding] = []
    for micro_batch in micro_batches:
        for path, tensor in named_tensors_in(micro_batch.batch):
            name = path_text(path)
            if name not in micro_batch.modified and (kind := kind_in(tensor)) is not None:
                found.append(Finding(name, kind, evidence(tensor), micro_batch.index))
    return found


def step_view(parts: Parts, view: LocalView, step: int) -> StepView:
    """What blame is read from."""
    parts.window.note_modified()
    habitual = [parts.known_habitual, *(habitual_layers(past.readings()) for past in parts.board.past())]
    return StepView(
        rank=parts.peers.rank,
        step=step,
        readings=view.readings,
        owner_of=parts.owner_of,
        sharers_of=parts.sharers_of,
        is_ignored=parts.is_ignored,
        losses={(m.index, name): loss for m in parts.window.micro_batches for name, loss in m.losses.items()},
        batch=_batch_findings(parts.window.micro_batches) if "input" in parts.config.watch else [],
        damaged_before=view.damage.before,
        damaged_by_update=view.damage.by_update,
        damaged_buffers=view.damage.buffers,
        reduced=_reduced_findings(parts, view.readings),
        hyper_parameters=view.hyper_parameters,
        habitual=frozenset().union(*habitual),
    )


# -- slots by name, for the dump and for comparing a replay
# ---------------------------------------------------------------------


def labelled_slots(readings: list[Reading]) -> list[tuple[str, float, float]]:
    """(label, minimum, maximum) of every slot in execution order; a replay of the same step gives the same labels.

    State is left out: it says nothing about this step's arithmetic.
    """
    counts: dict[str, int] = {}
    found: list[tuple[str, float, float]] = []
    for reading in readings:
        label = _label(reading)
        if label is not None:
            counts[label] = counts.get(label, 0) + 1
            found.append((f"{label}|{counts[label]}", reading.minimum, reading.maximum))
    return found


def _label(reading: Reading) -> str | None:
    note = reading.note
    if isinstance(note, Sighting):
        call = note.call
        region = "root output" if reading.region is Region.OUTPUT else note.slot
        return f"forward|{call.micro_batch}|{call.layer}|{call.number}|{region}"
    if isinstance(note, GradientHook):
        call = note.call
        return f"backward|{call.micro_batch}|{call.layer}|{call.number}|gradient of {note.sighting.slot}"
    if isinstance(note, GradientNote):
        return f"{'reduce' if note.reduced else 'backward'}|{note.micro_batch}|{note.name}|gradient"
    if isinstance(note, LossNote):
        return f"loss|{note.micro_batch}|{note.name}"
    return None


__all__ = ["LocalView", "labelled_slots", "look", "report_of"]
