"""Replay of a dumped step: on as many ranks as before, or the culprit alone in one process."""

__frame_role__ = "starts step"  # see `hooks.frames`
