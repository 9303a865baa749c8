"""Schedules: compute and collectives of a local graph rewritten together."""

from fxpar.fusion.apply_schedule import apply
from fxpar.fusion.pipeline_stages import apply_stages
from fxpar.fusion.schedule import Schedule

__all__ = ["Schedule", "apply", "apply_stages"]
