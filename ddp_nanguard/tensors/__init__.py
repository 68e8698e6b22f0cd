"""Any tensor in any container: ranges, containers, shards, batches."""
