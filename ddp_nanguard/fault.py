"""From a verdict that is not clean to the report: rescans, blame, the fault round.

Nothing here runs in a clean step. Host reads and copies are free; collectives are not, and every rank reaches each of
them because the verdict is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from . import testing
from .blame import Damage, Finding, Habit, LossNote, RankedSite, StepView, TracedSighting, habits, local_sites
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
class LocalView:
    """What this rank sees of the fault."""

    readings: list[Reading]
    damage: Damage
    hyper_parameters: list[Finding]
    gradients_bad_now: bool
    gradients_bad_seen: bool
    loss_bad: bool
    sites: list[RankedSite] = field(default_factory=list)
    habits: frozenset[Habit] = frozenset()


def look(parts: Parts) -> LocalView:
    """Rescan this rank. Host sync: many."""
    if parts.device.type == "cuda":
        torch.cuda.synchronize(parts.device)  # batches on their way to the host must have arrived
    parts.settle_regions()
    parts.gradient.see_waiting()  # of a backward that never ended
    readings = parts.board.readings()
    parts.forward.traced_layers = _traced(readings)
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
    view.sites, view.habits = local_sites(blame), blame.habits
    reduced_bad = any(ranked.site.phase is Phase.REDUCE for ranked in view.sites)
    local = LocalFault(view.sites, view.damage.lasting(), reduced_bad, unchecked(parts))
    notes = testing.notes(parts)
    try:
        shared = (parts.peers.alone() if parts.peers.lost else parts.peers).share(local, step)
    except RuntimeError:
        parts.peers.lost = True
        shared = parts.peers.alone().share(local, step)
    if parts.peers.lost:
        notes.append(f"peers were not asked or did not answer: this is rank {parts.peers.rank}'s own view")
    sites = _own_view(shared.sites) if parts.peers.lost else _without_victims(shared.sites)
    origin = sites[0] if sites else None
    is_reduce = origin is not None and origin.phase is Phase.REDUCE
    return FaultReport(
        step=origin.step if origin is not None else step,
        world_size=parts.peers.world_size,
        wrapper=parts.wrapper.kind,
        origin=origin,
        sites=sites,
        holders=shared.holders if is_reduce else (),
        num_ranks_affected=shared.num_affected,
        ranks_affected=shared.affected,
        cause=_with_more(cause, _cause_of(parts, origin)),
        state=shared.damaged,
        unchecked=shared.unchecked,
        is_own_view=parts.peers.lost,
        notes=tuple(notes),
    )


def _own_view(sites: tuple[Site, ...]) -> tuple[Site, ...]:
    """Without peers nothing is known of their gradients."""
    return tuple(replace(site, taken_in="unchecked") if site.phase is Phase.REDUCE else site for site in sites)


def _without_victims(sites: tuple[Site, ...]) -> tuple[Site, ...]:
    """A gradient that some rank had bad before the reduce was not born in it."""
    born_earlier = any(site.phase in (Phase.INPUT, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD) for site in sites)
    return tuple(site for site in sites if site.phase is not Phase.REDUCE) if born_earlier else sites


def unchecked(parts: Parts) -> list[str]:
    """What this rank did not look at, in words."""
    found = sorted(parts.forward.unchecked)
    if parts.forward.skipped:
        found.append(f"{_modules(parts.forward.skipped)} of skip_types: {_shown(parts.forward.skipped)}")
    out = parts.forward.thinned_out()
    if out or parts.budget.level_index:
        what = _modules(out) if out else "the activation gradients of modules that hold no others"
        found.append(
            f"{what} left out to keep within the budget (watched: {parts.budget.level}); "
            "replay --trace finds the operator"
        )
    if parts.window.micro_batches:
        silent = parts.forward.silent_modules()
        if silent:
            found.append(f"{_modules(silent)} whose hooks did not fire (not run, or compiled): {_shown(silent)}")
    watched = set(parts.config.watch)
    found += [f"phase {phase} (not watched)" for phase in Phase if str(phase) not in watched]
    return found


def traced_layers(parts: Parts) -> set[str]:
    """Layers whose hooks in compiled code have run in the open window. Host sync: one per page of slots."""
    return _traced(parts.board.readings())


def _traced(readings: list[Reading]) -> set[str]:
    return {r.note.call.layer for r in readings if isinstance(r.note, TracedSighting)}


UNSEEN = (
    "no call of the model was seen, although a backward ran: its code was compiled without the guard's hooks, or runs "
    "without grad mode; faults are not put down to layers (make the guard of what the loop calls, and compile before "
    "its first step)"
)


def unheard(layers: list[str]) -> str:
    """What is said of modules in compiled code whose hooks do not run."""
    return (
        f"no hook runs in {_modules(layers)} of compiled code ({_shown(layers)}): it was compiled before the guard was "
        "made (make the guard before the first call), or is not called; a fault in there is not put down to a layer"
    )


def _with_more(cause: str, known: str) -> str:
    return known if not cause else (cause if known.startswith("unknown") else f"{known}; {cause}")


def _modules(names: list[str]) -> str:
    return "1 module" if len(names) == 1 else f"{len(names)} modules"


def _shown(names: list[str]) -> str:
    return ", ".join(name or "(root)" for name in names[:8]) + (", ..." if len(names) > 8 else "")


def _cause_of(parts: Parts, origin: Site | None) -> str:
    if origin is None:
        return "unknown: no probe saw where the value came from"
    match origin.phase:
        case Phase.STATE if origin.taken_in is None:
            return "a parameter, buffer or optimizer state was bad before the step"
        case Phase.STATE:
            return "written in the course of this step, not by an update"
        case Phase.INPUT:
            return "the loader delivered a non-finite value"
        case Phase.LOSS if origin.taken_in is None:
            return "the loss function made it from a finite model output"
        case Phase.REDUCE if origin.taken_in is None:
            return "finite on every rank before communication, non-finite after it"
        case Phase.OPTIMIZER if origin.layer is None:
            return "a hyper-parameter is not a finite number"
        case Phase.OPTIMIZER if parts.let_through == origin.step:
            return f"the update of step {origin.step} used gradients that were known to be bad and were let through"
        case Phase.OPTIMIZER:
            return "the update, or code of the loop since: gradients and hyper-parameters were finite at the verdict"
        case _:
            return "unknown"


# -- rescans ---------------------------------------------------------------------------------------------------------


def _damage(parts: Parts, readings: list[Reading]) -> Damage:
    damage = Damage()
    updated, clean = _looked_at(readings)
    for holder, name, tensor in named_parameter_tensors(parts):
        if not parts.is_ignored(name):
            place = damage.by_update if holder in updated else (damage.since if holder in clean else damage.before)
            place.extend(_found(name, tensor))
    for name, tensor in optimizer_tensors(parts):
        if not parts.is_ignored(name):
            place = damage.by_update if updated else (damage.since if name in clean else damage.before)
            place.extend(_found(name, tensor))
    before, damage.buffers = _damaged_buffers(parts)
    damage.before += before
    return damage


def _looked_at(readings: list[Reading]) -> tuple[set[str], set[str]]:
    """Names that were bad right after the last update, and names that were looked at and clean in this window."""
    updated: set[str] = set()
    clean: set[str] = set()
    for reading in readings:
        note = reading.note
        if isinstance(note, StateNote) and note.when in ("before", "update"):
            if is_clean(reading):
                clean.add(note.name)
            elif note.when == "update":
                updated.add(note.name)
    return updated, clean - updated


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
    for name, value in parts.late_hyper_parameters if parts.is_late else parts.state.hyper_parameters():
        number = float(value)
        if is_bad_number(name, number):
            kind = kind_of(number, number)
            assert kind is not None
            found.append(Finding(name, kind, None))
    return found


def _gradients(parts: Parts) -> Iterator[tuple[str, Tensor]]:
    if parts.is_late:
        return  # those that are there now are the next step's
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
    if parameter.grad is None or parts.is_late:
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
                found.append(Finding(name, kind, evidence(tensor), micro_batch.index, tensor))
    return found


def step_view(parts: Parts, view: LocalView, step: int) -> StepView:
    """What blame is read from."""
    parts.window.note_modified()
    known = [parts.known_habits, *(habits(past.readings()) for past in parts.board.past())]
    return StepView(
        rank=parts.peers.rank,
        step=step,
        readings=view.readings,
        owner_of=parts.owner_of,
        sharers_of=parts.sharers_of,
        is_ignored=parts.is_ignored,
        losses={(m.index, name): loss for m in parts.window.micro_batches for name, loss in m.losses.items()},
        batch=_batch_findings(parts.window.micro_batches) if "input" in parts.config.watch else [],
        damage=view.damage,
        reduced=_reduced_findings(parts, view.readings),
        hyper_parameters=view.hyper_parameters,
        habits=frozenset().union(*known),
    )


# -- slots by name, for the dump and for comparing a replay ----------------------------------------------------------


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
