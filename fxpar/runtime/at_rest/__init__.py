"""``fxpar.shard``: parameters that lie in shards between steps."""
