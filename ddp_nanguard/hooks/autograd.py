"""Whether autograd is running a backward pass in this thread."""

from __future__ import annotations

import torch

_current_graph_task = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether this thread is inside a backward pass, where a forward hook means recomputation."""
    return _current_graph_task() != -1
