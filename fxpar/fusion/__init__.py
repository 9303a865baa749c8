"""Rewrites compute and collectives of a local graph together, by schedules.

In: a schedule, and a local graph or those of a pipeline's stages. Out: new graphs.
Never changes a number, nor a given graph.
"""

import fxpar.features  # noqa: F401  (their verbs)
from fxpar.fusion.apply_schedule import apply
from fxpar.fusion.pipeline_stages import apply_stages
from fxpar.fusion.schedule import Schedule

__all__ = ["Schedule", "apply", "apply_stages"]
