"""Keeps parameters in shards between steps: ``fxpar.shard``."""
