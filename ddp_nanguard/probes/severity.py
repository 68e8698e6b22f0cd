"""How bad a step is on this rank: all slots reduced to one integer, on the device, without a host read."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ddp_nanguard.config import GuardConfig
from ddp_nanguard.tensors.accelerator import on_device

from .slot_pages import SlotPage
from .slot_roles import ONE_SIDED, SlotRole
from .slots import SlotBuffer

NORM_OVERFLOWS_AT = 1.8e19
"""The square of a larger element is infinite in float32, and so is every norm that contains it."""
_MAX_CACHED_LIMITS = 32


class Severity(enum.IntEnum):
    """What a rank says about the step. The verdict is the largest over all ranks, so the order of the values counts."""

    CLEAN = 0
    WARN = 1
    """Worth a warning in the log, see `SeverityReducer`; the update goes ahead."""
    OVERFLOW = 2
    """Non-finite scaled gradients: the scaler is going to skip the update."""
    LOSS = 3
    """A non-finite loss whose gradients are all finite; the option ``on_loss`` decides."""
    FAULT = 4


class SeverityReducer:
    """Reduces the slots of the open window to this rank's severity, on the device, without a host read.

    A warning are: a norm or a loss beyond the option that limits it; gradients whose norm overflows float32, which
    clipping would turn into zeros; a bad buffer that DDP has overwritten.

    Args:
        slots: of the rank.
        device: on which the severity is wanted, that of the verdict's collective.
        has_scaler: whether a GradScaler skips non-finite gradients by itself.
        warn_limits: by role, the number beyond which a slot is worth a warning; see `warn_limits`.
    """

    def __init__(
        self, slots: SlotBuffer, device: torch.device, has_scaler: bool, warn_limits: Mapping[SlotRole, float]
    ) -> None:
        self._warn_limits = warn_limits
        self._slots = slots
        self._device = device
        self._has_scaler = has_scaler
        # Limits are a few kernels, so they are made only when the layout of a page or its number of slots changes. The
        # second dict keeps those of earlier layouts: loops that alternate between two kinds of steps need both again
        self._limits: dict[tuple[SlotPage, int, int], _Limits] = {}
        self._cached_limits: dict[Any, _Limits] = {}

    def severity(self, as_found_inf: Severity) -> Tensor:
        """This rank's severity: int64, shape (), on the device. At most five kernels per dtype, no host read.

        Args:
            as_found_inf: the least that it shall be, from what the host knows already, such as a NaN learning rate.
        """
        reduced = [found for page in self._slots.pages() if (found := self._limits_of(page).reduce(page)) is not None]
        if not reduced:
            return torch.full((), int(as_found_inf), dtype=torch.int64, device=self._device)
        severity = _largest([on_device(severity, self._device) for severity, _ in reduced])
        if self._has_scaler:
            severity = torch.maximum(severity, self._bad_forward([bad for _, bad in reduced]))
        return severity.clamp_min(int(as_found_inf)) if as_found_inf else severity

    def _bad_forward(self, bad: list[dict[SlotRole, Tensor]]) -> Tensor:
        """FAULT if a gradient and the root's output are both bad, which no scale can heal; else 0. int64, shape ()."""
        flags: dict[SlotRole, Tensor] = {}
        for role in (SlotRole.OUTPUT, SlotRole.GRADIENT):
            found = [on_device(page[role].to(torch.int64), self._device) for page in bad if role in page]
            flags[role] = _largest(found) if found else torch.zeros((), dtype=torch.int64, device=self._device)
        return flags[SlotRole.OUTPUT] * flags[SlotRole.GRADIENT] * int(Severity.FAULT)

    def _limits_of(self, page: SlotPage) -> _Limits:
        key = (page, page.judged.used, page.num_norms)
        limits = self._limits.get(key)
        if limits is None or limits.layout != page.layout:
            if len(self._limits) >= _MAX_CACHED_LIMITS:
                self._limits.clear()
            limits = self._limits[key] = replace(self._cached(page), layout=page.layout)
        return limits

    def _cached(self, page: SlotPage) -> _Limits:
        """The limits for the roles of the page, made where they are not in the cache yet."""
        roles = page.judged_roles()
        key = (page.kind, tuple(roles))
        if key not in self._cached_limits:
            if len(self._cached_limits) >= _MAX_CACHED_LIMITS:
                self._cached_limits.clear()
            self._cached_limits[key] = self._make_limits(page.kind, roles)
        return self._cached_limits[key]

    def _make_limits(self, kind: tuple[torch.device, torch.dtype], roles: list[tuple[SlotRole, int]]) -> _Limits:
        """By kernels that fill memory on the device: the host never waits for one of its copies. See `_Limits`."""
        device, kept = kind
        # a comparison within one dtype takes half the time; that of half precision is float32 as well
        dtype = torch.float64 if kept is torch.float64 else torch.float32
        # the squares of a norm overflow float64 only beyond 1e154, which is not worth a warning
        warns = dict(self._warn_limits) | ({} if kept is torch.float64 else {SlotRole.GRADIENT: NORM_OVERFLOWS_AT})
        largest = torch.finfo(dtype).max
        # alike slots in a row: of a minimum and a maximum, or of a screen, which has nothing but an upper end
        runs = [(role, width, len(list(same))) for (role, width), same in groupby(roles)]

        def row(number: Callable[[SlotRole, bool], float], dtype: torch.dtype) -> Tensor:
            """``number(role, is_upper)`` for each number of the page, shape (numbers,)."""
            parts = [
                _repeated([number(role, end) for end in _ENDS[width]], n, dtype, device) for role, width, n in runs
            ]
            return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)

        distinguished = (SlotRole.OUTPUT, SlotRole.GRADIENT) if self._has_scaler else ()
        present = {role for role, _ in roles}
        return _Limits(
            layout=-1,
            is_silent=present <= self._unread(),
            limits=torch.stack(
                (
                    row(lambda role, is_upper: self._range(role, largest)[is_upper], dtype),
                    row(lambda role, is_upper: _warn_limit(warns, role, is_upper), dtype),
                )
            ),
            levels=torch.stack(
                (
                    row(lambda role, is_upper: int(self._level(role)), torch.int64),
                    row(lambda role, is_upper: int(Severity.WARN if role in warns else Severity.CLEAN), torch.int64),
                )
            ),
            clean=torch.zeros((), dtype=torch.int64, device=device),
            signs=row(lambda role, is_upper: 1 if is_upper else -1, dtype) if any(w == 2 for _, w in roles) else None,
            masks={
                role: row(lambda other, is_upper, role=role: other is role, torch.bool)  # type: ignore[misc]
                for role in distinguished
                if role in present
            },
        )

    def _unread(self) -> set[SlotRole]:
        return {SlotRole.EVIDENCE} if self._has_scaler else {SlotRole.EVIDENCE, SlotRole.OUTPUT}

    def _range(self, role: SlotRole, largest: float) -> tuple[float, float]:
        """The largest negated minimum and the largest maximum that a slot of this role may have.

        Args:
            role: of the slot.
            largest: the largest finite number.
        """
        if role in (SlotRole.OPEN, SlotRole.NORM, SlotRole.PARAMETER_NORM):
            return math.inf, math.inf
        return (math.inf if role in ONE_SIDED else largest), largest

    def _level(self, role: SlotRole) -> Severity:
        match role:
            case SlotRole.LOSS:
                return Severity.FAULT if self._has_scaler else Severity.LOSS
            case SlotRole.GRADIENT:
                return Severity.OVERFLOW if self._has_scaler else Severity.FAULT
            case SlotRole.EVIDENCE | SlotRole.OUTPUT:
                return Severity.CLEAN
            case SlotRole.WARN | SlotRole.NORM | SlotRole.PARAMETER_NORM:
                return Severity.WARN
            case _:
                return Severity.FAULT


@dataclass(frozen=True)
class _Limits:
    """What the slots of a page that are judged are compared with, number by number.

    Attributes:
        layout: of the page when these were made; another makes them stale.
        is_silent: whether no role on the page can change the verdict.
        limits: shape (2, numbers): beyond the first a number is bad, beyond the second worth a warning.
        levels: int64, shape (2, numbers): the severity of a number beyond that limit.
        clean: int64, shape (): the severity of any other.
        signs: shape (numbers,), -1 for a minimum and else 1, so that all are compared with an upper limit; None where
            there is no minimum.
        masks: by role that the verdict needs apart, the numbers that have it; bool, shape (numbers,).
    """

    layout: int
    is_silent: bool
    limits: Tensor
    levels: Tensor
    clean: Tensor
    signs: Tensor | None
    masks: dict[SlotRole, Tensor]

    def reduce(self, page: SlotPage) -> tuple[Tensor, dict[SlotRole, Tensor]] | None:
        """The severity of the page, int64, shape (), and by role whether a slot is bad, bool, shape ().

        None where no role on the page can change the verdict. No host read.
        """
        if self.is_silent:
            return None
        values = page.judged_numbers()
        within = (values if self.signs is None else values * self.signs) <= self.limits  # False for a NaN
        severity = torch.where(within, self.clean, self.levels).max()  # faster than ``masked_fill`` and ``amax``
        bad = {role: (within[0].logical_not() & mask).any() for role, mask in self.masks.items()}
        return severity, bad


_ENDS = {1: (True,), 2: (False, True)}
"""Which ends the numbers of a slot are, by their number: a norm has an upper end only."""


def warn_limits(config: GuardConfig) -> dict[SlotRole, float]:
    """The options that limit a norm or a loss, by the role of its slots; those that are None have none."""
    limits = {
        SlotRole.NORM: config.grad_norm_warn,
        SlotRole.PARAMETER_NORM: config.parameter_norm_warn,
        SlotRole.LOSS: config.loss_warn,
    }
    return {role: limit for role, limit in limits.items() if limit is not None}


def _warn_limit(limits: Mapping[SlotRole, float], role: SlotRole, is_upper: bool) -> float:
    """The largest number of a slot, or negated minimum, that is not worth a warning."""
    if role is SlotRole.LOSS and not is_upper:  # a loss may be as small as it likes
        return math.inf
    return limits.get(role, math.inf)


def _repeated(numbers: list[float], count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers one after the other, ``count`` times, shape (count * numbers,)."""
    columns = [torch.full((count,), number, dtype=dtype, device=device) for number in numbers]
    return torch.stack(columns, dim=1).view(-1)


def _largest(values: list[Tensor]) -> Tensor:
    if len(values) == 2:
        return torch.maximum(*values)
    return values[0] if len(values) == 1 else torch.stack(values).amax()
