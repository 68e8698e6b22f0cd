"""Any tensor in any container: ranges, containers, shards, batches."""

__frame_role__ = "probe"  # see `hooks.frames`
