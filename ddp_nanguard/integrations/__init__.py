"""The guard inside of trainers that own the loop: one callback each, over the public methods of `NanGuard`.

Nothing here is imported by the rest of the package: a trainer's library need not be installed.
"""

__frame_role__ = "passes on"  # see `hooks.frames`
