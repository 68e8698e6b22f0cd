"""The report of a fault as plain data (`types`), and the texts that are made from it."""

__frame_role__ = "probe"  # see `hooks.frames`
