"""Tensors are made on a device and in a dtype of the guard's choice: a job may have set others as its defaults."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch
from torch.utils._device import _device_constructors

from tests.unit.test_imports import PACKAGE, _modules, _nodes

NAMES = {
    f"{owner}.{made.__name__}"
    for made in _device_constructors()
    for owner, module in (("torch", torch), ("torch.nested", torch.nested), ("torch.fft", torch.fft))
    if getattr(module, made.__name__, None) is made
}
KEEPS_DTYPE = {"torch.as_tensor", "torch.asarray", "torch.sparse_coo_tensor", "torch.sparse_compressed_tensor"}
"""Whose dtype is that of what is given."""


def _calls() -> Iterator[tuple[str, str, set[str | None]]]:
    """Where a tensor is made, by which function, and the keywords that it is given."""
    for path in _modules():
        for node in _nodes(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in NAMES:
                where = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                yield where, ast.unparse(node.func), {keyword.arg for keyword in node.keywords}


def test_every_constructor_is_told_device_and_dtype() -> None:
    calls = list(_calls())
    assert {"torch.tensor", "torch.zeros", "torch.nested.nested_tensor"} <= NAMES and len(calls) > 20
    lacking = [f"{where}: {name} without device=" for where, name, given in calls if "device" not in given]
    lacking += [
        f"{where}: {name} without dtype="
        for where, name, given in calls
        if "dtype" not in given and name not in KEEPS_DTYPE
    ]
    assert lacking == []
