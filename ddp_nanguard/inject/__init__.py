"""Fault injection: which fault (`spec`), how it is done (`hooks`, `corrupt`), and when (`step_counter`)."""

__frame_role__ = "probe"  # see `hooks.frames`
