"""Why a step cannot be run again, in words for the report; None where it can."""

from __future__ import annotations

from ddp_nanguard.capture.record import StepRecord
from ddp_nanguard.context import GuardContext
from ddp_nanguard.report.types import WEIGHTS_WRITTEN, FaultReport, Phase

_OWN_STEP = (
    "the trainer's step was not handed to the guard as one that gives a loss: it updates, or draws its batches, itself"
)


def of_the_report(report: FaultReport) -> str | None:
    """What the report alone tells, the same on every rank."""
    origin = report.origin
    if origin is None:
        return "the fault has no origin that a step could show again"
    if origin.phase is Phase.OPTIMIZER:
        return "the update is at fault, and a step ends before it"
    if origin.phase is Phase.LOOP:
        return "code of the loop changed the gradients after the backward, and a step ends with that"
    if report.single_rank_view:
        return "peers did not answer, and a step takes all ranks"
    return None


def of_this_rank(context: GuardContext, record: StepRecord) -> str | None:
    """What this rank knows. Host sync: one per small argument of the recorded calls."""
    calls = record.window.calls.calls
    returned = [call for call in calls if call.has_returned]
    if calls and not returned:
        return "the call of the model is still running: the step, with its backward and its update, lies within it"
    if not calls:
        return _OWN_STEP if context.config.root == "step" else "no call of the model was seen in the step"
    problem = next((call.problem for call in returned if call.problem is not None), None)
    if problem is not None:
        return (
            problem if any(call.is_step for call in returned) else f"{problem}; guard.run(step, batch) keeps the step"
        )
    if any(call.has_changed_mode() for call in returned):
        return "model.train() or model.eval() was called after the forward"
    for call in returned:
        changed = call.changed_argument()
        if changed is not None:
            return f"argument {changed} was changed after the call; give the model a copy, or use copy_batch=True"
    if record.is_current and record.window.calls.weights_have_changed():
        return WEIGHTS_WRITTEN
    open_call = any(call.awaits_backward for call in returned)
    if open_call and context.wrapper.is_sharded:
        return "a forward still waits for its backward: the window is open"
    return context.wrapper.why_not_again()
