"""Reasons that lie in the job, not in one operator: hyper-parameters, updates, communication, growth, chance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ddp_nanguard.replay.outcome import EAGER_NOW
from ddp_nanguard.site import Phase, SecondRun, Site

from .facts import WORDS, Facts, Reason, at, listed
from .numbers import is_overflow

MIN_VALUES = 4
MIN_TOTAL = 10.0
MIN_TOTAL_OVERFLOWED = 100.0
"""Where no step was traced, but +Inf came out of finite values: most likely an overflow."""
MIN_TOTAL_UNTRACED = 1000.0
"""Where nothing says that anything overflowed, growth must speak for itself."""
MIN_FACTOR = 1.2


def hyper_parameter(facts: Facts) -> Reason | None:
    """A learning rate or the like is not a number."""
    origin = facts.origin
    if origin is None or origin.phase is not Phase.OPTIMIZER or origin.layer is not None:
        return None
    return Reason("hyper-parameter", f"{origin.slot} is {WORDS[origin.kind]}")


def scale_collapse(facts: Facts) -> Reason | None:
    """A scaler has halved its scale for too long."""
    report = facts.report
    if report is None or not report.cause.startswith("scale collapse"):
        return None
    birth = facts.birth
    evidence = (f"the gradients are not finite since {at(birth)}",) if birth is not None else ()
    return Reason("scale collapse", report.cause, evidence)


def compiled_kernel(facts: Facts) -> Reason | None:
    """Bad where torch.compile's code runs, finite where the same step runs eagerly."""
    traced = facts.traced
    if traced is None or not facts.was_compiled or traced.target or traced.birth is not None:
        return None
    if EAGER_NOW in facts.differs:
        compiled = "compiled: the recorded step, which failed; the replay's model is not compiled"
    elif facts.outcome in ("same", "elsewhere"):
        compiled = "compiled: the recorded step, which failed, and the replay, which failed too"
    else:
        return None  # it was finite compiled, too: chance
    sentence = "the same step is finite when it runs eagerly: suspect the kernel that torch.compile made"
    eager = f"eager: every output of {traced.num_operators} operators is finite"
    return Reason("not reproduced", sentence, (compiled, eager))


def not_reproduced(facts: Facts) -> Reason | None:
    """The same step was finite this time."""
    in_place = facts.report.rerun if facts.report is not None else None
    finite_in_place = in_place is not None and in_place.outcome == "finite"
    if facts.birth is not None or not (facts.outcome == "not_reproduced" or (not facts.outcome and finite_in_place)):
        return None
    why = f"different here: {'; '.join(facts.differs)}" if facts.differs else "on equal software"
    where = f"in the replay, {why}" if facts.outcome else "once more in place, on the same device"
    sentence = f"the same step was finite {where}: {_chance(in_place)}"
    evidence = () if in_place is None else (f"rerun in place, before the dump: {in_place.text}",)
    return Reason("not reproduced", sentence, evidence)


def _chance(in_place: SecondRun | None) -> str:
    """A step that went bad twice where it ran is no matter of chance."""
    if in_place is not None and in_place.outcome == "same":
        return "it went bad twice where it ran, so suspect that device, its software, or code that has changed"
    return "nondeterminism, dirty memory or the device's hardware"


def reduce_overflow(facts: Facts) -> Reason | None:
    """Finite on every rank, too large after the sum."""
    origin, report = facts.origin, facts.report
    if origin is None or report is None or origin.phase is not Phase.REDUCE or origin.taken_in is not None:
        return None
    largest = {rank: _largest_gradient(history, origin) for rank, history in facts.histories.items()}
    known = {rank: value for rank, value in largest.items() if value is not None and math.isfinite(value)}
    total = sum(known.values())
    limits = [(name, torch.finfo(dtype).max) for name, dtype in _FLOATS if torch.finfo(dtype).max < total]
    if origin.kind == "-inf" or len(known) < report.world_size or not limits:
        return None
    evidence = [f"rank {rank}: largest {value:.4g}" for rank, value in sorted(known.items())[:8]]
    name, limit = limits[0]
    sentence = f"{origin.slot} overflowed in the reduce: every rank's gradient was finite, "
    sentence += f"their sum of up to {total:.4g} is more than {name} holds ({limit:.4g})"
    return Reason("overflow in the reduce", sentence, tuple(evidence))


_FLOATS = (("float16", torch.float16), ("float32", torch.float32))


def _largest_gradient(history: Mapping[str, np.ndarray[Any, Any]], origin: Site) -> float | None:
    slot = origin.slot
    values = [
        max(abs(low), abs(high))
        for label, (low, high) in zip(history["fault.labels"].tolist(), history["fault.values"].tolist(), strict=True)
        if label.startswith("backward|") and label.split("|")[2] == slot
    ]
    return max(values, default=None)


def update_overflow(facts: Facts) -> Reason | None:
    """Finite gradients, non-finite weights: an eps that vanishes in the dtype, or an overflow in the update."""
    origin = facts.origin
    if origin is None or origin.phase is not Phase.OPTIMIZER or origin.layer is None:
        return None
    dtype = facts.dtypes.get(origin.slot) or (origin.evidence.dtype if origin.evidence is not None else None)
    eps = _eps_of(facts, origin.slot)
    if dtype is not None and eps is not None and eps > 0 and _is_zero_in(eps, dtype):
        sentence = f"eps={eps:g} is 0 in {dtype}: the update of {origin.slot} divides by zero"
        return Reason("update overflow", sentence, (f"the optimizer is {facts.optimizers[0].get('class')}",))
    birth = facts.birth
    if birth is not None and birth.phase == "update":
        return Reason("update overflow", f"{birth.operator} of the update made {WORDS[birth.kind]} in {origin.slot}")
    return None


def _eps_of(facts: Facts, name: str) -> float | None:
    for optimizer in facts.optimizers:
        for group in optimizer.get("groups", []):
            if name in group.get("params", []) and isinstance(group.get("eps"), float):
                return float(group["eps"])
    return None


def _is_zero_in(value: float, dtype: str) -> bool:
    return torch.tensor(value, dtype=getattr(torch, dtype)).item() == 0.0


# -- growth
# ---------------------------------------------------------------------------------------------------------------------


def growth(facts: Facts) -> Reason | None:
    """The values grew over the last steps until one overflowed."""
    origin = facts.origin
    if origin is None or origin.phase not in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD):
        return None
    if facts.birth is not None and not is_overflow(facts.birth):
        return None
    found = {rank: series for rank, history in facts.histories.items() if (series := growing(history)) is not None}
    if not found or (origin.rank is not None and origin.rank not in found):
        return None
    rank = origin.rank if origin.rank in found else min(found)
    name, steps, values = found[rank]
    if values[-1] / values[0] < _least_growth(facts, origin):
        return None
    factor = (values[-1] / values[0]) ** (1 / (len(values) - 1))
    where = "on every rank" if len(found) == len(facts.histories) else f"on rank {listed(sorted(found))}"
    sentence = f"growth: {name} grew by a factor of {factor:.2f} per step since step {steps[0]}, {where}"
    evidence = [f"step {step}: {value:.4g}" for step, value in list(zip(steps, values, strict=True))[-6:]]
    evidence += _learning_rates(facts)
    if facts.birth is not None:
        evidence.append(f"then overflow in {at(facts.birth)}")
    return Reason("growth", sentence, tuple(evidence))


def _least_growth(facts: Facts, origin: Site) -> float:
    if facts.birth is not None:
        return MIN_TOTAL
    overflowed = origin.phase is Phase.FORWARD and origin.kind == "inf" and origin.taken_in is None
    return MIN_TOTAL_OVERFLOWED if overflowed else MIN_TOTAL_UNTRACED


def _learning_rates(facts: Facts) -> list[str]:
    """What most often makes values grow."""
    rates = [(str(o.get("class")), g["lr"]) for o in facts.optimizers for g in o.get("groups", []) if "lr" in g]
    shown = [f"{name} with lr={rate:g}" for name, rate in dict.fromkeys(rates) if isinstance(rate, float)]
    return [f"trained by {listed(shown)}"] if shown else []


def growing(history: Mapping[str, np.ndarray[Any, Any]]) -> tuple[str, list[int], list[float]] | None:
    """(name, steps, values) of what grew most steadily up to the last clean step, None where nothing did."""
    steps = [int(step) for step in history["steps"]]
    series = {"the largest gradient": history["gradient_max"], "the loss": np.abs(history["loss"])}
    series["the largest activation"] = np.array([_largest_activation(history, step) for step in steps])
    candidates = [(name, *_tail(steps, values.tolist())) for name, values in series.items()]
    fitting = [c for c in candidates if _grows(c[2])]
    return max(fitting, key=lambda c: c[2][-1] / c[2][0], default=None)


def _largest_activation(history: Mapping[str, np.ndarray[Any, Any]], step: int) -> float:
    labels, values = history[f"step.{step}.labels"].tolist(), history[f"step.{step}.values"]
    sizes = [float(np.abs(v).max()) for label, v in zip(labels, values, strict=True) if label.startswith("forward|")]
    finite = [size for size in sizes if math.isfinite(size)]
    return max(finite, default=math.nan)


def _tail(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """The longest end of a series in which every value is larger than the one before."""
    start = len(values)
    while start > 0 and math.isfinite(values[start - 1]) and values[start - 1] > 0:
        if start < len(values) and values[start - 1] >= values[start]:
            break
        start -= 1
    return steps[start:], values[start:]


def _grows(values: list[float]) -> bool:
    if len(values) < MIN_VALUES:
        return False
    total = values[-1] / values[0]
    return total >= MIN_TOTAL and bool(total ** (1 / (len(values) - 1)) >= MIN_FACTOR)
