"""Adds pipeline stages, and parts of a batch that run one after the other.

In: a request with a pipeline or with microbatches. Out: rows of the list, which are on
for it. Never: a change to a program whose request has neither.
"""

from __future__ import annotations

from fxpar.features.feature import Feature, later, steps_of
from fxpar.graph.pipeline_ops import OF_STAGES

_step = steps_of(f"{__name__}.stage_steps")
_STAGES = "request.pipeline"

FEATURE = Feature(
    "stages",
    {
        "share_exchanges": [
            _step("find_stages", setting=_STAGES, optional=False),
            _step("cut_batch", setting="request.is_in_parts", optional=False),
        ],
        "pair_reductions": [_step("order_stages", setting=_STAGES, optional=False)],
        "local": [_step("take_place", setting=_STAGES, optional=False)],
    },
    ops=[f"{__name__}.sums_of_parts"],
    lowerings=[f"{__name__}.sums_of_parts"],
)

OF_STAGES["program_at"] = later(f"{__name__}.program_at_place", "program_at")
OF_STAGES["simulate"] = later(f"{__name__}.simulate_pipeline", "simulate_pipeline")
