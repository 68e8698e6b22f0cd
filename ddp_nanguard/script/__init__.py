"""A training script as the recipe of its own dump: started again, it runs the recorded step and ends.

Read in this order: `launch` (the parent, for one rank), `intercept.sitecustomize` and `stand_in` (a script of N ranks
alone in one process), `takeover` (what the guard does in such a process), `monitor` and `recorded_step`.
"""

__frame_role__ = "probe"  # see `hooks.frames`
