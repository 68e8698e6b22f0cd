"""The command line."""

__frame_role__ = "passes on"  # see `hooks.frames`
