"""What is kept of a step: micro-batches, buffers, random states."""

__frame_role__ = "probe"  # see `hooks.frames`
