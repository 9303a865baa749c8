"""Normalizes a traced one-device graph, so that sharding rules see its dims."""
