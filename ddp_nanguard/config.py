"""`GuardConfig`: every option of the guard, with its environment variable."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import json
import math
import os
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args, get_origin

from .report.types import PHASES

MAX_HISTORY = 100_000
"""Steps whose slots may be kept on the device."""
ENV_PREFIX = "NANGUARD_"


@dataclass(frozen=True)
class GuardConfig:
    """Options of `NanGuard`. Each is also an environment variable ``NANGUARD_<OPTION>`` that wins over the code.

    Lists are given in the environment as comma-separated values, booleans as 0/1/true/false, None as ``none``.
    """

    # - What is done about a fault
    enabled: bool = True
    """Whether the guard looks at anything; if not, a step has no probe and no collective of the guard's."""
    on_fault: Literal["stop", "skip", "warn"] = "stop"
    """``stop`` raises on every rank, ``skip`` clears the gradients and goes on, ``warn`` lets the update go ahead."""
    max_skips: int = 10
    """Under ``skip``, the number of skipped steps after which the next fault stops."""
    on_loss: Literal["stop", "warn"] = "stop"
    """What a non-finite loss does whose gradients are all finite; ignored with a scaler."""

    # - What is looked at
    watch: tuple[str, ...] = PHASES
    """Phases that are looked at, by the values of `Phase`; by default all."""
    skip_types: tuple[str, ...] = ()
    """Class names of modules that get no hooks."""
    ignore: tuple[str, ...] = ()
    """fnmatch patterns on layer and parameter names that are never a trigger and never an origin."""
    history: int = 16
    """Number of past clean steps whose minimum and maximum per slot are kept, on the device."""

    # - Dumps and the end of a job
    dump_dir: str | None = "nan_dumps"
    """Directory of the dumps; None writes none."""
    dump_keep: int = 5
    """Number of whole dumps that are kept; 0 keeps all."""
    dump_weights: bool = True
    """Whether a dump holds the weights."""
    dump_optimizer: bool = True
    """Whether a dump holds the optimizer state."""
    exit_code: int = 65
    """Exit code of every worker when the error is not caught."""
    timeout_s: float = 60.0
    """Seconds that the fault path waits for peers."""

    # - Thresholds
    grad_norm_warn: float | None = None
    """Warn when the L2 norm of this rank's gradients, or of its shards of them, exceeds this: one more pass."""
    parameter_norm_warn: float | None = None
    """Warn when the L2 norm of the gradient of one parameter, or of this rank's shard of it, exceeds this: one more
    pass, the same one as for ``grad_norm_warn``."""
    loss_warn: float | None = None
    """Warn when a watched loss exceeds this."""
    state_every: int = 100
    """Optimizer state is looked at in the first step and then once in this number of steps."""
    max_consecutive_overflows: int = 20
    """Overflows in a row after which a scaler counts as collapsed."""
    scale_floor: float = 2.0**-14
    """A scale below this counts as collapsed."""

    # - What is kept of a step, and what that may cost
    copy_batch: bool = False
    """Copy each micro-batch, and what the model is called with, instead of keeping references."""
    hold_batches: Literal["device", "host"] = "device"
    """Where the window's micro-batches are held."""
    redact: bool = False
    """Keep the contents of batches out of dumps: shapes and dtypes only. Such a dump cannot be replayed."""
    keep_previous: bool = False
    """Keep all that an update changes from before it, so that a bad update can be undone and replayed."""
    look_again: bool = True
    """After a fault run its step once more in place, on all ranks together, and name layer, operator, line and
    reason."""
    verdict: Literal["sync", "deferred"] = "sync"
    """``deferred``: a fused optimizer withholds a bad update by itself, and the host learns of it one step later."""
    layers: Literal["none", "blocks", "every"] = "none"
    """Modules whose inputs, outputs and their gradients are looked at in every step: none, those that hold others, or
    every one."""
    root: Literal["layer", "step"] = "layer"
    """What a call of the unwrapped model is: a layer, or the step of a trainer that runs it as the model's forward."""
    first_step: int = 0
    """Number of the first step; a resumed run gives its global step."""
    log_every: int = 0
    """``on_metrics`` is called in steps whose number is a multiple of this; 0 never calls it."""

    @classmethod
    def from_code_and_environment(
        cls, options: Mapping[str, Any], environ: Mapping[str, str] | None = None
    ) -> GuardConfig:
        """The options given in code, overridden by the environment.

        Args:
            options: by name, as `NanGuard` got them.
            environ: variables to read; by default those of the process, or none inside `environment_ignored`.

        Raises:
            ValueError: an unknown option or a value that does not fit, naming the option, the value and the valid ones.
        """
        environ = _environment() if environ is None else environ
        known = {field.name for field in dataclasses.fields(cls)}
        for name in options:
            if name not in known:
                raise ValueError(f"unknown option {name!r}; valid options: {', '.join(sorted(known))}")
        merged = dict(options)
        for key, text in environ.items():
            if not key.upper().startswith(ENV_PREFIX) or key in RESERVED_ENVIRONMENT:
                continue
            name = key.removeprefix(ENV_PREFIX).lower()
            if name not in known or key != key.upper():
                valid = ", ".join(sorted(ENV_PREFIX + field.upper() for field in known))
                raise ValueError(f"unknown environment variable {key}={text!r}; valid ones: {valid}")
            merged[name] = _parse(key, text, _annotation(cls, name))
        config = cls(**{name: _frozen(value) for name, value in merged.items()})
        config._validate()
        return config

    def _validate(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name), _annotation(type(self), field.name))
        if not self.watch:
            raise ValueError(f"option watch=() looks at nothing; give some of {', '.join(PHASES)}, or enabled=False")
        if self.dump_dir is not None and (not self.dump_dir or "\0" in self.dump_dir):
            raise ValueError(f"option dump_dir={self.dump_dir!r} names no directory; give a path, or None for no dumps")
        for phase in self.watch:
            if phase not in PHASES:
                raise ValueError(f"option watch={phase!r} is no phase; valid: {', '.join(PHASES)}")
        for name in ("max_skips", "dump_keep", "first_step", "log_every"):
            _require(name, getattr(self, name), getattr(self, name) >= 0, "a number of at least 0")
        _require("history", self.history, self.history <= MAX_HISTORY, f"a number of steps up to {MAX_HISTORY}")
        _require("first_step", self.first_step, self.first_step < 2**62, "a number below 2**62")
        for name in ("history", "state_every", "max_consecutive_overflows"):
            _require(name, getattr(self, name), getattr(self, name) >= 1, "a number of at least 1")
        _require("exit_code", self.exit_code, 1 <= self.exit_code <= 255, "a code from 1 to 255")
        _require("timeout_s", self.timeout_s, 0 < self.timeout_s <= 1e7, "a number of seconds above 0, at most 1e7")
        _require("scale_floor", self.scale_floor, 0 <= self.scale_floor < math.inf, "a number of at least 0")
        for name in ("grad_norm_warn", "parameter_norm_warn", "loss_warn"):
            limit = getattr(self, name)
            _require(name, limit, limit is None or limit > 0, "a number above 0, or None")

    def require_logging(self) -> None:
        """Raises a ValueError where ``on_metrics`` would never be called."""
        if self.log_every == 0:
            raise ValueError("on_metrics is given, and option log_every=0 never calls it; give log_every=100")

    @property
    def looks_at_norms(self) -> bool:
        """Whether gradients are read once more for their L2 norms."""
        return self.grad_norm_warn is not None or self.parameter_norm_warn is not None

    @functools.cached_property
    def watched(self) -> frozenset[str]:
        """The phases of ``watch``; every step asks for some of them."""
        return frozenset(self.watch)

    def is_ignored(self, name: str) -> bool:
        """Whether an ``ignore`` pattern (fnmatch) covers a layer or a parameter."""
        return any(fnmatchcase(name, pattern) for pattern in self.ignore)

    def check(self) -> None:
        """Raises a ValueError that names the first option whose value does not fit, the value and the valid ones."""
        self._validate()

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON-ready data: by name, with tuples as lists."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]  # tuples become lists


ENV_INJECT = ENV_PREFIX + "INJECT"
ENV_REPLAY = ENV_PREFIX + "REPLAY"
"""The dump whose step this process runs again; its parts on several nodes are separated as in ``PATH``."""
ENV_REPLAY_OPTIONS = ENV_REPLAY + "_OPTIONS"
"""Options of that replay, as on the command line: ``--trace``."""
RESERVED_ENVIRONMENT = frozenset({ENV_INJECT, ENV_REPLAY, ENV_REPLAY_OPTIONS})
"""Variables that begin with the prefix and are no options."""


def is_replay() -> bool:
    """Whether this process runs a training script to replay a dump: it ends after one step, and writes nothing.

    A script leaves out by it what it does beside the training, such as logging to a server.
    """
    return bool(os.environ.get(ENV_REPLAY))


def replay_texts() -> tuple[str, str]:
    """The texts of ``NANGUARD_REPLAY`` and ``NANGUARD_REPLAY_OPTIONS``; "" where they are not set."""
    return os.environ.get(ENV_REPLAY, ""), os.environ.get(ENV_REPLAY_OPTIONS, "")


def injection_text() -> str | None:
    """The text of ``NANGUARD_INJECT``; None where it is not set, empty, or ignored (`environment_ignored`)."""
    return _environment().get(ENV_INJECT) or None


# a context variable, so that a replay in one thread does not change what a guard in another one reads
_is_ignored = contextvars.ContextVar("is_ignored", default=False)


@contextlib.contextmanager
def environment_ignored() -> Iterator[None]:
    """Within this context no environment variable counts: a replay must not dump, skip or inject as its job does."""
    token = _is_ignored.set(True)
    try:
        yield
    finally:
        _is_ignored.reset(token)


def _environment() -> Mapping[str, str]:
    return {} if _is_ignored.get() else os.environ


# evaluating annotations takes a millisecond, and each guard asks for the type of every option
_annotations = functools.cache(typing.get_type_hints)


def _annotation(cls: type, name: str) -> Any:
    return _annotations(cls)[name]


def _frozen(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return tuple(value) if isinstance(value, list) else value


def _require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"option {name}={value!r} is out of range; give {expected}")


def _check_type(name: str, value: object, annotation: Any) -> None:
    if not _fits(value, annotation):
        raise ValueError(f"option {name}={value!r} does not fit; valid: {_describe(annotation)}")


def _fits(value: object, annotation: Any) -> bool:
    # bool is a subclass of int: True must not pass for a number
    origin = get_origin(annotation)
    if origin is Literal:
        return value in get_args(annotation)
    if origin is types.UnionType:
        return any(_fits(value, member) for member in get_args(annotation))
    if origin is tuple:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


def _describe(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return ", ".join(repr(choice) for choice in get_args(annotation))
    if origin is types.UnionType:
        return " or ".join(_describe(member) for member in get_args(annotation))
    if origin is tuple:
        return "a list of strings"
    return {bool: "True or False", int: "a whole number", float: "a number", str: "a string", type(None): "None"}[
        annotation
    ]


def _parse(key: str, text: str, annotation: Any) -> Any:
    """The value of an environment variable as the option's type."""
    try:
        return _parse_as(text.strip(), annotation)
    except (ValueError, KeyError):
        raise ValueError(f"environment variable {key}={text!r} does not fit; valid: {_describe(annotation)}") from None


def _parse_as(text: str, annotation: Any) -> Any:
    origin = get_origin(annotation)
    if origin is types.UnionType:
        return None if text.lower() == "none" else _parse_as(text, get_args(annotation)[0])
    if origin is Literal:
        return {choice: choice for choice in get_args(annotation)}[text]
    if origin is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if annotation is bool:
        return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
    return annotation(text)


def is_switched_off(options: Mapping[str, Any]) -> bool:
    """Whether ``enabled`` is False, whatever else is given; where it is no boolean, that is told as of any option."""
    text = _environment().get(f"{ENV_PREFIX}ENABLED")
    if text is None:
        return options.get("enabled", True) is False
    try:
        return _parse(f"{ENV_PREFIX}ENABLED", text, _annotation(GuardConfig, "enabled")) is False
    except ValueError:
        return False
