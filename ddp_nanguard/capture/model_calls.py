"""What the model was called with in a window, and what came back to it in backward: enough to run that once more.

[Note: an alias for the caller]
The gradient of an output is recorded by a node of the graph between it and an alias of it, which is what the caller
gets. A hook on the model's own tensor would also see what reaches it inside the model: of ``(logits, loss)`` both would
be counted twice. A hook on a view would be lost where the caller changes it in place. Nothing here holds an output: a
hook that held its own tensor would keep it, and its graph, for ever.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ddp_nanguard.hooks.frames import is_users_own
from ddp_nanguard.tensors.containers import copy_containers, named_tensors_in, path_text

from . import rng
from .rng import RandomState
from .surroundings import Surroundings, surroundings

MAX_GRADIENT_BYTES = 64 * 2**20
"""Gradients of outputs that are kept per window."""
MAX_FINGERPRINT_NUMEL = 16384
"""Arguments up to this size are summed, since their version does not tell what NumPy or ``.data`` writes into them."""

ALIAS_NODE = "_AliasBackward"
"""Name of the autograd node that makes an alias: where the model ends, for who walks the graph."""
MAX_FINGERPRINTS = 8
"""Arguments of a call that are summed."""
MAX_WEIGHTS = 32
"""Parameters whose versions are read once per window: an optimizer that steps within the backward writes them all."""

_current_graph_task = torch._C._current_graph_task_id


@dataclass(eq=False)
class ModelCall:
    """One call of the model, or of the loop's step function, in grad mode.

    Attributes:
        function: what was called.
        args, kwargs: with which arguments; containers are copies, tensors are not.
        micro_batch: index in the window.
        random_state: random states before it.
        around: what else it depends on.
        autocast: per device type, whether autocast was on, and its dtype.
        is_step: whether ``function`` is the loop's step function, whose outputs are losses.
        gradients: by backward pass and position among the outputs, the gradient that reached it, detached.
        num_outputs: how many outputs can get one.
        screens: the sum of each of these, shape (), see `screen_of`; None for what cannot be summed.
        problem: why the call cannot be made again as it was; None where it can.
        caller: code, last instruction and line number of the user's frame that made the call.
        is_training: whether the model was in training mode.
        is_frozen: whether no parameter required a gradient, as a critic's while the loss of another model calls it.
        has_returned: whether the function has returned; False while it runs, and for good where it raised.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    micro_batch: int
    random_state: RandomState
    around: Surroundings
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    is_step: bool
    gradients: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    num_outputs: int = 0
    screens: list[Tensor | None] = field(default_factory=list)
    problem: str | None = None
    is_training: bool = True
    is_frozen: bool = False
    has_returned: bool = False
    caller: tuple[CodeType, int, int] | None = None
    _arguments: list[_Argument] = field(default_factory=list)
    _aliases: list[weakref.ref[Tensor]] = field(default_factory=list)

    def changed_argument(self) -> str | None:
        """Path of an argument that was changed after the call; None where none was. Host sync: one per small one."""
        paths = (path_text(argument.path[1:]) for argument in self._arguments if argument.has_changed())
        return next(paths, None)

    def unseen_arguments(self) -> list[str]:
        """Paths of tensors that may have been written without a trace, being too large or too many to be summed."""
        return [path_text(each.path[1:]) for each in self._arguments if each.sum is None and each.tensor.numel()]

    def has_changed_mode(self) -> bool:
        """Whether the model has been put into another mode since: a dropout or BatchNorm would not do the same."""
        return _is_training(self.function, self.args, self.is_step) != self.is_training

    @property
    def awaits_backward(self) -> bool:
        """Whether no backward has reached it yet, and one still may."""
        return self.num_outputs > 0 and not self.gradients and any(alias() is not None for alias in self._aliases)

    def forget(self) -> None:
        """Release everything: a graph that the loop keeps must not keep the arguments too."""
        self.args, self.kwargs, self.gradients, self.screens, self._arguments = (), {}, {}, [], []


@dataclass(frozen=True)
class BackwardPass:
    """One backward pass through outputs of the model, by autograd's number of it."""

    graph_task: int


@dataclass(frozen=True)
class WatchedLoss:
    """A loss that the loop has handed to the guard.

    Attributes:
        name: under which it was.
        tensor: a weak reference to it: its graph must be free to go.
    """

    name: str
    tensor: weakref.ref[Tensor]


StepEvent = ModelCall | BackwardPass | WatchedLoss
"""What happened in a window, in this order."""


class ModelCalls:
    """The calls and backward passes of one window, in the order in which they happened.

    Args:
        device: of the model.
        weights: parameters; a few of them are looked at.
        copies: whether arguments are copied instead of referred to (option ``copy_batch``).
        modules: of the model, whose modes are kept.
        generators: registered random generators by name.
        others: accelerators whose random states are kept beside that of ``device``.

    Memory: arguments by reference (copies with ``copy_batch``), and at most `MAX_GRADIENT_BYTES` of gradients, until
    the window is closed.
    """

    def __init__(
        self,
        device: torch.device,
        weights: Sequence[Tensor] = (),
        copies: bool = False,
        modules: Sequence[nn.Module] = (),
        generators: rng.Generators | None = None,
        others: tuple[torch.device, ...] = (),
    ) -> None:
        self._device = device
        self._others = others
        self._copies = copies
        self._modules = modules
        # whose sparse gradient is the memory of the output's own, which DDP divides
        self._clones = any(getattr(module, "sparse", False) is True for module in modules)
        self._generators = {} if generators is None else generators
        every = -(-len(weights) // MAX_WEIGHTS) or 1
        self._weights = list(weights[::every])
        self._weight_versions: list[int] = []
        self._weight_addresses: list[int] = []
        self._had_gradients = False
        self._types = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        self.events: list[StepEvent] = []
        self._open: list[ModelCall] = []  # that have not returned, outermost first; what raised stays until `clear`
        self._bytes_left = MAX_GRADIENT_BYTES

    @property
    def calls(self) -> list[ModelCall]:
        """The calls alone."""
        return [event for event in self.events if isinstance(event, ModelCall)]

    @property
    def is_in_step(self) -> bool:
        """Whether the loop's step function is running: what it calls is part of it."""
        return bool(self._open) and self._open[-1].is_step

    def begin(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        micro_batch: int,
        is_step: bool,
        random_state: RandomState | None = None,
    ) -> ModelCall:
        """Record a call that is about to be made. Host sync: none.

        Args:
            function: that is called.
            args: its positional arguments.
            kwargs: its keyword arguments.
            micro_batch: index in the window.
            is_step: whether it is the loop's step function.
            random_state: random states now, where they are known.
        """
        if not self.events:
            self._weight_versions = _versions(self._weights)
            self._weight_addresses = _addresses(self._weights)
            self._had_gradients = any(weight.grad is not None for weight in self._weights)
        # the common case has no container to copy
        is_flat = not (kwargs or self._copies) and all(type(arg) is Tensor for arg in args)
        kept_args = args if is_flat else copy_containers(args, self._kept)
        kept_kwargs = {} if is_flat else copy_containers(kwargs, self._kept)
        call = ModelCall(
            function,
            kept_args,
            kept_kwargs,
            micro_batch,
            rng.capture(self._device, self._generators, self._others) if random_state is None else random_state,
            surroundings(self._modules),
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in self._types),
            is_step,
            caller=_users_position(),
            is_training=_is_training(function, args, is_step),
            is_frozen=bool(self._weights) and not any(weight.requires_grad for weight in self._weights),
        )
        found = enumerate(_flat_paths(args) if is_flat else named_tensors_in((kept_args, kept_kwargs)))
        call._arguments = [_Argument(path, tensor, index < MAX_FINGERPRINTS) for index, (path, tensor) in found]
        self.events.append(call)
        self._open.append(call)
        return call

    def weights_have_changed(self) -> bool:
        """Whether weights were written since the first call of the window, as far as their versions tell."""
        return self._weight_versions != _versions(self._weights)

    def weights_were_updated(self) -> bool:
        """Whether every weight that is trained, and may have a gradient, was written since then: seldom a forward."""
        before = dict(zip(map(id, self._weights), self._weight_versions, strict=False))
        trained = [weight for weight in self._weights if weight.requires_grad]
        trained = [weight for weight in trained if weight.grad is not None] or trained
        return bool(self.events and before and trained) and all(
            _version(weight) != before[id(weight)] for weight in trained
        )

    def weights_were_elsewhere(self) -> bool:
        """Whether the memory of a weight is another than at the first call of the window: it was swapped."""
        return self._weight_addresses != _addresses(self._weights)

    @property
    def had_gradients(self) -> bool:
        """Whether weights had gradients when the window began, onto which its own were accumulated."""
        return self._had_gradients

    def abandon(self) -> None:
        """The function that was called last has raised."""
        if self._open:
            self._open.pop()

    def end(self, output: Any) -> Any:
        """What the caller gets in place of ``output``: the same values, whose gradients are recorded.

        Args:
            output: what the function returned that was called last and has not returned yet.
        """
        if not self._open:
            return output  # the window was closed while it ran
        call = self._open.pop()
        call.has_returned = True
        # what ran within this call is a part of it: a model may call itself
        del self.events[self.events.index(call) + 1 :]
        try:
            return copy_containers(output, lambda tensor: self._alias(call, tensor))
        except Exception as error:  # a container of the user's that cannot be copied: it is handed on as it is
            call.problem = f"the model returns a {type(output).__name__}, which cannot be followed ({error})"
            return output

    def _alias(self, call: ModelCall, tensor: Tensor) -> Tensor:
        if tensor.grad_fn is None or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        if torch._C._are_functorch_transforms_active():
            call.problem = "the model was called within a transform of torch.func"
            return tensor
        note = _OutputGradient(self, call, call.num_outputs)
        alias: Tensor = _Alias.apply(tensor, note)  # type: ignore[no-untyped-call]  # torch's own
        call._aliases.append(weakref.ref(alias))
        call.screens.append(screen_of(tensor))
        call.num_outputs += 1
        return alias

    def note_gradient(self, call: ModelCall, position: int, gradient: Tensor) -> None:
        """Keep the gradient of an output; called within a backward pass. Host sync: none."""
        if torch.is_grad_enabled():  # within a backward pass: only with create_graph
            call.problem = "its output is differentiated with create_graph=True, and that is not recorded"
        task = _current_graph_task()
        if not any(isinstance(event, BackwardPass) and event.graph_task == task for event in self.events):
            self.events.append(BackwardPass(task))
        self._bytes_left -= gradient.nbytes
        if self._bytes_left < 0:
            call.problem = f"the gradient of its output is too large to be kept ({gradient.nbytes / 2**20:.0f} MiB)"
            return
        of_pass, detached = call.gradients.setdefault(task, {}), gradient.detach()
        detached = detached.clone() if self._clones else detached
        of_pass[position] = detached if position not in of_pass else of_pass[position] + detached

    def note_loss(self, name: str, loss: Tensor) -> None:
        """Note that a loss was handed to the guard; one within the loop's step function comes again with that."""
        if not self.is_in_step:
            self.events.append(WatchedLoss(name, weakref.ref(loss)))

    def clear(self) -> None:
        """Forget the window."""
        for call in self.calls:
            call.forget()
        self.events, self._open, self._bytes_left = [], [], MAX_GRADIENT_BYTES

    def empty_copy(self) -> ModelCalls:
        """The record of another window of the same model."""
        return ModelCalls(self._device, self._weights, self._copies, self._modules, self._generators, self._others)

    def _kept(self, tensor: Tensor) -> Tensor:
        if not self._copies or tensor.requires_grad:  # of a graph: the loop cannot change it in place unseen
            return tensor
        return tensor.clone()


class _Alias(torch.autograd.Function):
    """The same tensor, with a node that is told its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, note: _OutputGradient) -> Tensor:  # a setup_context would cost a signature
        ctx.note = note
        ctx.set_materialize_grads(False)
        return tensor.detach()  # no view to autograd, so that the caller may change it in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        if gradient is not None:
            ctx.note(gradient)
        return gradient, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, note: None) -> Tensor:
        return tangent


class _OutputGradient:
    """What the node of an alias holds: the record, and no tensor."""

    __slots__ = ("call", "calls", "position")

    def __init__(self, calls: ModelCalls, call: ModelCall, position: int) -> None:
        self.calls, self.call, self.position = weakref.ref(calls), weakref.ref(call), position

    def __call__(self, gradient: Tensor) -> None:
        calls, call = self.calls(), self.call()
        if calls is not None and call is not None:
            calls.note_gradient(call, self.position, gradient)


class _Argument:
    """A tensor argument, and what tells whether it was changed since."""

    __slots__ = ("path", "sum", "tensor", "version")

    def __init__(self, path: tuple[Any, ...], tensor: Tensor, is_summed: bool) -> None:
        self.path = path
        self.tensor = tensor
        self.version = _version(tensor)
        self.sum = _fingerprint(tensor) if is_summed else None

    def has_changed(self) -> bool:
        if _version(self.tensor) != self.version:
            return True
        return not same_screen(self.sum, _fingerprint(self.tensor))


def screen_of(tensor: Tensor) -> Tensor | None:
    """The sum of a tensor, or of this rank's part of it, non-finite where an element is; None where torch has none.

    One kernel, no host read, no collective.
    """
    if tensor.requires_grad or type(tensor) is not Tensor:
        tensor = getattr(tensor, "_local_tensor", tensor).detach()  # of a DTensor
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    if not plain or tensor.is_meta or (tensor.is_floating_point() and tensor.element_size() == 1):
        return None  # torch sums no 8-bit floats
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not torch.is_autocast_enabled(tensor.device.type):
        return numbers.sum()
    with torch.autocast(tensor.device.type, enabled=False):  # which sums in another dtype on CUDA
        return numbers.sum()


def _users_position() -> tuple[CodeType, int, int] | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_users_own(frame):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lasti, frame.f_lineno)


def same_screen(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether both have the same bits, as far as they tell; a NaN is like any other. Host sync: one or two."""
    if one is None or other is None:
        return True
    return bool(torch.equal(one, other)) or (one.is_floating_point() and bool(one.isnan() and other.isnan()))


def _fingerprint(tensor: Tensor) -> Tensor | None:
    """The screen of a small argument; None for what is large or empty."""
    return screen_of(tensor) if 0 < tensor.numel() <= MAX_FINGERPRINT_NUMEL else None


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _is_training(function: Callable[..., Any], args: tuple[Any, ...], is_step: bool) -> bool:
    """The mode of the model that is called, or that is handed to the loop's step function."""
    return bool(getattr(args[0] if is_step and args else function, "training", True))


def _flat_paths(args: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], Tensor]]:
    """As `named_tensors_in` of ``(args, kwargs)``, for arguments that are all tensors."""
    return [((0, index), tensor) for index, tensor in enumerate(args)]


def _versions(tensors: list[Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # one of them is an inference tensor
        return list(map(_version, tensors))


def _addresses(tensors: list[Tensor]) -> list[int]:
    """Where each lies; 0 for one that has no memory of its own."""
    return [tensor.data_ptr() if type(tensor) is nn.Parameter else 0 for tensor in tensors]
