"""The life of one optimizer step: `monitor` tells it in order, `stage` names its stages."""

__frame_role__ = "passes on"  # see `hooks.frames`
