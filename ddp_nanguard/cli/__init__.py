"""The command line ``ddp-nanguard``: one module per command or group of commands."""

__frame_role__ = "passes on"  # see `hooks.frames`
