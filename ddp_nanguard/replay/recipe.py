"""`Recipe`: what a replay needs from the user, and how it is found and loaded."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ddp_nanguard.errors import DumpError


@dataclass(frozen=True)
class Recipe:
    """Builds the model and runs one training step. The same function can serve training.

    Attributes:
        model: the plain module, newly built; its weights come from the dump.
        step: ``step(model, batch)`` returns the loss that is backpropagated, shape (), or a dict of named losses whose
            sum is backpropagated.
        optimizer: parameters -> optimizer; without it a hyper-parameter fault is replayed from the dump's
            ``state.json``.
        wrap: module -> wrapped module, for the replay on many ranks; by default as the dump records.
        generators: the random generators that training registered with the guard, by the same names.
        batch_types: builders of custom batch classes by type name.
    """

    model: nn.Module
    step: Callable[[Any, Any], Tensor | dict[str, Tensor]]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    wrap: Callable[[nn.Module], nn.Module] | None = None
    generators: Mapping[str, Any] = field(default_factory=dict)
    batch_types: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


def load_recipe(name: str, directory: str | None) -> Recipe:
    """Import the recipe function and call it. This runs the user's code.

    Args:
        name: ``module:function`` or ``path/to/file.py:function``.
        directory: where the module lay when the dump was written; searched after the working directory.

    Raises:
        DumpError: it cannot be imported, raises, or returns no `Recipe`.
    """
    module_name, _, function_name = name.rpartition(":")
    if not module_name or not function_name.isidentifier():
        raise DumpError(f'recipe {name!r} names no function; give --recipe "module:function"')
    try:
        module = _from_file(module_name) if module_name.endswith(".py") else _by_name(module_name, directory)
    except (ImportError, AttributeError, OSError) as error:
        raise DumpError(f'recipe {name!r} cannot be imported ({error}); give --recipe "module:function"') from error
    function = getattr(module, function_name, None)
    if function is None:
        raise DumpError(
            f'recipe {name!r}: {module_name} has no function {function_name!r}; give --recipe "module:function"'
        )
    try:
        recipe = function()
    except Exception as error:
        raise DumpError(f"recipe {name!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(recipe, Recipe):
        raise DumpError(f"recipe {name!r} gives a {type(recipe).__name__}; it must return a ddp_nanguard.Recipe")
    return recipe


def _by_name(name: str, directory: str | None) -> Any:
    for path in (os.getcwd(), directory):
        if path is not None and path not in sys.path:
            sys.path.append(path)
    return importlib.import_module(name)


def _from_file(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(path))[0], path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module in {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(os.path.dirname(os.path.abspath(path)))
    spec.loader.exec_module(module)
    return module
