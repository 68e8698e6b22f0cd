"""What is kept of a step for a dump, a replay or a skip: micro-batches, buffers, random states, weights."""

__frame_role__ = "probe"  # see `hooks.frames`
