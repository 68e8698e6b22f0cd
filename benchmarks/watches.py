"""The ways to look for non-finite values whose cost `overhead.py` compares: none, this package's levels, and peers.

Each is set up as its own documentation says, and acts at fixed points of the training loop. All but those that
compiled code has taken up can be taken off and put back between two steps.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ddp_nanguard import NanGuard


class Watch:
    """Nothing at all; the points of the loop where others act, in order."""

    name = "unguarded"
    about = ""
    package = ""

    def attach(self, model: nn.Module) -> None:
        """Before the model is compiled and wrapped."""

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """After it."""

    def batches(self, items: list[Tensor]) -> Iterable[Tensor]:
        return items

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """Of forward and backward."""
        return contextlib.nullcontext()

    def after_forward(self, loss: Tensor) -> None: ...

    def after_backward(self, model: nn.Module) -> None: ...

    def pause(self) -> None:
        """Take everything off."""

    def resume(self) -> None:
        """Put it back."""

    def close(self) -> None: ...


class Control(Watch):
    name = "unguarded, again"
    about = "unguarded steps against unguarded steps: what the machine's noise makes of a ratio of one"


class Agreement(Watch):
    name = "one all-reduce"
    about = (
        "unguarded but for one all-reduce of 16 bytes and its read by the host before each update: what every check "
        "pays that stops all ranks in the same step, whatever it looks at"
    )

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._word = torch.zeros(2, dtype=torch.int64)

    def after_backward(self, model: nn.Module) -> None:
        dist.all_reduce(self._word, op=dist.ReduceOp.MAX)
        self._word.tolist()


CONTROLS: tuple[Callable[[], Watch], ...] = (Control, Agreement)


class Guard(Watch):
    """This package."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        self.options = options
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        self.about = f"`NanGuard(model, optimizer, {given})`" if given else "`NanGuard(model, optimizer)`"

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.guard = NanGuard(model, optimizer, dump_dir=None, **self.options)

    def batches(self, items: list[Tensor]) -> Iterable[Tensor]:
        return self.guard.steps(items)

    def after_forward(self, loss: Tensor) -> None:
        self.guard.watch(loss=loss)

    def pause(self) -> None:
        self.guard._monitor._hooks.remove()
        self.guard._monitor._forward.remove()
        self.guard._context.remove_hooks()

    def resume(self) -> None:
        self.guard._monitor._forward.attach()
        self.guard._monitor._hooks.put()

    def close(self) -> None:
        self.guard.close()


DEFAULT, EVERY = "default", "layers=every"
EVERYTHING: dict[str, Any] = {"layers": "every"}
"""Options under which every module is looked at in every step."""

GUARDS: tuple[Callable[[], Guard], ...] = (
    partial(Guard, "loss, reduce", watch=("loss", "reduce")),
    partial(Guard, DEFAULT),
    partial(Guard, "deferred", verdict="deferred"),
    partial(Guard, "layers=blocks", layers="blocks"),
    partial(Guard, EVERY, **EVERYTHING),
)


# -- what people use today ---------------------------------------------------------------------------------------------


class Anomaly(Watch):
    name = "detect_anomaly"
    about = (
        "`torch.autograd.detect_anomaly()` around forward and backward; Lightning's `Trainer(detect_anomaly=True)` is "
        "the same context, and the only such check that Lightning 2.6 has"
    )

    def around(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autograd.detect_anomaly(check_nan=True)


class Hooking(Watch):
    """Hooks on modules, put on before the model is wrapped."""

    def attach(self, model: nn.Module) -> None:
        self._hook(model)
        kinds = ("_forward_hooks", "_forward_pre_hooks")
        self._hooks = [(getattr(m, kind), dict(getattr(m, kind))) for m in model.modules() for kind in kinds]

    def pause(self) -> None:
        for present, own in self._hooks:
            for key in own:
                del present[key]

    def resume(self) -> None:
        for present, own in self._hooks:
            present.update(own)

    def _hook(self, model: nn.Module) -> None: ...


class ModuleHooks(Hooking):
    name = "module hooks"
    about = "a forward hook on every module: `isnan().any()` of each output tensor, read by the host"

    def _hook(self, model: nn.Module) -> None:
        for module in model.modules():
            module.register_forward_hook(_raise_on_nan)


def _raise_on_nan(module: nn.Module, args: Any, output: Any) -> None:
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.isnan().any():
            raise RuntimeError(f"NaN in the output of a {type(module).__name__}")


class Concatenated(Watch):
    name = "gradients concatenated"
    about = "after the reduce, `torch.isfinite(torch.cat(gradients)).all()`, read by the host"

    def after_backward(self, model: nn.Module) -> None:
        local = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters() if p.grad is not None]
        if not torch.isfinite(torch.cat([gradient.reshape(-1) for gradient in local])).all():
            raise RuntimeError("a gradient is not finite")


class Overflow(Hooking):
    name = "transformers"
    about = "`transformers.debug_utils.DebugUnderflowOverflow(model)`"
    package = "transformers"

    def _hook(self, model: nn.Module) -> None:
        from transformers.debug_utils import DebugUnderflowOverflow

        self.debug = DebugUnderflowOverflow(model)


PEERS: tuple[Callable[[], Watch], ...] = (Anomaly, ModuleHooks, Concatenated, Overflow)
COLUMNS = [make().name for make in (*CONTROLS, *GUARDS, *PEERS)]


def is_installed(watch: Watch) -> bool:
    """Whether the package that a watch needs is there."""
    return not watch.package or importlib.util.find_spec(watch.package) is not None
