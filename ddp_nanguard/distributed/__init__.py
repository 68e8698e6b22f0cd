"""All that talks to other ranks."""

__frame_role__ = "probe"  # see `hooks.frames`
