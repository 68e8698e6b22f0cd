"""How bad a step is on this rank: the slots of a board as one integer, on the device, without a host read."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .slots import ONE_SIDED, SlotBuffer, SlotPage, SlotRole

NORM_OVERFLOWS_AT = 1.8e19
"""The square of an element beyond this is infinite in float32."""
_SCALES_KEPT = 32


class Severity(enum.IntEnum):
    """What a rank says about the step; the largest over ranks is the verdict."""

    CLEAN = 0
    WARN = 1
    """Worth a warning: see `SeverityReducer`."""
    OVERFLOW = 2
    """Non-finite scaled gradients, which the scaler is going to skip."""
    LOSS = 3
    """A non-finite loss, nothing else."""
    FAULT = 4


class SeverityReducer:
    """Turns the slots of a board into this rank's severity, on the device, without a host read.

    Remarks: a gradient norm beyond ``grad_norm_warn``; gradients whose norm overflows float32, which clipping would
    turn into zeros; a bad buffer that DDP has overwritten.
    """

    def __init__(self, slots: SlotBuffer, device: torch.device, has_scaler: bool, norm_limit: float | None) -> None:
        self._norm_limit = norm_limit
        self._slots = slots
        self._device = device
        self._has_scaler = has_scaler
        self._scales: dict[SlotPage, _Limits] = {}
        self._known: dict[tuple[SlotPage, tuple[SlotRole, ...]], _Limits] = {}

    def severity(self, as_found_inf: Severity) -> Tensor:
        """int64, shape ().

        Args:
            as_found_inf: what the host knows already, such as a NaN learning rate.
        """
        judged = [found for page in self._slots.pages() if (found := self._scale(page).reduce(page)) is not None]
        if not judged:
            return torch.full((), int(as_found_inf), dtype=torch.int64, device=self._device)
        severity = _largest([severity.to(self._device) for severity, _ in judged])
        if self._has_scaler:
            severity = torch.maximum(severity, self._bad_forward([bad for _, bad in judged]))
        return severity.clamp_min(int(as_found_inf)) if as_found_inf else severity

    def _bad_forward(self, bad: list[dict[SlotRole, Tensor]]) -> Tensor:
        """A fault if a gradient is bad and so is the root's output: no scale can heal that. int64, shape ()."""
        flags: dict[SlotRole, Tensor] = {}
        for role in (SlotRole.OUTPUT, SlotRole.GRADIENT):
            found = [page[role].to(self._device, torch.int64) for page in bad if role in page]
            flags[role] = _largest(found) if found else torch.zeros((), dtype=torch.int64, device=self._device)
        return flags[SlotRole.OUTPUT] * flags[SlotRole.GRADIENT] * int(Severity.FAULT)

    def _scale(self, page: SlotPage) -> _Limits:
        scale = self._scales.get(page)
        if scale is None or scale.layout != page.layout or scale.used < len(page.sources):
            scale = self._scales[page] = self._known_scale(page)
        return scale

    def _known_scale(self, page: SlotPage) -> _Limits:
        """Loops that alternate between two kinds of steps need two."""
        key = (page, tuple(page.roles()))
        if key not in self._known:
            if len(self._known) >= _SCALES_KEPT:
                self._known.clear()
            self._known[key] = self._made_scale(page)
        return replace(self._known[key], layout=page.layout)

    def _made_scale(self, page: SlotPage) -> _Limits:
        roles, device = page.roles(), page.values.device
        warn_role = (
            SlotRole.GRADIENT if page.values.dtype is not torch.float64 else None
        )  # a norm in float64 is no worry
        limits = [[self._limits(role) for role in roles], [(NORM_OVERFLOWS_AT, NORM_OVERFLOWS_AT)] * len(roles)]
        levels = [
            [int(self._level(role)) for role in roles],
            [int(Severity.WARN if role is warn_role else Severity.CLEAN) for role in roles],
        ]
        distinguished = (SlotRole.OUTPUT, SlotRole.GRADIENT) if self._has_scaler else ()
        return _Limits(
            layout=page.layout,
            used=len(roles),
            is_silent=all(role in self._unread() for role in roles),
            limits=torch.tensor(limits, dtype=torch.float64, device=device),
            levels=torch.tensor(levels, dtype=torch.int64, device=device).unsqueeze(2),
            signs=torch.tensor([-1.0, 1.0], device=device),
            masks={
                role: torch.tensor([other is role for other in roles], device=device).unsqueeze(1)
                for role in distinguished
                if role in roles
            },
        )

    def _unread(self) -> set[SlotRole]:
        return {SlotRole.EVIDENCE} if self._has_scaler else {SlotRole.EVIDENCE, SlotRole.OUTPUT}

    def _limits(self, role: SlotRole) -> tuple[float, float]:
        """The largest -minimum and the largest maximum that are not bad."""
        if role is SlotRole.NORM:
            return math.inf, math.inf if self._norm_limit is None else self._norm_limit
        largest = torch.finfo(torch.float64).max
        return (math.inf if role in ONE_SIDED else largest), largest

    def _level(self, role: SlotRole) -> Severity:
        match role:
            case SlotRole.LOSS:
                return Severity.FAULT if self._has_scaler else Severity.LOSS
            case SlotRole.GRADIENT:
                return Severity.OVERFLOW if self._has_scaler else Severity.FAULT
            case SlotRole.EVIDENCE | SlotRole.OUTPUT:
                return Severity.CLEAN
            case SlotRole.WARN | SlotRole.NORM:
                return Severity.WARN
            case _:
                return Severity.FAULT


@dataclass(frozen=True)
class _Limits:
    """What the slots of a page are held against; made anew only when the page's layout changes.

    Attributes:
        layout: of the page.
        used: number of slots.
        is_silent: whether no slot says anything to the verdict.
        limits: float64, shape (2, used, 2): as bad, and as a remark.
        levels: int64, shape (2, used, 1): severity beyond the limit.
        signs: of minimum and maximum, so that both are held against an upper limit.
        masks: bool, shape (used, 1), by region that is told apart.
    """

    layout: int
    used: int
    is_silent: bool
    limits: Tensor
    levels: Tensor
    signs: Tensor
    masks: dict[SlotRole, Tensor]

    def reduce(self, page: SlotPage) -> tuple[Tensor, dict[SlotRole, Tensor]] | None:
        """Severity of a page, int64, shape (), and whether slots of a region are bad; None where it says nothing."""
        if self.is_silent:
            return None
        used = len(page.sources)
        within = page.values[:used] * self.signs <= self.limits[:, :used]  # a NaN is not
        severity = torch.where(within, 0, self.levels[:, :used]).amax()
        bad = {role: (within[0].logical_not() & mask[:used]).any() for role, mask in self.masks.items()}
        return severity, bad


def _largest(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(values).amax()
