"""Hooks on the training loop, on modules and on autograd, and what Python frames mean in a stack."""

__frame_role__ = "probe"  # see `hooks.frames`
