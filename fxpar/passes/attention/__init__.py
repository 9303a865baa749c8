"""Rewrites attention: reads masks, splits queries and keys, and merges results."""
