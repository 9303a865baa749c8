"""Schedules: compute and collectives of a local graph rewritten together."""

from fxpar.fusion.schedule import Schedule
from fxpar.fusion.verbs import apply

__all__ = ["Schedule", "apply"]
