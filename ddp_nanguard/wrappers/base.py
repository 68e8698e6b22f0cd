"""`Wrapper`: the questions that the guard asks of a model, however it is wrapped. Nothing here communicates.

[Note: a queue of gradients]
The hook of a parameter runs once per step, between two operators that leave it nothing in the cache. One hook object
for all parameters, which leaves what it is given in a list, takes a third of the time of one per parameter that reports
each gradient by its name.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.hooks import RemovableHandle

from ddp_nanguard.hooks.weak import WeakHook
from ddp_nanguard.tensors.minmax import arrived
from ddp_nanguard.tensors.shards import TensorShard

from .aside import shadowed
from .clean_names import class_name, inner_of, is_compiled, join, paths, unwrapped

OnGradient = Callable[[str, torch.Tensor], None]
"""Called with the clean name of an original parameter and its rank-local gradient."""

_current_graph_task = torch._C._current_graph_task_id
_NO_TASK = -2  # autograd's is -1 outside of any pass
_MAX_ORDERS = 256  # gradients that arrive in another order each time must not fill the memory


def _nobody(name: str, gradient: torch.Tensor) -> None:
    return None


class GradientQueue:
    """Gradients of one backward pass, left by hooks to be looked at when it ends, see [Note: a queue of gradients].

    Attributes:
        graph_task: autograd's id of the pass whose gradients are taken; of none until it is opened.
        entries: parameter and gradient in turn, as the hooks ran; put in together, since each device has a thread.
        names: clean names of hooked parameters, by ``id``.
    """

    def __init__(self) -> None:
        self.graph_task = _NO_TASK
        self.entries: list[torch.Tensor] = []
        self.names: dict[int, str] = {}
        self._known: dict[tuple[int, ...], tuple[str, ...]] = {}

    def take(self) -> tuple[tuple[str, ...], list[torch.Tensor]]:
        """Names of parameters and their gradients, in the order of the hooks; empties and closes the queue."""
        entries, self.entries, self.graph_task = self.entries, [], _NO_TASK
        ids = tuple(map(id, entries[::2]))
        if ids not in self._known:
            if len(self._known) >= _MAX_ORDERS:
                self._known.clear()
            self._known[ids] = tuple(self.names[each] for each in ids)
        return self._known[ids], entries[1::2]

    def set_name(self, parameter: torch.Tensor, name: str) -> None:
        """Take gradients of a parameter under this name from now on."""
        self.names[id(parameter)] = name
        self._known.clear()  # another parameter may have had this `id` before

    def clear(self) -> None:
        """Forget gradients and names."""
        self.entries, self.graph_task = [], _NO_TASK
        self.names.clear()
        self._known.clear()


class LeafHook(WeakHook):
    """Post-accumulate-grad hook of all parameters of a watch, to which it reports their gradients."""

    __slots__ = ("queue",)

    def __init__(self, watch: GradientWatch) -> None:
        super().__init__(watch)
        self.queue = watch.queue

    def __call__(self, parameter: torch.Tensor) -> None:
        """Queue the gradient that has accumulated in ``parameter.grad``, or report it at once."""
        gradient, queue = parameter.grad, self.queue
        if _current_graph_task() == queue.graph_task and type(gradient) is torch.Tensor:
            queue.entries.extend((parameter, gradient))
        elif gradient is not None and (watch := self.target()) is not None and id(parameter) in queue.names:
            watch.report(queue.names[id(parameter)], gradient)


class EagerLeafHook(LeafHook):
    """For gradients that the wrapper changes in place as soon as the hooks have run: reported at once."""

    __slots__ = ()

    def __call__(self, parameter: torch.Tensor) -> None:
        """Report the gradient that has accumulated in ``parameter.grad``."""
        watch = self.target()
        if parameter.grad is not None and watch is not None and id(parameter) in self.queue.names:
            watch.report(self.queue.names[id(parameter)], parameter.grad)


class GradientWatch:
    """Reports rank-local gradients while its hooks are installed. The caller keeps it: hooks hold it weakly.

    `install_hooks` may be called again at any time: parameters that were replaced or unfrozen meanwhile are then hooked
    too.

    Args:
        wrapper: of the model.
        on_gradient: called with each gradient, as the local tensor.

    Attributes:
        on_gradient: the callback; a function that does nothing after `remove`.
        queue: what it may open within a backward pass, to be spared calls for the plain gradients that follow.
    """

    def __init__(self, wrapper: Wrapper, on_gradient: OnGradient) -> None:
        self._wrapper = wrapper
        self.on_gradient = on_gradient
        self.queue = GradientQueue()
        self._hook, self._eager_hook = LeafHook(self), EagerLeafHook(self)
        # DDP divides a sparse gradient in place, long before the backward ends
        self._sparse = {id(p) for m in wrapper.model.modules() if _is_sparse(m) for p in m._parameters.values()}
        self._armed = False
        self._leaves: dict[str, tuple[torch.Tensor, RemovableHandle]] = {}

    def install_hooks(self) -> None:
        """Hook each parameter that has no hook yet; does nothing after `remove`."""
        if self.on_gradient is _nobody:
            return
        self._armed = True
        for name, parameter in self._wrapper.leaves():
            self.hook_leaf(name, parameter)

    def remove_hooks(self) -> None:
        """Take all hooks off; `install_hooks` may put them back."""
        self._armed = False
        for _, handle in self._leaves.values():
            handle.remove()
        self._leaves.clear()
        self.queue.clear()

    def remove(self) -> None:
        """Take all hooks off for good and stop reporting."""
        self.remove_hooks()
        self.on_gradient = _nobody

    def report(self, name: str, gradient: torch.Tensor) -> None:
        """Pass a gradient on as its local tensor, while hooks are installed; called by the hooks."""
        if self._armed:
            self.on_gradient(name, self._wrapper.local(gradient))

    def hook_leaf(self, name: str, parameter: torch.Tensor) -> None:
        """Hook ``parameter`` unless it is hooked already or takes no gradient.

        A hook of another parameter under the same name is removed.
        """
        # FSDP2 makes its unsharded parameter in the first forward, and users unfreeze or replace parameters.
        hooked = self._leaves.get(name)
        if hooked is not None and hooked[0] is parameter:
            return
        if hooked is not None:
            hooked[1].remove()
            del self._leaves[name]
        if parameter.requires_grad and not nn.parameter.is_lazy(parameter):
            register: Callable[[WeakHook], RemovableHandle] = parameter.register_post_accumulate_grad_hook
            self._leaves[name] = (
                parameter,
                register(self._eager_hook if id(parameter) in self._sparse else self._hook),
            )
            self.queue.set_name(parameter, name)


def _is_sparse(module: nn.Module) -> bool:
    """Whether a module asks for sparse gradients of its parameters, as embeddings can."""
    return getattr(module, "sparse", False) is True


class Wrapper(ABC):
    """The differences between a plain module, DDP, FSDP1 and FSDP2.

    Attributes:
        kind: ``plain``, ``ddp``, ``fsdp1`` or ``fsdp2``; for people and for dumps, never to be compared with.
        communicates: whether it reduces gradients over ranks.
        is_sharded: whether a rank holds only a part of the weights. A replay on one rank then wraps the model in the
            same way over one rank; an unsharded model is replayed without its wrapper.
        hides_compiled_gradients: whether its hooks see no gradient under compiled autograd.
        model: what the training loop calls.
        root: the root module inside all shells.
    """

    kind: ClassVar[str]
    communicates: ClassVar[bool] = True
    is_sharded: ClassVar[bool] = False
    hides_compiled_gradients: ClassVar[bool] = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.root = unwrapped(model)
        # read once: a job may take its group down before the exit hook asks for its evidence
        is_up = dist.is_available() and dist.is_initialized()
        self._rank, self._world_size = (dist.get_rank(), dist.get_world_size()) if is_up else (0, 1)

    @property
    def shard_index(self) -> int:
        """Which shard this rank holds: ranks with the same index hold the same bytes."""
        return 0

    @property
    def num_shards(self) -> int:
        """Number of different shards; 1 where every rank holds the whole model."""
        return 1

    @property
    def replica_index(self) -> int:
        """Which copy of its shard this rank holds, from 0."""
        return self._rank

    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """Modules with clean names, parents first, each once; shells are left out, and the root is ""."""
        return [(name, module) for name, module in self._unique_paths() if inner_of(module) is None]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters as the optimizer holds them, with clean names; tied ones once."""
        return self._tied_parameters()[0]

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Buffers with clean names, non-persistent ones included, shared memory once; read anew at each call."""
        return self._tied_buffers()[0]

    def aliases(self) -> dict[str, str]:
        """The further names of tied parameters and buffers, each with the name that `named_parameters` keeps."""
        return {**self._tied_parameters()[1], **self._tied_buffers()[1]}

    def owner_of(self, parameter_name: str) -> str:
        """Clean name of the module that owns a parameter or buffer."""
        return parameter_name.rpartition(".")[0]

    def watch_local_gradients(self, on_gradient: OnGradient) -> GradientWatch:
        """Report each parameter's gradient within backward, before any communication, in every micro-batch.

        Plain and DDP report what has accumulated in ``.grad``; FSDP reports what this rank has accumulated since its
        last reduce, or the gradient of this backward alone.

        Args:
            on_gradient: called with the clean name and the rank-local gradient.

        Returns:
            A watch with its hooks installed. Keep it, since the hooks hold it weakly.

        Host sync: none.
        """
        watch = GradientWatch(self, on_gradient)
        watch.install_hooks()
        return watch

    @abstractmethod
    def will_reduce(self) -> bool:
        """Whether the backward that is running now communicates gradients."""

    def leaves_reduce_running(self) -> bool:
        """Whether communicated gradients must not be read at the end of this backward: they may still be written."""
        return False

    def compute_device(self) -> torch.device:
        """Where the model computes: that of its first parameter off the CPU, else the CPU."""
        devices = (self.local(parameter).device for _, parameter in self.named_parameters())
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))

    def pending_gradient_bytes(self) -> int | None:
        """How many bytes of rank-local gradients may be kept until the callbacks at the end of backward, unchanged.

        0 where gradients change before that; None, for no limit, where they stay in memory anyway.
        """
        return 0

    def unreduced(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gradients that wait elsewhere than in ``.grad`` of the optimizer's parameters until they are reduced."""
        yield from ()

    def group_ranks(self) -> list[int] | None:
        """Global ranks that the wrapper communicates over; None where it communicates with none by itself."""
        return None

    def refuse_join(self) -> None:  # noqa: B027  # nothing to refuse but for DDP
        """Refuse a forward inside DDP's ``join``, which shadows only DDP's communication for ranks without data.

        Raises:
            ValueError: inside DDP's ``join``.
        """

    def scaler_class(self) -> type[GradScaler]:
        """The GradScaler class with which all ranks skip the same steps."""
        return GradScaler

    def find_gathered(self) -> Callable[[torch.Tensor], str | None] | None:
        """A function that names a parameter by memory that exists only within a step; None where there is none."""
        return None

    def overwrites_buffers(self) -> bool:
        """Whether the coming forward overwrites this rank's buffers with another rank's."""
        return False

    def leaves(self) -> list[tuple[str, torch.Tensor]]:
        """Parameters whose own ``.grad`` is rank-local when it has accumulated, by clean name."""
        return list(self.named_parameters())

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """The plain local tensor of a parameter, a gradient or an optimizer state tensor. Does not communicate."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor  # as `to_local` without grad mode, which makes a parameter around it
            if type(tensor) is not torch.Tensor:
                tensor = arrived(tensor)
        return tensor.detach() if tensor.requires_grad else tensor

    def shards(
        self, prefix: str, name: str, parameter: torch.Tensor, tensor: torch.Tensor, suffix: str = ""
    ) -> list[TensorShard]:
        """The shards of ``tensor`` that this rank holds, named ``prefix + original parameter name + suffix``.

        Args:
            prefix: begins the name of each shard, such as ``optim.0.``.
            name: name of the parameter in `named_parameters`.
            parameter: that parameter.
            tensor: the parameter, its gradient or an optimizer state tensor of the same (local) shape.
            suffix: ends the name of each shard, such as ``.exp_avg``.

        Raises:
            ValueError: the shape of ``tensor`` does not tell which part of the parameter it belongs to.
        """
        full_name = f"{prefix}{name}{suffix}"
        if isinstance(parameter, DTensor) or isinstance(tensor, DTensor):
            return dtensor_shards(full_name, parameter, tensor)
        return [TensorShard.whole(full_name, tensor)] if tensor.numel() else []

    def all_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """True shape and dtype of every original parameter, also of those of which this rank holds nothing."""
        return {name: (tuple(parameter.shape), parameter.dtype) for name, parameter in self.named_parameters()}

    def describe(self) -> dict[str, Any]:
        """JSON-ready data from which ``wrap_like`` wraps an equal plain module again."""
        return {
            "kind": self.kind,
            "model_class": class_name(type(self.model)),
            "root_class": class_name(type(self.root)),
            "compiled": any(
                is_compiled(module) or getattr(module, "_compiled_call_impl", None) is not None
                for _, module in paths(self.model)
            ),
            "world_size": self._world_size,
        }

    # -- the step once more ------------------------------------------------------------------------------------------

    def why_not_again(self) -> str | None:
        """Why the step cannot be run again on this model now, in words; None where it can."""
        return None

    def aside(self, saved: Mapping[str, torch.Tensor], keep_gradients: bool) -> contextlib.AbstractContextManager[None]:
        """A context in which forward and backward leave no trace on the job, see [Note: shadow parameters].

        Args:
            saved: the buffers from before the window, by clean name.
            keep_gradients: whether the present gradients are needed afterwards.
        """
        return shadowed(self.model, self.named_parameters(), saved)

    def syncing(self, reduces: bool) -> contextlib.AbstractContextManager[None]:
        """A context for one micro-batch that communicates its gradients, or does not, as it did in training."""
        return contextlib.nullcontext()

    def own_parameters(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Attribute names and parameters of ``module`` itself, not of its children."""
        return ((name, parameter) for name, parameter in module._parameters.items() if parameter is not None)

    def _unique_paths(self) -> Iterator[tuple[str, nn.Module]]:
        seen: set[nn.Module] = set()
        for name, module in paths(self.model):
            if module not in seen:
                seen.add(module)
                yield name, module

    def _tied_parameters(self) -> tuple[list[tuple[str, nn.Parameter]], dict[str, str]]:
        kept: dict[int, tuple[str, nn.Parameter]] = {}
        aliases = {}
        for prefix, module in paths(self.model):
            for attribute, parameter in self.own_parameters(module):
                name = join(prefix, attribute)
                first, _ = kept.setdefault(id(parameter), (name, parameter))
                if first != name:
                    aliases[name] = first
        return list(kept.values()), aliases

    def _tied_buffers(self) -> tuple[list[tuple[str, torch.Tensor]], dict[str, str]]:
        kept: dict[object, tuple[str, torch.Tensor]] = {}
        aliases = {}
        for prefix, module in paths(self.model):
            for attribute, buffer in module._buffers.items():
                if buffer is not None:
                    name = join(prefix, attribute)
                    first, _ = kept.setdefault(self._memory_of(buffer), (name, buffer))
                    if first != name:
                        aliases[name] = first
        return list(kept.values()), aliases

    def _memory_of(self, tensor: torch.Tensor) -> object:
        """A key that two tensors share if and only if they are the same memory, read the same way."""
        local = self.local(tensor)
        # These have no address of their own: `data_ptr` is 0 or raises.
        if local.layout is not torch.strided or local.is_nested or local.numel() == 0 or local.is_meta:
            return id(tensor)
        return local.data_ptr(), local.dtype, tuple(local.shape), tuple(local.stride())


class ShardedWrapper(Wrapper):
    """A wrapper that splits parameters over ranks."""

    is_sharded: ClassVar[bool] = True

    @abstractmethod
    def _position(self) -> tuple[int, int, int]:
        """Shard index, number of shards and replica index of this rank."""

    @property
    def shard_index(self) -> int:
        """Rank in the group that parameters are sharded over."""
        return self._position()[0]

    @property
    def num_shards(self) -> int:
        """Size of the group that parameters are sharded over."""
        return self._position()[1]

    @property
    def replica_index(self) -> int:
        """Rank among those that hold the same shard (HSDP); 0 where every shard exists once."""
        return self._position()[2]


def dtensor_shards(name: str, parameter: torch.Tensor, tensor: torch.Tensor) -> list[TensorShard]:
    """The local part of a DTensor, or of a plain tensor laid out like the DTensor ``parameter``; [] where it is empty.

    Raises:
        ValueError: the local shapes differ, or a placement is partial.
    """
    layout = tensor if isinstance(tensor, DTensor) else parameter
    assert isinstance(layout, DTensor)
    with torch.no_grad():
        local, expected = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, layout))
    if local.shape != expected.shape or any(isinstance(placement, Partial) for placement in layout.placements):
        raise ValueError(
            f"{name} has local shape {tuple(local.shape)}, its parameter {tuple(expected.shape)} with placements "
            f"{layout.placements}: which part of the whole it is cannot be told; keep it as a tensor of this rank"
        )
    return dtensor_shard(name, layout, local)


def dtensor_shard(name: str, layout: DTensor, local: torch.Tensor) -> list[TensorShard]:
    """The shard that ``local`` is of a tensor distributed like ``layout``; [] where it is empty."""
    shape = tuple(layout.shape)
    if local.numel() == 0:
        return []
    if not shape:
        return [TensorShard.whole(name, local)]
    _, offsets = compute_local_shape_and_global_offset(shape, layout.device_mesh, layout.placements)
    return [TensorShard(name, local.detach(), shape, tuple(offsets), shape)]
