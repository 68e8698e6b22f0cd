"""Names of modules as in the unwrapped model: shells around a module, and paths through the tree without them.

[Note: clean names]
Shells (DDP, FSDP1, checkpoint and offload wrappers, compiled modules, Lightning Fabric's) hold exactly one module and
have no name of their own: a clean name is the path in the unwrapped module, and the root is "".
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

FABRIC_SHELL = "_FabricModule"
"""Class of what ``Fabric.setup`` returns; by its name, since the library need not be there."""


def inner_of(module: nn.Module) -> nn.Module | None:
    """The module that a shell holds; None for a module that is not a shell."""
    inner = None
    if isinstance(module, DistributedDataParallel):
        inner = module.module
    elif isinstance(module, FullyShardedDataParallel):
        inner = module._fsdp_wrapped_module
    elif isinstance(module, ActivationWrapper):
        inner = module._checkpoint_wrapped_module
    elif is_compiled(module):
        inner = module._orig_mod
    elif type(module).__name__ == FABRIC_SHELL:
        inner = module._forward_module
    assert inner is None or isinstance(inner, nn.Module)
    return inner


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile(module)`` returns."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not loaded: nothing has been compiled, and it loads slowly
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def compiled_modules(model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
    """Clean names of the modules inside code of `torch.compile`, and of those whose own call is compiled.

    The latter were compiled by ``module.compile()``: hooks of such a module run outside the compiled code.
    """
    inside: set[str] = set()
    edges: set[str] = set()

    def walk(name: str, module: nn.Module, is_inside: bool) -> None:
        inner = inner_of(module)
        has_compiled_call = getattr(module, "_compiled_call_impl", None) is not None
        if inner is not None:
            walk(name, inner, is_inside or is_compiled(module) or has_compiled_call)
            return
        if is_inside:
            inside.add(name)
        elif has_compiled_call:
            edges.add(name)
        for attribute, child in module._modules.items():
            if child is not None:
                walk(join(name, attribute), child, is_inside or has_compiled_call)

    walk("", model, False)
    # A module that is shared may be found on several paths; one that is compiled decides.
    return frozenset(inside), frozenset(edges - inside)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all shells around it."""
    while (inner := inner_of(module)) is not None:
        module = inner
    return module


def join(prefix: str, name: str) -> str:
    """The dotted name of ``name`` within ``prefix``, which may be ""; control characters are written as in Python."""
    if not name.isprintable():
        name = name.encode("unicode_escape").decode()
    return f"{prefix}.{name}" if prefix else name


def paths(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every path through the tree with its clean name, shells and repeated modules included, parents first."""
    yield prefix, module
    if (inner := inner_of(module)) is not None:
        yield from paths(inner, prefix)
        return
    for name, child in module._modules.items():
        if child is not None:
            yield from paths(child, join(prefix, name))


def class_name(cls: type) -> str:
    """The full name of a class: ``module.QualifiedName``."""
    return f"{cls.__module__}.{cls.__qualname__}"
