"""What is said about a fault."""

__frame_role__ = "probe"  # see `hooks.frames`
