"""Hooks on the user's loop and modules."""

__frame_role__ = "probe"  # see `hooks.frames`
