"""What the guard did not look at in a step, in words for the report, and whether the hooks on the model run at all."""

from __future__ import annotations

import logging

from ddp_nanguard.config import GuardConfig
from ddp_nanguard.report.types import WATCHABLE
from ddp_nanguard.report.wording import layer_text, listed, plural

from .calls import ModuleCall
from .compiled_calls import CompiledTensorRecord
from .forward import ForwardProbe
from .slots import SlotBuffer, SlotStats

_log = logging.getLogger(__name__)
_NO_CALLS = (
    "no call of the model was seen, although a backward ran: its code was compiled without the guard's hooks, or runs "
    "without grad mode; faults are not attributed to layers (make the guard of what the loop calls, and compile before "
    "its first step)"
)
NO_LAYERS = "the model's layers, which a step does not look at (layers='none')"


def unchecked(
    config: GuardConfig, forward: ForwardProbe, calls: list[ModuleCall] | None, stats: list[SlotStats]
) -> list[str]:
    """Everything that this rank did not look at in a step, one phrase each; empty where all was watched.

    Args:
        config: whose ``watch`` can leave phases out.
        forward: whose modules can be skipped, unwatched or of a kind that no hook reaches.
        calls: of the step; None where it has no micro-batch and no module was to run.
        stats: the slots of the step, expanded: they tell which modules ran inside compiled code.
    """
    found = _modules(config, forward, calls, stats) if forward.watched.layers else []
    if not forward.watched.layers and config.layers == "none":
        found.append(NO_LAYERS)
    return found + [f"phase {phase} (not watched)" for phase in WATCHABLE if phase not in config.watched]


def _modules(
    config: GuardConfig, forward: ForwardProbe, calls: list[ModuleCall] | None, stats: list[SlotStats]
) -> list[str]:
    found = sorted(forward.unchecked)
    if forward.skipped:
        found.append(f"{plural(len(forward.skipped), 'module')} of skip_types: {_shown(forward.skipped)}")
    out = forward.unwatched()
    if out:
        what = plural(len(out), "module")
        found.append(f"{what} left out by layers={config.layers!r} ({_shown(out)}); replay --trace finds the operator")
    if calls is not None:
        unseen = forward.unseen_modules({call.layer for call in calls} | compiled_layers_that_ran(stats))
        if unseen:
            found.append(
                f"{plural(len(unseen), 'module')} whose hooks did not fire (not run, or compiled): {_shown(unseen)}"
            )
    return found


def compiled_layers_that_ran(slot_stats: list[SlotStats]) -> set[str]:
    """Clean names of the modules whose hooks ran inside compiled code, by the slots that they filled."""
    return {stats.source.call.layer for stats in slot_stats if isinstance(stats.source, CompiledTensorRecord)}


class HookCheck:
    """Warns in the log, once per kind, that hooks on the model do not run, and on which modules.

    Args:
        forward: the probe whose hooks they are.
        slots: where the hooks leave their results.
    """

    def __init__(self, forward: ForwardProbe, slots: SlotBuffer) -> None:
        self._forward = forward
        self._slots = slots
        self._told_of_no_calls = False
        self._checked_compiled = False

    def after_backward(self, step: int, root_is_traced: bool) -> None:
        """Warn if no hook saw the forward of a step that ran a backward.

        Args:
            step: its number, for the log.
            root_is_traced: whether the root itself runs inside compiled code, where it makes no call record.

        Host sync: one per page of slots in the first step of a compiled model, else none.
        """
        # once only, since it makes the host wait for the slots
        if self._forward.compiled_slots is not None and not self._checked_compiled:
            self._checked_compiled = True
            self._check_compiled(self._forward.compiled_slots.layers)
        saw_something = bool(self._forward.calls) or root_is_traced
        if not saw_something and self._forward.modules and not self._told_of_no_calls:
            self._told_of_no_calls = True
            _log.warning("step %d: %s", step, _NO_CALLS)

    def _check_compiled(self, layers: list[str]) -> None:
        forward = self._forward
        ran = compiled_layers_that_ran(self._slots.slot_stats()) | {call.layer for call in forward.calls}
        silent = sorted(set(layers) - ran - forward.without_forward)
        if silent:
            _log.warning(
                "no hook runs in %s of compiled code (%s): it was compiled before the guard was made (make the guard "
                "before the first call), or is not called; a fault in there is not attributed to a layer",
                plural(len(silent), "module"),
                _shown(silent),
            )


def _shown(names: list[str]) -> str:
    return listed(layer_text(name) for name in names)
