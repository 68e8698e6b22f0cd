"""Fault injection: models, tensors and a step counter."""

__frame_role__ = "probe"  # see `hooks.frames`
