"""Schedules: compute and collectives of a local graph rewritten together."""

from fxpar.fusion.schedule import Schedule
from fxpar.fusion.stages import apply_stages
from fxpar.fusion.verbs import apply

__all__ = ["Schedule", "apply", "apply_stages"]
