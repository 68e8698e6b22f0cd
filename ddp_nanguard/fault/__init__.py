"""What is done about a fault."""

__frame_role__ = "probe"  # see `hooks.frames`
