"""Finds the cause of a fault: the traced step, experiments on it, and rules that put the cause into one sentence."""

__frame_role__ = "starts step"  # see `hooks.frames`
