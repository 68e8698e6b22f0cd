"""Compares a replay with the record: same, elsewhere, not reproduced, or cannot; and up to where the bits agree."""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ddp_nanguard.capture.window import MicroBatch
from ddp_nanguard.dump.manifest import settings, versions
from ddp_nanguard.dump.rank_records import Device
from ddp_nanguard.dump.read import Dump
from ddp_nanguard.report.audit import FOUND
from ddp_nanguard.report.command_text import replay_all_text
from ddp_nanguard.report.messages import what
from ddp_nanguard.report.slot_key import SlotKey
from ddp_nanguard.report.types import Phase, Site
from ddp_nanguard.wrappers.ddp import hooks_left_out

from .comparable import LeftOut, Slots, as_in_training, left_out_of, recorded_slots
from .run_step import StepResult


class Outcome(enum.StrEnum):
    """Result of a replay; `EXIT_CODES` maps it to the exit code of ``ddp-nanguard replay``."""

    SAME = "same"
    ELSEWHERE = "elsewhere"
    NOT_REPRODUCED = "not_reproduced"
    CANNOT = "cannot"


# 1 is Python's own code for an exception, 2 is wrong usage.
EXIT_CODES = {Outcome.SAME: 0, Outcome.ELSEWHERE: 3, Outcome.NOT_REPRODUCED: 4, Outcome.CANNOT: 5}


@dataclass
class Result:
    """The outcome for one rank, and what it rests on.

    Attributes:
        rank: the rank whose step was run.
        outcome: ``same`` means the same site and the same bits in every recorded slot and loss that can be compared.
        recorded, replayed: the rank's first site in training and in the replay, None where there was none.
        num_slots, num_same: recorded slots that were compared, and those with the same bits.
        first_difference: label of the first slot that differs.
        first_phase: its phase.
        last_same: label of the last slot before it.
        factor: a sentence, where all gradients differ by one factor.
        losses: per watched loss, whether its bits are the same.
        loss_values: per watched loss, its values in training and in the replay, for people.
        differs: what else differs from the record: device, versions, settings.
        notes: what could not be compared or restored.
        reason: one sentence.
    """

    rank: int
    outcome: Outcome
    recorded: Site | None = None
    replayed: Site | None = None
    num_slots: int = 0
    num_same: int = 0
    first_difference: str | None = None
    first_phase: Phase | None = None
    last_same: str | None = None
    factor: str | None = None
    losses: dict[str, bool] = field(default_factory=dict)
    loss_values: dict[str, str] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON-ready data; sites as `Site.to_dict`."""
        return {
            "rank": self.rank,
            "outcome": str(self.outcome),
            "recorded": self.recorded.to_dict() if self.recorded else None,
            "replayed": self.replayed.to_dict() if self.replayed else None,
            "slots": {"compared": self.num_slots, "same": self.num_same, "first_difference": self.first_difference},
            "losses": self.losses,
            "loss_values": self.loss_values,
            "differs": self.differs,
            "notes": self.notes,
            "reason": self.reason,
        }


def not_replayable(rank: int, recorded: Site | None, reason: str) -> Result:
    """The result of a rank whose step is not run, because the dump does not hold what the replay needs."""
    return Result(rank, Outcome.CANNOT, recorded=recorded, reason=reason)


def why_not_replayable(dump: Dump, alone: bool, by_script: bool = False) -> str | None:
    """Why this replay cannot give an answer, and what would be needed; None if it can.

    Args:
        dump: the dump.
        alone: whether one process stands for its rank, without peers.
        by_script: whether the training script runs the step, with the code of its loop.
    """
    origin = dump.report.origin
    if origin is None:
        return "the fault has no origin that a step could reproduce"
    if dump.manifest.options.redact:
        return "the batches were kept out of the dump: train with redact=False to replay"
    if origin.phase is Phase.STATE and not _is_rebuilt(dump, origin.slot):
        return f"{origin.slot} belongs to a registered module or to no parameter of the model, which no replay rebuilds"
    if origin.phase is Phase.REDUCE and alone:
        n = dump.world_size
        return f"the value arose in communication: replay all {n} ranks with torchrun --nproc-per-node {n}"
    if origin.phase is Phase.LOOP and not by_script:
        return (
            "every gradient was finite after the backward, and code between backward and step changed them, which no "
            f"recipe runs: replay by the script, ddp-nanguard replay {dump.path} -- python train.py"
        )
    if origin.phase is Phase.OPTIMIZER and origin.layer is not None and not _has_gradients(dump):
        return (
            "the update itself made the weights non-finite, and the weights from before it are gone: "
            f"train with keep_previous=True to replay one; damaged: {', '.join(dump.report.nonfinite_state[:8])}"
        )
    return None


def _is_rebuilt(dump: Dump, name: str) -> bool:
    """Whether a state tensor is a parameter, a buffer or optimizer state, which a replay rebuilds."""
    known = {full.partition(".")[2] for full in (*dump.names(), *dump.manifest.shapes) if full.startswith("model.")}
    known |= {full.split(".", 2)[2] for full in dump.names() if full.startswith("optim.")}
    known |= set(dump.manifest.aliases) | set(dump.buffers(dump.ranks[0]))
    return name in known


def _has_gradients(dump: Dump) -> bool:
    return any(name.startswith("grad.") for name in dump.names())


EAGER_NOW = "compiled by torch.compile then, eager now"


def compare(
    dump: Dump, rank: int, recorded: list[MicroBatch], again: StepResult, alone: bool, compiled: bool = True
) -> Result:
    """Compare one rank's step with the record.

    Args:
        dump: the dump.
        rank: the rank whose step was run.
        recorded: its micro-batches, with the losses of training.
        again: what the step gave in the replay.
        alone: whether it was run without peers.
        compiled: whether the replay's model is compiled, if that of training was.
    """
    then = _first_given(dump, rank, again, alone)
    # sites are compared as training could see them, which looked at no layer perhaps; people are told the place
    left_out = left_out_of(dump, rank, recorded, again, then)
    again = as_in_training(recorded, again, left_out, then)
    seen, now = _first(again.sites, alone), _first(again.as_watched, alone)
    result = Result(rank, Outcome.NOT_REPRODUCED, recorded=_placed(dump, rank, then), replayed=seen, notes=again.notes)
    _compare_losses(recorded, again, left_out, result)
    _compare_slots(dump, rank, again, alone, left_out, result)
    result.notes += left_out.notes
    result.differs = differences(dump, rank)
    if dump.manifest.wrapper_description.compiled and not compiled:
        result.differs.append(EAGER_NOW)
    # The recorded site is of a gradient that peers contributed to; this rank alone may well be finite.
    if alone and now is None and _came_by_reduce(dump, rank, then):
        result.notes.append(
            "what training saw on this rank came from others, or from code of the loop after the backward"
        )
        result.recorded = then = None
    _conclude(result, then, now, _Parting(dump, recorded, alone))
    return _settled(result)


def _settled(result: Result) -> Result:
    """The result, or none where it says against itself that it is the same, or is not reproduced."""
    text = contradiction(result)
    if text is not None:
        FOUND.append(f"replay of rank {result.rank}: {text}")
        result.outcome, result.reason = Outcome.CANNOT, f"not known: what was seen contradicts itself: {text}"
    return result


def contradiction(result: Result) -> str | None:
    """Two statements of a result that cannot both hold; None where it is in order."""
    differs = result.first_difference or next((name for name, same in result.losses.items() if not same), None)
    if result.outcome is Outcome.SAME:
        if (result.recorded is None) is not (result.replayed is None):
            return "the same, and bad in only one of both runs"
        return f"the same, and other bits at {differs}" if differs is not None else None
    if result.outcome is Outcome.NOT_REPRODUCED:
        if result.replayed is not None:
            return "every value is finite now, and one is not"
        if "hardware" in result.reason:
            return "hardware is suspected, and no input was compared"
    return None


@dataclass(frozen=True)
class _Parting:
    """What tells why a step that is finite now was not, beside the result.

    Attributes:
        dump: the dump.
        recorded: the micro-batches.
        alone: whether one process stands for its rank.
    """

    dump: Dump
    recorded: list[MicroBatch]
    alone: bool


def _first(sites: list[Site], alone: bool) -> Site | None:
    return next((site for site in sites if not (alone and site.phase is Phase.REDUCE)), None)


def _placed(dump: Dump, rank: int, then: Site | None) -> Site | None:
    """The recorded site of a rank, as the second look has placed it where it was this rank's."""
    look, origin = dump.report.second_look, dump.report.origin
    if then is not None and then.phase is Phase.REDUCE and (origin is None or origin.phase is not Phase.REDUCE):
        return replace(then, input_kind="unchecked")  # the rank spoke for itself: another one's gradient was bad before
    is_placed = look is not None and look.outcome == "same" and origin is not None and origin.rank == rank
    return origin if is_placed and then is not None else then


def _came_by_reduce(dump: Dump, rank: int, site: Site | None) -> bool:
    """Whether a gradient was first seen bad after communication: peers, or code of the loop, may have made it so."""
    if site is not None and site.phase is Phase.LOOP:
        return dump.report.origin is None or dump.report.origin.phase is not Phase.LOOP
    read_late = site is not None and site.phase is Phase.BACKWARD and site.micro_batch is None
    return (
        read_late
        and site is not None
        and site.input_kind == "unchecked"
        and bool(dump.evidence(rank).reduced_micro_batches)
    )


def first_own_site(dump: Dump, rank: int, alone: bool) -> Site | None:
    """The rank's first recorded site, or None; without peers, the first that is not a site of the reduce."""
    sites = dump.evidence(rank).sites
    return next((site for site in sites if not (alone and site.phase is Phase.REDUCE)), None)


def _first_given(dump: Dump, rank: int, again: StepResult, alone: bool) -> Site | None:
    """As `first_own_site`, without losses that the step does not give under their names, if anything else was bad."""
    sites = [site for site in dump.evidence(rank).sites if not (alone and site.phase is Phase.REDUCE)]
    given = [s for s in sites if s.phase is not Phase.LOSS or (s.micro_batch, s.slot) in again.losses]
    return next(iter(given or sites), None)


def recorded_alone(dump: Dump, rank: int, alone: bool) -> Site | None:
    """As `first_own_site`; None where others, or code of the loop, have brought it, which is not where it began."""
    site = first_own_site(dump, rank, alone)
    return None if _came_by_reduce(dump, rank, site) else _placed(dump, rank, site)


def _is_same_place(then: Site, now: Site) -> bool:
    """Whether both are one place; a gradient whose micro-batch was not known may be that of any."""
    is_of_any = then.phase is Phase.BACKWARD and then.micro_batch is None
    return then.same_place(replace(now, micro_batch=None) if is_of_any else now)


def _conclude(result: Result, then: Site | None, now: Site | None, parting: _Parting) -> None:
    same_bits = result.first_difference is None and all(result.losses.values())
    same_place = now is not None and then is not None and _is_same_place(then, now)
    if then is None and now is None and same_bits:
        result.outcome = Outcome.SAME
        result.reason = "this rank saw nothing of its own then, nor now"
    elif same_place and same_bits:
        result.outcome = Outcome.SAME
        shown = result.recorded is not None and result.replayed is not None
        is_finer = shown and not result.recorded.same_place(result.replayed)  # type: ignore[union-attr, arg-type]
        was_finer = shown and then is not None and then.same_place(result.replayed)  # type: ignore[arg-type]
        better = "the second look in training knew its place better" if was_finer else "its place is known better now"
        result.reason = f"the same bits; {better}" if is_finer else "the same site and the same bits"
        if not result.num_slots and not result.losses:
            result.reason = "the same site; nothing was recorded whose bits can be compared"
    elif now is None and then is not None:
        result.reason = _not_reproduced(result, then, parting)
    else:
        result.outcome = Outcome.ELSEWHERE
        result.reason = _elsewhere(result, same_place, now)


def _not_reproduced(result: Result, then: Site, parting: _Parting) -> str:
    """Where the two runs part, what that usually means, and what would tell more.

    A replay compares no argument of the model, so it cannot tell an input from the device that computed with it.
    """
    look = parting.dump.report.second_look
    twice = "it gave the same bits twice in training, which speaks against chance and the device"
    texts = [
        f"every value is finite now; {_where_they_part(result, then, parting)}",
        f"different here: {'; '.join(result.differs)}" if result.differs else "",
        _ALONE if _lacks_peers(then, parting) else "if you changed the code, the fault is gone",
        twice if look is not None and look.outcome == "same" and look.operator is not None else "",
        f"in training: {look.text}" if look is not None and look.outcome == "finite" else "",
        _next_text(parting),
    ]
    return "; ".join(text for text in texts if text)


_ALONE = (
    "alone it was not given what a collective of the loop brings from other ranks, so this says nothing about the fault"
)


def _lacks_peers(then: Site, parting: _Parting) -> bool:
    """Whether the fault was code of the loop on several ranks at once, which may have come from another one."""
    origin = parting.dump.report.origin
    at_once = origin is not None and origin.rank is None
    return parting.alone and parting.dump.world_size > 1 and then.phase is Phase.LOOP and at_once


def _where_they_part(result: Result, then: Site, parting: _Parting) -> str:
    modified = [f"batch{path}" for micro_batch in parting.recorded for path in micro_batch.modified]
    if modified:
        return f"{', '.join(modified[:4])} was overwritten after training had used it, so this is another batch"
    hooks = hooks_left_out(parting.dump.manifest.wrapper_description.details)
    if hooks and then.phase is Phase.REDUCE:
        return (
            f"it came with DDP's comm hook {', '.join(hooks)}, and this replay reduces without it: give "
            "Recipe(wrap=...) that registers the hook, or replay by the script"
        )
    different = result.first_difference or next((name for name, same in result.losses.items() if not same), None)
    if different is None and then.phase is Phase.LOOP:
        return "all is the same up to the end of the backward: code of the loop before the step did something else"
    if different is None:
        return "nothing that was recorded differs: what made it bad was not recorded"
    phase = result.first_phase or Phase.LOSS
    if phase is Phase.BACKWARD and not result.losses:
        phase = Phase.LOSS  # none was watched that could tell the forward from the backward
    return f"the runs part at {different}: {_PARTING[phase]}"


_PARTING = {
    Phase.FORWARD: (
        "the model was given something else: state that loop or model carry from step to step, a random stream that is "
        "not registered, or a collective in the model"
    ),
    Phase.LOSS: (
        "model or loss took in what this run does not give them: a collective, a step number, or state that the loop "
        "carries from step to step"
    ),
    Phase.BACKWARD: "the losses are the same, so a hook, or code in or after the backward, did something else",
    Phase.REDUCE: "each rank's own gradients are the same, so the communication did something else, such as its hook",
    Phase.LOOP: "gradients are the same after the backward, so code of the loop before the step did something else",
}
"""By where two runs part: what that usually means."""


def _next_text(parting: _Parting) -> str:
    """What would tell more."""
    if any(micro_batch.modified for micro_batch in parting.recorded):
        return "train with copy_batch=True to keep what training used"
    if not parting.alone or parting.dump.world_size == 1:
        return ""
    dump = parting.dump
    return f"with all ranks: {replay_all_text(str(dump.path), dump.manifest.script, dump.world_size)}"


def _elsewhere(result: Result, same_place: bool, now: Site | None) -> str:
    where = result.first_difference or next((name for name, same in result.losses.items() if not same), "nothing")
    upto = f"minima and maxima identical up to {result.last_same}" if result.last_same else "different from the start"
    if same_place:
        factor = f"; {result.factor}" if result.factor else ""
        return f"the same site, but other bits: {upto}; first different: {where}{factor}"
    if now is None:
        return f"this rank's values differ, all finite: {upto}; first different: {where}"
    agreement = upto if result.first_difference else "all compared slots are the same"
    shown = result.replayed or now
    return f"now first at {shown.phase!s} · {what(shown)}; {agreement}"


def _compare_slots(dump: Dump, rank: int, again: StepResult, alone: bool, left_out: LeftOut, result: Result) -> None:
    recorded = [(key, values) for key, values in recorded_slots(dump, rank) if key.micro_batch not in left_out.calls]
    reduced = False
    was_compiled = _was_compiled(key for key, _ in recorded)
    for key, values in recorded:
        reduced = reduced or key.phase is Phase.REDUCE
        if left_out.has(key) or (key not in again.slots and (was_compiled or _need_not_come_again(key))):
            continue
        if alone and (key.phase is Phase.REDUCE or (reduced and key.is_parameter_gradient)):
            continue  # after the first reduce the gradients that accumulate are not this rank's alone
        result.num_slots += 1
        if key in again.slots and _same_bits(values, again.slots[key]):
            result.num_same += 1
            if result.first_difference is None:
                result.last_same = str(key)
        elif result.first_difference is None:
            result.first_difference, result.first_phase = str(key), key.phase
    _find_extra_slots(recorded, again, result, watches_layers=dump.manifest.options.layers != "none")
    result.factor = _common_factor(recorded, again)


def _need_not_come_again(key: SlotKey) -> bool:
    """Whether a recorded slot may be missing in the replay.

    That holds for a watched loss that the recipe does not return (a note says so), and for a gradient as the loop had
    changed it. Where compiled code ran it holds for every slot: compiled code left all calls of a module in one slot,
    and the eager code around it meets other tensors.
    """
    return key.phase in (Phase.LOSS, Phase.LOOP) or (key.phase is Phase.BACKWARD and key.micro_batch is None)


def _common_factor(recorded: Slots, again: StepResult) -> str | None:
    """A sentence if all gradients differ by one factor: training that backpropagated ``loss / 2`` halves each."""
    ratios: list[float] = []
    for key, then in recorded:
        if key.phase is Phase.BACKWARD and key in again.slots:
            for a, b in zip(then, again.slots[key], strict=True):
                if math.isfinite(a) and math.isfinite(b) and b != 0.0:
                    ratios.append(a / b)
    if not ratios or math.isclose(ratios[0], 1.0) or not all(math.isclose(r, ratios[0], rel_tol=1e-3) for r in ratios):
        return None
    return f"gradients were {ratios[0]:.4g} times these: training backpropagated another loss; let step return that one"


def _find_extra_slots(recorded: Slots, again: StepResult, result: Result, watches_layers: bool) -> None:
    """Record forward and loss slots that only the replay has: a step that runs more is not the same step."""
    known = {key for key, _ in recorded}
    if _was_compiled(known):
        return  # compiled then, eager now
    extra = [key for key in again.slots if key not in known and key.phase not in (Phase.REDUCE, Phase.LOOP)]
    if any(key.phase is Phase.LOSS or (key.phase is Phase.FORWARD and watches_layers) for key in extra):
        extra = [key for key in extra if watches_layers or key.phase is Phase.LOSS]
        result.notes.append(f"the replay has {len(extra)} slots that were not recorded, first {extra[0]}")
        result.first_difference = result.first_difference or str(extra[0])


def _was_compiled(keys: Iterable[SlotKey]) -> bool:
    """Whether layers ran inside compiled code, where calls have no numbers."""
    return any(key.phase is Phase.FORWARD and key.call is None for key in keys)


def _same_bits(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return all(
        # Bits instead of ==, which calls 0.0 and -0.0 the same and NaN different from itself.
        (math.isnan(a) and math.isnan(b)) or struct.pack("d", a) == struct.pack("d", b)
        for a, b in zip(one, other, strict=True)
    )


def _compare_losses(recorded: list[MicroBatch], again: StepResult, left_out: LeftOut, result: Result) -> None:
    for micro_batch in recorded:
        for name, then in micro_batch.losses.items():
            if (micro_batch.index, name) in left_out.losses:
                continue  # its smallest and largest value are compared, as they were when it was watched
            now = again.losses.get((micro_batch.index, name))
            key = f"{name} of micro-batch {micro_batch.index}"
            if now is None:
                result.notes.append(f"{key} was watched in training; the step gives no such loss now: not compared")
                continue
            result.losses[key] = same_tensor(then, now)
            result.loss_values[key] = f"{_shown(then)} then, {_shown(now)} now"
        for path in micro_batch.modified:
            text = f"batch{path} was changed in place by the step, and the replay begins with the changed values"
            result.notes.append(f"{text}: train with copy_batch=True")


def same_tensor(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have equal shape, dtype and bytes, NaN included. Host sync: one per tensor."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    first, second = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return bool(torch.equal(first, second))


def _shown(loss: Tensor) -> str:
    if loss.numel() != 1:
        return f"{tuple(loss.shape)} {loss.dtype}"
    value = loss.detach().cpu()
    size = f"i{value.element_size()}"
    bits = (
        value.reshape(1).numpy().view(size)
        if value.dtype != torch.bfloat16
        else value.reshape(1).view(torch.int16).numpy()
    )
    mask = (1 << 8 * value.element_size()) - 1
    return f"{float(value):.9g} (0x{int(bits[0]) & mask:0{2 * value.element_size()}x})"


def differences(dump: Dump, rank: int) -> list[str]:
    """What differs here from the record: versions, settings that decide bits, and the device; one text each."""
    found = [
        f"{name} {then} then, {now} now"
        for name, now in versions().items()
        if name in ("torch", "cuda", "platform") and (then := dump.manifest.versions.get(name)) != now
    ]
    found += [
        f"{name} {then} then, {now} now"
        for name, now in vars(settings()).items()
        if name not in ("num_interop_threads",) and (then := getattr(dump.manifest.settings, name)) != now
    ]
    device = dump.evidence(rank).device
    here = Device("cuda", name=torch.cuda.get_device_name()) if torch.cuda.is_available() else Device("cpu")
    if (device.type, device.name) != (here.type, here.name):
        found.append(f"device {device.name or device.type} then, {here.name or here.type} now")
    return found
