"""Blame for the forward: modules, the code between them, the batch and the loss."""

from __future__ import annotations

from dataclasses import replace

from ddp_nanguard.probes.backward import GradientHook
from ddp_nanguard.probes.calls import ModuleCall, TensorRecord
from ddp_nanguard.probes.slot_roles import SlotRole
from ddp_nanguard.probes.slots import SlotStats, is_clean
from ddp_nanguard.probes.sources import KnownNonFinite, LossSource
from ddp_nanguard.report.types import Evidence, InlineCode, Phase, Site
from ddp_nanguard.report.wording import layer_text
from ddp_nanguard.tensors.minmax import evidence, kind_of

from .view import BlameInput, NonFiniteTensor, RankedSite, WorstKinds, worst


def forward_sites(blame_input: BlameInput) -> list[RankedSite]:
    """Sites of tensors that are bad in the forward and not masked by a parent's finite output, in execution order."""
    kinds = WorstKinds(blame_input.slot_stats)
    sites: list[RankedSite] = []
    handled: set[int] = set()
    low_confidence: set[int] = set()
    for stats in blame_input.slot_stats:
        record = stats.source
        if isinstance(record, TensorRecord) and id(record) not in handled and (kind := kinds.of(record)) is not None:
            handled.add(id(record))
            if not _is_masked_by_parent(record, kinds, kind) and not blame_input.is_ignored(record.call.layer):
                ranked = _forward_site(blame_input, record, kinds, kind, stats.order, low_confidence)
                sites.append(ranked)
                if ranked.low_confidence:
                    low_confidence.add(id(record))
    return sites


def known_nonfinite(slot_stats: list[SlotStats]) -> set[KnownNonFinite]:
    """What was non-finite in a clean step, so that it must not be blamed first in a later one.

    That is NaN or +inf in the forward that no parent's finite output masks, and any kind in an activation's gradient.
    -inf in the forward is left out: it is what masks are made of, and has low confidence anyway.

    Args:
        slot_stats: the slots of a step whose verdict was clean.
    """
    kinds = WorstKinds(slot_stats)
    found: set[KnownNonFinite] = set()
    for stats in slot_stats:
        source, kind = stats.source, kind_of(stats.minimum, stats.maximum)
        if (
            isinstance(source, TensorRecord)
            and kind in ("nan", "inf")
            and not _is_masked_by_parent(source, kinds, kind)
        ):
            found.add((source.call.layer, source.slot, kind))
        elif isinstance(source, GradientHook) and kind is not None:
            found.add((source.call.layer, "grad", kind))
    return found


def _is_masked_by_parent(record: TensorRecord, kinds: WorstKinds, kind: str) -> bool:
    enclosing = record.call.ancestors()
    if record.slot == "input":
        enclosing = [record.call, *enclosing]
    return any(kinds.masks(call, kind) for call in enclosing)


def _forward_site(
    blame_input: BlameInput,
    record: TensorRecord,
    kinds: WorstKinds,
    kind: str,
    order: int,
    low_confidence_before: set[int],
) -> RankedSite:
    call = record.call
    inline_code: InlineCode | None = None
    blamed_call, input_kind = call, _input_kind(call, kinds)
    # an input without a producer among the modules was made by the code around the call: the parent's, or the loop's
    if record.slot == "input":
        input_kind = None
        if call.parent is None:
            inline_code = InlineCode(None, "batch", call.layer)
        else:
            blamed_call = call.parent
            before = call.layer if call.is_ordered else None
            inline_code = InlineCode(blamed_call.layer, _clean_child_before(blamed_call, call, kinds), before)
    elif call.children and input_kind in (None, "unchecked"):
        input_kind = None
        inline_code = InlineCode(call.layer, _clean_child_before(call, None, kinds), None)
    site = Site(
        rank=blame_input.rank,
        step=blame_input.step,
        micro_batch=call.micro_batch,
        phase=Phase.FORWARD,
        layer=blamed_call.layer,
        call=blamed_call.number,
        slot=record.slot,
        kind=kind,
        inline_code=inline_code,
        evidence=_evidence_of(record),
        input_kind=input_kind,
        neg_inf_from=_source_of_negative_inf(call, kinds) if input_kind == "-inf" and record.slot == "output" else None,
        order=order,
    )
    is_known = (call.layer, record.slot, kind) in blame_input.known_nonfinite
    low_confidence = kind == "-inf" or is_known or _only_passed_on(call, kinds, kind, low_confidence_before)
    return RankedSite(site, low_confidence=low_confidence, order_key=call.micro_batch)


def _input_kind(call: ModuleCall, kinds: WorstKinds) -> str | None:
    """The worst kind among a call's inputs, None where all are finite.

    ``unchecked`` where an input was not looked at, or where no tensor was found among the arguments.
    """
    found = kinds.worst_of(call.inputs)
    if found is None and (not call.takes_tensors or not all(kinds.was_read(record) for record in call.inputs)):
        return "unchecked"
    return found


def _source_of_negative_inf(call: ModuleCall, kinds: WorstKinds) -> str | None:
    """Where the -inf among a call's inputs came from, in words: a layer, or the code around; None if there is none."""
    for record in call.inputs:
        if kinds.of(record) == "-inf":
            if record.slot == "output":
                return layer_text(record.call.layer)
            around = record.call.parent
            return "the training step" if around is None else f"code of {layer_text(around.layer)}"
    return None


def _only_passed_on(call: ModuleCall, kinds: WorstKinds, kind: str, low_confidence: set[int]) -> bool:
    """Whether all of the call's inputs that are bad in this way had low confidence themselves, and there are some."""
    bad = [record for record in call.inputs if kinds.of(record) == kind]
    return bool(bad) and all(id(record) in low_confidence for record in bad)


def _clean_child_before(parent: ModuleCall, child: ModuleCall | None, kinds: WorstKinds) -> str | None:
    earlier = parent.children if child is None else parent.children[: parent.children.index(child)]
    if not all(call.is_ordered for call in (*earlier, *([child] if child is not None else []))):
        return None
    clean = [call.layer for call in earlier if kinds.was_clean(call)]
    return clean[-1] if clean else None


def _evidence_of(record: TensorRecord) -> Evidence | None:
    tensor = record.ref()
    return evidence(tensor) if tensor is not None and record.is_still(tensor) else None


# -- the loss


def loss_sites(blame_input: BlameInput) -> list[RankedSite]:
    """Sites of watched losses that are bad, in the order in which they were watched."""
    sites: list[RankedSite] = []
    outputs = _worst_outputs(blame_input)
    for stats in blame_input.slot_stats:
        source, kind = stats.source, kind_of(stats.minimum, stats.maximum)
        if isinstance(source, LossSource) and kind is not None:
            site = Site(
                blame_input.rank, blame_input.step, source.micro_batch, Phase.LOSS, None, None, source.name, kind
            )
            loss = blame_input.losses.get((source.micro_batch, source.name))
            found = _if_bad(evidence(loss)) if loss is not None else None
            input_kind = outputs.get(source.micro_batch, "unchecked")
            follows = _gradient_was_bad_before(blame_input, source.micro_batch, stats.order)
            input_kind = "unchecked" if follows else input_kind
            site = replace(site, order=stats.order, input_kind=input_kind, evidence=found)
            sites.append(RankedSite(site, low_confidence=follows, order_key=source.micro_batch))
    return sites


def _if_bad(counted: Evidence | None) -> Evidence | None:
    """None for a tensor that holds nothing non-finite any more: the loop has written into it since."""
    if counted is None or counted.num_nan + counted.num_inf + counted.num_neg_inf == 0:
        return None
    return counted


def _gradient_was_bad_before(blame_input: BlameInput, micro_batch: int, order: int) -> bool:
    """Whether a gradient was bad before ``order``: a loss that is made of gradients (a penalty, forces) follows it."""
    return any(
        isinstance(r.source, GradientHook) and r.source.call.micro_batch == micro_batch and r.order < order
        for r in blame_input.slot_stats
        if not is_clean(r)
    )


def _worst_outputs(blame_input: BlameInput) -> dict[int, str | None]:
    """The worst kind among the root's outputs by micro-batch: None where they are finite, no entry without any."""
    found: dict[int, str | None] = {}
    for stats in blame_input.slot_stats:
        if stats.role is SlotRole.OUTPUT:
            micro_batch = stats.source.call.micro_batch
            kinds = (kind_of(stats.minimum, stats.maximum), found.get(micro_batch))
            found[micro_batch] = worst(kind for kind in kinds if kind is not None)
    return found


# -- the batch


def input_sites(blame_input: BlameInput) -> list[RankedSite]:
    """Sites of non-finite batch items that explain a bad input of the root, or a bad loss of a finite output.

    A NaN in the batch that explains neither may mean "label missing" and is no site.
    """
    sites: list[RankedSite] = []
    for order, bad_tensor in enumerate(_explaining(blame_input)):
        assert bad_tensor.micro_batch is not None
        site = Site(
            blame_input.rank,
            blame_input.step,
            bad_tensor.micro_batch,
            Phase.INPUT,
            None,
            None,
            bad_tensor.name,
            bad_tensor.kind,
        )
        site = replace(site, evidence=bad_tensor.evidence, order=order)
        sites.append(RankedSite(site, low_confidence=bad_tensor.kind == "-inf", order_key=bad_tensor.micro_batch))
    return sites


def _explaining(blame_input: BlameInput) -> list[NonFiniteTensor]:
    found: list[NonFiniteTensor] = []
    kinds = WorstKinds(blame_input.slot_stats)
    outputs = _worst_outputs(blame_input)
    losses = _bad_losses(blame_input)
    for micro_batch in dict.fromkeys(bad_tensor.micro_batch for bad_tensor in blame_input.batch):
        items = [bad_tensor for bad_tensor in blame_input.batch if bad_tensor.micro_batch == micro_batch]
        assert micro_batch is not None
        inputs = _root_inputs(blame_input, micro_batch)
        bad = [record for record in inputs if kinds.of(record) is not None]
        # where no input of the root was recorded, an output that is bad, or was not seen either, is explanation enough
        is_unseen_input = not inputs and outputs.get(micro_batch, "unchecked") is not None
        is_by_loss = micro_batch in losses and outputs.get(micro_batch) is None
        if bad:
            found += _matching(items, bad) or items
        elif is_unseen_input or is_by_loss:
            found += items
    return found


def _root_inputs(blame_input: BlameInput, micro_batch: int) -> list[TensorRecord]:
    found: list[TensorRecord] = []
    for stats in blame_input.slot_stats:
        source = stats.source
        is_root_input = isinstance(source, TensorRecord) and source.slot == "input" and source.call.parent is None
        if is_root_input and source.call.micro_batch == micro_batch:
            found.append(source)
    return found


def _matching(items: list[NonFiniteTensor], bad: list[TensorRecord]) -> list[NonFiniteTensor]:
    """Batch items that are bad inputs of the root themselves, else those of an equal shape.

    A copy to the device is another tensor, hence the shapes; a label that is bad as well mostly has another shape.
    """
    tensors = [tensor for record in bad if (tensor := record.ref()) is not None]
    same = [item for item in items if any(item.tensor is tensor for tensor in tensors)]
    shapes = {record.shape for record in bad}
    return same or [item for item in items if item.evidence is not None and item.evidence.shape in shapes]


def _bad_losses(blame_input: BlameInput) -> set[int]:
    return {
        r.source.micro_batch for r in blame_input.slot_stats if isinstance(r.source, LossSource) and not is_clean(r)
    }
