"""Rewrites of the one-device graph: traced -> normalized, the same on any mesh."""
