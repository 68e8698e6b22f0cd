"""The step of a fault once more, in place and on all ranks together: where and why, when the verdict has said whether.

Read `look` first: it tells the order of things. `run` runs the window, `compare` tells what came of it, `place` names
operator and line, `signs_of_life` bounds the waiting.
"""

__frame_role__ = "starts step"  # see `hooks.frames`
