"""Training loops as data: drawn by hypothesis, with one fault at a known place, and what must be said about it.

Nothing here runs a loop or knows the guard: the expectation comes from the drawn data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

STEPS = 3
BLOCKS = 3
"""Modules ``blocks.0`` to ``blocks.2``, each of which can spoil its output or its gradient."""
WRAPPERS = ("plain", "ddp", "fsdp1", "fsdp2")
SHARDED = ("fsdp1", "fsdp2")

PLACES = ("input", "unused", "forward", "grad", "loss", "code", "weight", "moved", "buffer", "lr")
"""
``input``: a number of the batch; ``unused``: of one that is drawn when another rank has none left; ``forward``,
``grad``: output and gradient of a block; ``loss``: code of the loss; ``code``: a gradient changed between backward and
step; ``weight``: a weight written before the step; ``moved``: a weight that ``optimizer.step`` itself makes bad;
``buffer``: a buffer written before the step; ``lr``: NaN from the schedule.
"""


@dataclass(frozen=True)
class LoopFault:
    """One fault; ``step`` and ``micro_batch`` say when, ``block`` where.

    Attributes:
        place: of `PLACES`.
        call: which call of the model in the micro-batch, from 1.
    """

    place: str
    rank: int
    step: int
    micro_batch: int = 0
    block: int = 0
    call: int = 1


@dataclass(frozen=True)
class Shape:
    """One training loop on two ranks.

    Attributes:
        wrapper: of `WRAPPERS`; two ranks with a plain model average their gradients themselves.
        accumulation: micro-batches per step.
        no_sync: gradients are communicated in the last micro-batch only.
        entry: ``guard``: ``guard(...)`` is called; ``model``: the model itself; ``run``: ``guard.run``.
        loader: batches come from ``guard.steps``.
        watched: the loop hands its loss to ``guard.watch``.
        loss_in_model: the model gets the target and returns its loss.
        clip: ``none``, ``torch``, ``guard`` or ``value``.
        scaler: a GradScaler scales the loss.
        optimizers: one, or two of which the second steps in every other step.
        surgery: what the loop makes of the gradients: ``none``, ``scale`` (in place), ``replace`` (by new tensors), or
            ``data`` (in place, unseen by autograd).
        second_call: the model is called twice for one loss.
        evaluates: an evaluation between steps.
        ema: ``none``, ``registered``, ``unknown`` to the guard.
        frozen: the second block has no gradients.
        tied: the last block shares the weight of the first one.
        sparse: an embedding with sparse gradients.
        norm: a BatchNorm.
        critic: another model, not guarded, is trained before it on an output of this one.
        deferred: the verdict is read one step late.
        zero: gradients are zeroed before the backward, not after the update.
        ends: ``even``: the ranks have equally many batches; else one has more: ``smallest``: they agree on the smallest
            number before; ``flag``: before each micro-batch on whether all have one; ``join``: torch's ``Join``.
        longer: the rank that has more.
        ignored: what FSDP is told to ignore: ``none``, the ``head`` or the ``bias`` of a block.
        anomaly: torch's anomaly mode: ``off``; ``traces``, without its check; ``raises``, as it is by default.
    """

    wrapper: str = "plain"
    accumulation: int = 1
    no_sync: bool = False
    entry: str = "guard"
    loader: bool = True
    watched: bool = True
    loss_in_model: bool = False
    clip: str = "none"
    scaler: bool = False
    optimizers: int = 1
    surgery: str = "none"
    second_call: bool = False
    evaluates: bool = False
    ema: str = "none"
    frozen: bool = False
    tied: bool = False
    sparse: bool = False
    norm: bool = False
    critic: bool = False
    deferred: bool = False
    zero: bool = False
    ends: str = "even"
    longer: int = 0
    ignored: str = "none"
    anomaly: str = "off"
    fault: LoopFault | None = None


def has_rest(shape: Shape) -> bool:
    """Whether the smallest number of batches is no whole number of steps: one micro-batch is left over."""
    return shape.ends != "even" and shape.accumulation > 1


def drops_rest(shape: Shape) -> bool:
    """Whether what is left over has a backward and no update: else its gradients, never reduced, would be used."""
    return has_rest(shape) and (shape.ends == "smallest" or shape.no_sync)


def num_trained(shape: Shape) -> int:
    """Micro-batches that every rank trains with."""
    return STEPS * shape.accumulation + has_rest(shape)


def num_batches(shape: Shape, rank: int) -> int:
    """Micro-batches that a rank has."""
    return num_trained(shape) + (2 if shape.ends != "even" and rank == shape.longer else 0)


def victim(shape: Shape) -> str:
    """The parameter of a block that is spoilt: one of which every rank holds a part."""
    return "weight" if shape.wrapper == "fsdp1" and shape.ignored != "bias" else "bias"


@dataclass(frozen=True)
class Said:
    """What a report says of a fault: exactly this, of what the loop shows.

    Attributes:
        rank: of the origin; None where the loop has carried the value to all ranks before anybody looked.
        step: of the origin.
        micro_batch: of the origin.
        phase: of the origin.
        layer: of the origin, "" for the root; None where several gradients are told of.
        slot: of the origin; None where the layer says it all.
    """

    rank: int | None
    step: int
    micro_batch: int | None
    phase: str
    layer: str | None
    slot: str | None


REFUSED = Said(None, 0, None, "refused", None, None)
"""A loop that is not taken: every rank raises as it first calls the model."""


def expected(shape: Shape) -> Said | None:
    """What is to be said of the fault of a shape; None where it heals unseen."""
    fault = shape.fault
    assert fault is not None
    if shape.ends == "join":
        return REFUSED
    at = (fault.rank, fault.step, fault.micro_batch)
    match fault.place:
        case "input":
            return Said(*at, "input", None, None)
        case "unused":
            return None
        case "forward":
            return Said(*at, "forward", f"blocks.{fault.block}", "output")
        case "grad":
            return Said(*at, "backward", f"blocks.{fault.block}", None)
        case "loss" if shape.loss_in_model:
            return Said(*at, "forward", "", None)
        case "loss" if shape.watched or shape.entry == "run":
            return Said(*at, "loss", None, None)
        case "loss":  # nobody was shown the loss: the gradient that comes out of it is what is seen
            return Said(*at, "backward", "", None)
        case "code" | "weight" | "moved":
            phase = {"code": "loop", "weight": "state", "moved": "optimizer"}[fault.place]
            if fault.place == "code" and _is_spread(shape):
                return Said(_rank_after_clipping(shape, fault), fault.step, None, phase, None, None)
            return Said(fault.rank, fault.step, None, phase, "blocks.0", f"blocks.0.{victim(shape)}")
        case "buffer":
            if fault.step == 0 or _is_healed(
                shape, fault
            ):  # what was so before training is told once, and stops nothing
                return None
            return Said(fault.rank, fault.step, None, "state", "norm", None)
    return Said(0, fault.step, None, "optimizer", None, "g0.lr")


def _is_spread(shape: Shape) -> bool:
    """Whether clipping makes all gradients bad before the guard looks at them; its own looks first, where it can."""
    looks_first = shape.clip == "guard" and shape.wrapper not in SHARDED and not shape.deferred
    is_alone = shape.wrapper == "fsdp2" and shape.ignored == "bias"  # clipped by itself
    return shape.clip in ("torch", "guard") and not looks_first and not is_alone


def _rank_after_clipping(shape: Shape, fault: LoopFault) -> int | None:
    """The norm that FSDP clips by is that of all ranks, but for what it ignores: all gradients of all ranks are bad."""
    return None if shape.wrapper in SHARDED and shape.ignored != "bias" else fault.rank


def _is_healed(shape: Shape, fault: LoopFault) -> bool:
    """Whether DDP overwrites the buffer by rank 0's: with each forward after one that had gradients and no no_sync."""
    if shape.wrapper != "ddp" or fault.rank == 0:
        return False
    if shape.critic:  # its call of the model has gradients
        return True
    return not (shape.evaluates and fault.step > 0) or (shape.accumulation > 1 and not shape.no_sync)


def _shapes() -> st.SearchStrategy[Shape]:
    flag = st.booleans()
    return st.builds(
        Shape,
        wrapper=st.sampled_from(WRAPPERS),
        accumulation=st.integers(1, 3),
        no_sync=flag,
        entry=st.sampled_from(("guard", "model", "run")),
        loader=flag,
        watched=flag,
        loss_in_model=flag,
        clip=st.sampled_from(("none", "torch", "guard", "value")),
        scaler=flag,
        optimizers=st.integers(1, 2),
        surgery=st.sampled_from(("none", "none", "scale", "replace", "data")),
        second_call=flag,
        evaluates=flag,
        ema=st.sampled_from(("none", "registered", "unknown")),
        frozen=flag,
        tied=flag,
        sparse=flag,
        norm=flag,
        critic=flag,
        deferred=flag,
        zero=flag,
        ends=st.sampled_from(("even", "even", "smallest", "flag", "flag", "join")),
        longer=st.integers(0, 1),
        ignored=st.sampled_from(("none", "head", "bias")),
        anomaly=st.sampled_from(("off", "off", "traces", "raises")),
    ).map(possible)


def possible(shape: Shape) -> Shape:
    """What torch itself can do, and what the guard takes.

    Args:
        shape: as drawn.
    """
    if shape.wrapper in SHARDED:  # no sparse gradients, and a shared parameter is one of the first module's group
        shape = replace(shape, sparse=False, tied=False)
        clip = "torch" if (shape.clip, shape.wrapper) == ("guard", "fsdp2") and shape.ignored != "none" else shape.clip
        shape = replace(shape, clip=clip)  # torch clips DTensors and others apart only
        is_mixed = shape.wrapper == "fsdp2" and (
            shape.ignored == "bias" or (shape.ignored, shape.optimizers) == ("head", 1)
        )
        shape = replace(shape, scaler=shape.scaler and not is_mixed)  # and so does a scaler
    else:
        shape = replace(shape, ignored="none")
    if shape.wrapper == "plain":
        shape = replace(shape, no_sync=False)
    if shape.ends == "join" and shape.wrapper != "ddp":
        shape = replace(shape, ends="flag")
    if shape.sparse:  # torch clips and scales no sparse gradients
        shape = replace(shape, clip="none", scaler=False, surgery="none")
    if shape.scaler or shape.sparse or shape.wrapper == "plain":
        shape = replace(shape, deferred=False)
    if shape.wrapper == "ddp" and (shape.second_call or shape.tied):
        shape = replace(shape, second_call=False)  # DDP broadcasts buffers in the second call
    return shape


@st.composite
def faulty_loops(draw: st.DrawFn) -> Shape:
    """A loop with a fault that can happen in it."""
    shape = draw(_shapes())
    places = [place for place in PLACES if can_happen(shape, place)]
    fault = LoopFault(
        place=draw(st.sampled_from(places)),
        rank=draw(st.integers(0, 1)),
        step=draw(st.integers(0, STEPS - 1 + has_rest(shape))),
        micro_batch=draw(st.integers(0, shape.accumulation - 1)),
        block=draw(st.integers(0, BLOCKS - 1)),
        call=draw(st.integers(1, 2)) if shape.second_call else 1,
    )
    return replace(shape, fault=fitted(shape, fault))


def clean_loops() -> st.SearchStrategy[Shape]:
    """A loop without a fault."""
    return _shapes().map(lambda shape: replace(shape, ends="flag") if shape.ends == "join" else shape)


def can_happen(shape: Shape, place: str) -> bool:
    """Whether a fault of this place is one in such a loop: a scaler skips steps with bad gradients by itself."""
    if place == "buffer":
        return shape.norm
    if place == "unused":
        return shape.ends == "flag"
    if shape.anomaly == "raises" and shape.ends != "join":  # it raises by itself where a NaN comes to a backward
        return place in ("code", "lr") and not (shape.scaler and place == "code")
    if shape.scaler and place in ("grad", "code"):
        return False
    return not (shape.scaler and place == "loss" and not (shape.watched or shape.entry == "run"))


def fitted(shape: Shape, fault: LoopFault) -> LoopFault:
    """The fault as it is felt: a bad weight lies in the last block, which always has one of its own."""
    if fault.place in ("code", "weight", "moved", "buffer", "lr"):
        fault = replace(fault, micro_batch=0, call=1)
    if fault.place in ("code", "weight", "moved"):
        fault = replace(fault, block=0)
    if fault.place == "moved" and fault.step >= STEPS - 1:
        fault = replace(fault, step=STEPS - 2)
    if fault.step == STEPS:
        fault = replace(fault, micro_batch=0)
        if drops_rest(shape) and fault.place in ("code", "lr"):
            fault = replace(fault, step=STEPS - 1)
    if fault.place == "unused":
        fault = replace(fault, rank=shape.longer, step=STEPS, micro_batch=0)
    if fault.place == "lr":
        fault = replace(fault, rank=0)
    return fault
