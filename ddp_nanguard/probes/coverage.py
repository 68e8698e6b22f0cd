"""What was not looked at in a step, in words."""

from __future__ import annotations

from ddp_nanguard.context import GuardContext
from ddp_nanguard.report.types import Phase

from .compiled_calls import CompiledTensorRecord
from .slots import SlotStats


def unchecked(context: GuardContext) -> list[str]:
    """What this rank did not look at, in words."""
    found = sorted(context.forward.unchecked)
    if context.forward.skipped:
        found.append(f"{_modules(context.forward.skipped)} of skip_types: {_shown(context.forward.skipped)}")
    out = context.forward.unwatched()
    if out or context.budget.level_index:
        what = _modules(out) if out else "the activation gradients of modules that hold no others"
        found.append(
            f"{what} left out to keep within the budget (watched: {context.budget.level}); "
            "replay --trace finds the operator"
        )
    if context.window.micro_batches:
        silent = context.forward.unseen_modules()
        if silent:
            found.append(f"{_modules(silent)} whose hooks did not fire (not run, or compiled): {_shown(silent)}")
    watched = set(context.config.watch)
    found += [f"phase {phase} (not watched)" for phase in Phase if str(phase) not in watched]
    return found


def compiled_layers_that_ran(context: GuardContext) -> set[str]:
    """Layers whose hooks in compiled code have run in the open window. Host sync: one per page of slots."""
    return _traced(context.slots.slot_stats())


def _traced(slot_stats: list[SlotStats]) -> set[str]:
    return {r.source.call.layer for r in slot_stats if isinstance(r.source, CompiledTensorRecord)}


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


def _modules(names: list[str]) -> str:
    return "1 module" if len(names) == 1 else f"{len(names)} modules"


def _shown(names: list[str]) -> str:
    return ", ".join(name or "(root)" for name in names[:8]) + (", ..." if len(names) > 8 else "")
