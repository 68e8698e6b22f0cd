"""Why it happened: the traced step, experiments and rules."""

__frame_role__ = "starts step"  # see `hooks.frames`
