"""Adds mixtures of experts: tokens go to the ranks that hold their experts.

In: a graph with grouped products. Out: rows of the list, which are on for it. Never: a
change to a graph without such products.
"""

from __future__ import annotations

from fxpar.features.feature import Feature, later, steps_of
from fxpar.sharding.decide import SEEDING
from fxpar.sharding.propagate.conventions import EXPERT_MM

_step = steps_of(f"{__name__}.expert_steps")
_TRACED = "aten._grouped_mm transformers.grouped_mm_fallback*"
_UNSORTED = "fxpar.own_expert_mm fxpar.own_expert_outer fxpar.within"

FEATURE = Feature(
    "experts",
    {
        "join_cuts": [_step("experts_in_place", _TRACED)],
        "split_fused_projections": [
            _step("split_fused_experts", "fxpar.expert_mm fxpar.expert_outer")
        ],
        "cut_batch": [
            _step("sort_by_expert", _UNSORTED, optional=False),
            _step("keep_sorted", "fxpar.grouped_mm fxpar.grouped_outer"),
            _step("exact_exchanges", "fxpar.dispatch_slots"),
        ],
    },
    ops=[f"{__name__}.expert_ops"],
    choices=(_TRACED, f"{__name__}.expert_axes"),
)

SEEDING[EXPERT_MM] = later(f"{__name__}.expert_axes", "seed_rows")
