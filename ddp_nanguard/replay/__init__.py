"""Replays a dumped step: on as many ranks as in training, or the rank where the fault began alone in one process."""

__frame_role__ = "starts step"  # see `hooks.frames`
