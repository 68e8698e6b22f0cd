"""GradScaler: the loss on entry to ``scaler.scale``, the verdict on entry to ``scaler.step``, and a skipped step.

[Note: skipping under a scaler]
``scaler.step`` may never call ``optimizer.step``, so the verdict cannot wait for it. After a skip the scaler must
believe that it has unscaled and stepped, without an inf found, or its ``update`` raises; the growth tracker goes back
by one so that ``update`` leaves scale and tracker as they were.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from .base import Wrapper

BeforeStep = Callable[[torch.optim.Optimizer], bool]
"""Called on entry to ``scaler.step``; False: the step is to be skipped."""
OnLoss = Callable[[Any], None]
"""Called on entry to ``scaler.scale`` with what is to be scaled: a tensor, or several."""


class ScalerState(Protocol):
    """A scaler as it is now, or as it was in an earlier step."""

    def scale(self) -> Tensor | None:
        """The scale on its device, float32, shape (); None before the first ``scaler.scale``. Host sync: none."""

    def state(self) -> dict[str, Any]:
        """Scale and growth tracker as plain numbers. Host sync: two; fault path only."""


class WatchedScaler:
    """A scaler whose ``step`` and ``scale`` tell of themselves first, from `watch` until `close`.

    Attributes:
        scaler: the scaler.
        is_inside: whether ``scaler.step`` is running, which calls ``optimizer.step`` itself.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self.is_inside = False
        self._skipped_since_update = False
        self._before_step: BeforeStep | None = None
        self._on_loss: OnLoss | None = None

    def watch(self, before_step: BeforeStep, on_loss: OnLoss) -> None:
        """From now on call ``on_loss`` on entry to ``scaler.scale``, and ``before_step`` on entry to ``scaler.step``.

        The step is skipped where ``before_step`` returns False.
        """
        self._before_step, self._on_loss = before_step, on_loss
        # on the instance, as documented
        self.scaler.step = _Watched(self, "step")  # type: ignore[method-assign]
        self.scaler.scale = _Watched(self, "scale")  # type: ignore[method-assign]

    def close(self) -> None:
        """Give the scaler its own methods back."""
        self._before_step = self._on_loss = None
        # The attribute of the instance hides the method of the class.
        for name in ("step", "scale"):
            self.scaler.__dict__.pop(name, None)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """What the loop gets that calls ``step`` or ``scale`` of the scaler."""
        if name == "step":
            return self.step(*args, **kwargs)
        if self._on_loss is not None:
            self._on_loss((args, kwargs))
        return type(self.scaler).scale(self.scaler, *args, **kwargs)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``scaler.step`` with the verdict before it; returns None where the step is skipped."""
        if self._before_step is not None and not self._before_step(optimizer):
            self._mark_stepped(optimizer)
            return None
        self.is_inside = True
        try:
            return type(self.scaler).step(self.scaler, optimizer, *args, **kwargs)
        finally:
            self.is_inside = False

    def scale(self) -> Tensor | None:
        """The scale on its device, float32, shape (); None before the first ``scaler.scale``."""
        scale: Tensor | None = self.scaler._scale
        return scale

    def snapshot(self) -> ScalerSnapshot:
        """Scale and growth tracker as they are now, for a step whose verdict comes later. Host sync: none."""
        scale, tracker = self.scaler._scale, self.scaler._growth_tracker
        tensors = None if scale is None or tracker is None else (scale.clone(), tracker.clone())
        return ScalerSnapshot(self.scaler, tensors)

    def state(self) -> dict[str, Any]:
        """Scale and growth tracker as plain numbers. Host sync: two; fault path only."""
        return dict(self.scaler.state_dict())

    def has_found_none(self, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
        """Whether all gradients have been unscaled, and none overflowed: then ``step`` updates, whatever they are now.

        Host sync: one per optimizer and device; fault path only.
        """
        states = [self.scaler._per_optimizer_states.get(id(optimizer), {}) for optimizer in optimizers]
        if any(state.get("stage") is not OptState.UNSCALED for state in states):
            return False
        return not any(float(found) for state in states for found in state["found_inf_per_device"].values())

    def new_window(self) -> None:
        """Begin a new step: the next skip takes the growth tracker back again."""
        self._skipped_since_update = False

    def _mark_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        state = self.scaler._per_optimizer_states[id(optimizer)]
        scale = self.scaler._scale
        if scale is not None:
            # `update` raises where no found_inf is recorded, and lowers the scale where one is set.
            state["found_inf_per_device"] = {scale.device: torch.zeros((), dtype=torch.float32, device=scale.device)}
        state["stage"] = OptState.STEPPED
        # Once per `update`: with several optimizers ``scaler.step`` is skipped several times, and `update` counts one
        # step.
        if not self._skipped_since_update and self.scaler._growth_tracker is not None:
            self.scaler._growth_tracker -= 1  # update() counts this step as a good one
        self._skipped_since_update = True


class ScalerSnapshot:
    """Scale and growth tracker of an earlier step.

    Args:
        scaler: the scaler that they belong to.
        tensors: scale, float32, and tracker, int32, both of shape () on the scaler's device; None before its first use.
    """

    def __init__(self, scaler: GradScaler, tensors: tuple[Tensor, Tensor] | None) -> None:
        self._scaler = scaler
        self._tensors = tensors

    def scale(self) -> Tensor | None:
        """As of a `WatchedScaler`, in that step."""
        return None if self._tensors is None else self._tensors[0]

    def restore(self) -> None:
        """Write scale and tracker back into the scaler. Host sync: none."""
        scale, tracker = self._scaler._scale, self._scaler._growth_tracker
        if self._tensors is not None and scale is not None and tracker is not None:
            scale.copy_(self._tensors[0])
            tracker.copy_(self._tensors[1])

    def state(self) -> dict[str, Any]:
        """The scaler's state with the scale and tracker of that step. Host sync: two; fault path only."""
        state = dict(self._scaler.state_dict())
        if self._tensors is not None:
            scale, tracker = self._tensors
            state.update(scale=float(scale), _growth_tracker=int(tracker))
        return state


class _Watched:
    """Stands in for a method of the scaler; in a copy or a pickle the scaler has its own method again."""

    def __init__(self, watched: WatchedScaler, name: str) -> None:
        self._watched = watched
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._watched.call(self._name, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_method, (self._watched.scaler, self._name)


def _own_method(scaler: GradScaler, name: str) -> Any:
    return types.MethodType(getattr(type(scaler), name), scaler)


def require_fitting_scaler(scaler: object, wrapper: Wrapper) -> GradScaler | None:
    """The scaler to watch; None where there is none or it is disabled.

    Args:
        scaler: what the user gave.
        wrapper: of the model; it decides which scaler class is needed.

    Raises:
        ValueError: it is not a GradScaler, or the ranks would skip different steps with it.
    """
    if scaler is None:
        return None
    if not isinstance(scaler, GradScaler):
        raise ValueError(f"option scaler={type(scaler).__name__} is no GradScaler; give a torch.amp.GradScaler or None")
    if not scaler.is_enabled():
        return None
    needed = wrapper.scaler_class()
    if not isinstance(scaler, needed):
        raise ValueError(
            f"option scaler={type(scaler).__name__} with {wrapper.kind} lets ranks skip apart, each seeing its own "
            f"shard; give {needed.__module__}.{needed.__name__}"
        )
    return scaler
