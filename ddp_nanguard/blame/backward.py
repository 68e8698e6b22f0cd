"""Blame for the backward: the layer whose output gradient is clean and whose input or parameter gradient is not."""

from __future__ import annotations

from dataclasses import replace

from ddp_nanguard.probes.backward import GradientHook
from ddp_nanguard.probes.calls import ModuleCall, TensorRecord
from ddp_nanguard.probes.gradient import GradientSource
from ddp_nanguard.probes.slots import SlotStats, is_clean
from ddp_nanguard.report.types import InlineCode, Phase, Site
from ddp_nanguard.tensors.minmax import kind_of

from .view import LAST_MICRO_BATCH, BlameInput, RankedSite


def backward_sites(blame_input: BlameInput) -> list[RankedSite]:
    """Sites of bad gradients: of activations, and of parameters before any communication, in execution order.

    Under DDP a parameter's gradient is what has accumulated so far, with what earlier reduces of the window brought.
    """
    sites: list[RankedSite] = []
    for micro_batch, slot_stats in _backward_stats(blame_input).items():
        for index, stats in enumerate(slot_stats):
            kind = kind_of(stats.minimum, stats.maximum)
            if kind is None:
                continue
            site = _BackwardBlame(blame_input, slot_stats[:index], slot_stats[index:]).site(stats, kind)
            if site is not None and not (site.layer is not None and blame_input.is_ignored(site.layer)):
                order_key = LAST_MICRO_BATCH if micro_batch is None else micro_batch
                sites.append(
                    RankedSite(
                        site,
                        low_confidence=(site.layer, site.slot, kind) in blame_input.known_nonfinite,
                        order_key=order_key,
                    )
                )
    return sites


def _backward_stats(blame_input: BlameInput) -> dict[int | None, list[SlotStats]]:
    """Slots of gradients before the reduce by micro-batch; None for those of several micro-batches together."""
    by_micro_batch: dict[int | None, list[SlotStats]] = {}
    bad_after_reduce: set[str] = set()
    seen_before: set[str] = set()
    for stats in blame_input.slot_stats:
        source = stats.source
        if isinstance(source, GradientSource):
            if source.at_update and source.name in seen_before:
                continue  # what the loop made of it, see `changed_gradients`
            seen_before.add(source.name)
        if isinstance(source, GradientSource) and not is_clean(stats):
            # once a reduce of this window has brought a bad value, what accumulates on it tells nothing of this rank
            if source.name in bad_after_reduce:
                continue
            if source.reduced:
                bad_after_reduce.add(source.name)
        if isinstance(source, GradientHook):
            by_micro_batch.setdefault(source.call.micro_batch, []).append(stats)
        elif isinstance(source, GradientSource) and not source.reduced:
            by_micro_batch.setdefault(source.micro_batch, []).append(stats)
    return by_micro_batch


def changed_gradients(slot_stats: list[SlotStats]) -> list[tuple[str, str]]:
    """Name and kind of each gradient that was finite wherever the backward left it, and bad at the update.

    Args:
        slot_stats: of one step.
    """
    was_finite: dict[str, bool] = {}
    found: dict[str, str] = {}
    for stats in slot_stats:
        source, kind = stats.source, kind_of(stats.minimum, stats.maximum)
        if not isinstance(source, GradientSource):
            continue
        if source.at_update and kind is not None and was_finite.get(source.name, False):
            found.setdefault(source.name, kind)
        was_finite[source.name] = was_finite.get(source.name, True) and kind is None
    return list(found.items())


class _BackwardBlame:
    """Blame for one bad gradient.

    Args:
        blame_input: of the rank.
        before: gradient slots of its micro-batch that were filled before it.
        after: those from it on.
    """

    def __init__(self, blame_input: BlameInput, before: list[SlotStats], after: list[SlotStats]) -> None:
        self._blame_input = blame_input
        self._before = before
        # by identity: two calls of one layer have different records
        self._clean = {id(r.source.record) for r in before if isinstance(r.source, GradientHook) and is_clean(r)}
        self._bad = {id(r.source.record) for r in before if isinstance(r.source, GradientHook) and not is_clean(r)}
        self._bad_later = {id(r.source.record) for r in after if isinstance(r.source, GradientHook) and not is_clean(r)}

    def site(self, stats: SlotStats, kind: str) -> Site | None:
        if isinstance(stats.source, GradientSource):
            return self._parameter_site(stats.source, kind, stats.order)
        return self._activation_site(stats.source.record, kind, stats.order)

    def _site(
        self, layer: str, call: ModuleCall | None, slot: str, kind: str, order: int, inline_code: InlineCode | None
    ) -> Site:
        micro_batch = call.micro_batch if call is not None else None
        number = call.number if call is not None else None
        blame_input = self._blame_input
        site = Site(
            blame_input.rank, blame_input.step, micro_batch, Phase.BACKWARD, layer, number, slot, kind, inline_code
        )
        return replace(site, order=order)

    def _parameter_site(self, source: GradientSource, kind: str, order: int) -> Site:
        calls = self._calls()
        owner, suspects = self._owner(source.name, calls)
        owned = [c for c in calls if c.layer == owner and source.micro_batch in (c.micro_batch, None)]
        only = owned[0] if len(owned) == 1 else None
        looked = not suspects and any(id(output) in self._clean for call in owned for output in call.outputs)
        site = self._site(owner, only, source.name, kind, order, None)
        input_kind = None if looked else "unchecked"
        return replace(site, micro_batch=source.micro_batch, input_kind=input_kind, suspects=suspects)

    def _owner(self, name: str, calls: list[ModuleCall]) -> tuple[str, tuple[str, ...]]:
        """The layer that a parameter's bad gradient is attributed to, and suspects where that is not known.

        Of several layers that share the parameter it is the one whose input gradient is bad too. Where there is none,
        or more than one, any of them may be it: then all are suspects.
        """
        sharers = self._blame_input.sharers_of(name, calls)
        if len(sharers) == 1:
            return sharers[0], ()
        bad = {c.layer for c in calls for s in c.inputs if id(s) in self._bad | self._bad_later}
        blamed = [layer for layer in sharers if layer in bad]
        return (blamed[0], ()) if len(blamed) == 1 else (sharers[0], tuple(sharers))

    def _calls(self) -> list[ModuleCall]:
        calls: dict[int, ModuleCall] = {}
        for stats in self._blame_input.slot_stats:
            if isinstance(stats.source, TensorRecord):
                for call in (stats.source.call, *stats.source.consumers, *stats.source.call.ancestors()):
                    calls[id(call)] = call
        return list(calls.values())

    def _activation_site(self, record: TensorRecord, kind: str, order: int) -> Site:
        blamed = self._blamed_consumers(record)
        if len(blamed) == 1:
            call = blamed[0]
            inline_code = self._inline_code(call.layer, record) if call.children else None
            return self._site(call.layer, call, "grad", kind, order, inline_code)
        outermost = _outermost_returning(record)
        if outermost.parent is None:
            inline_code = InlineCode(None, "loss" if self._blame_input.losses else None, outermost.layer)
            return self._site(outermost.layer, outermost, "grad", kind, order, inline_code)
        parent = outermost.parent
        # A tensor that several modules take has one gradient, their sum: no slot tells whose contribution was bad, so
        # the call around all of them is named, and they are suspects
        if blamed:
            around = _innermost_around(blamed) or parent
            suspects = tuple(dict.fromkeys(call.layer for call in blamed))
            return replace(self._site(around.layer, around, "grad", kind, order, None), suspects=suspects)
        inline_code = self._inline_code(parent.layer, record)
        return self._site(parent.layer, parent, "grad", kind, order, inline_code)

    def _blamed_consumers(self, record: TensorRecord) -> list[ModuleCall]:
        """Innermost calls that took the tensor, did not return it, and whose output gradients were all clean."""
        consumers = {id(call): call for call in record.consumers}.values()  # a call that is recomputed takes it again
        blamed = [call for call in consumers if self._got_clean_gradients(call, record)]
        outer = {id(ancestor) for call in blamed for ancestor in call.ancestors()}
        return [call for call in blamed if id(call) not in outer]

    def _got_clean_gradients(self, call: ModuleCall, record: TensorRecord) -> bool:
        outputs = {id(output) for output in call.outputs}
        return id(record) not in outputs and bool(outputs & self._clean) and not outputs & self._bad

    def _inline_code(self, layer: str, record: TensorRecord) -> InlineCode:
        if not record.call.is_ordered:
            return InlineCode(layer, None, None)
        return InlineCode(layer, self._last_clean_layer(), record.call.layer)

    def _last_clean_layer(self) -> str | None:
        for stats in reversed(self._before):
            if is_clean(stats):
                source = stats.source
                return (
                    self._blame_input.owner_of(source.name) if isinstance(source, GradientSource) else source.call.layer
                )
        return None


def _outermost_returning(record: TensorRecord) -> ModuleCall:
    """The outermost call that returns the tensor: the code of its caller goes on with it.

    A tensor that was first seen as an input was made by the code around the call that took it.
    """
    call = record.call
    if record.slot == "input":
        around = call.parent
        if around is None or not _returns(around, record):
            return call
        call = around
    while call.parent is not None and _returns(call.parent, record):
        call = call.parent
    return call


def _innermost_around(calls: list[ModuleCall]) -> ModuleCall | None:
    """The innermost call that encloses all of ``calls``; None where there is none. Its code joins what they did."""
    around = [{id(ancestor) for ancestor in call.ancestors()} for call in calls[1:]]
    return next((call for call in calls[0].ancestors() if all(id(call) in ids for ids in around)), None)


def _returns(call: ModuleCall, record: TensorRecord) -> bool:
    return any(output is record for output in call.outputs)
