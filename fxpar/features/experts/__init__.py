"""Adds mixtures of experts: tokens go to the ranks that hold their experts.

In: a graph with grouped products. Out: rows of the list, which are on for it. Never: a
change to a graph without such products.
"""

from __future__ import annotations

from fxpar.features.feature import Feature, has, later, steps_of
from fxpar.sharding.decide import SEEDING
from fxpar.sharding.propagate.conventions import EXPERT_MM

_step = steps_of(f"{__name__}.expert_steps")
_is_traced = has(
    "aten._grouped_mm transformers.grouped_mm_fallback "
    "transformers.grouped_mm_fallback_backward"
)
_is_in_place = has("fxpar.expert_mm fxpar.expert_outer")
_is_unsorted = has("fxpar.own_expert_mm fxpar.own_expert_outer fxpar.within")
_is_local = has("fxpar.grouped_mm fxpar.grouped_outer")

FEATURE = Feature(
    "experts",
    {
        "join_cuts": [_step("experts_in_place", _is_traced)],
        "split_fused_projections": [_step("split_fused_experts", _is_in_place)],
        "cut_batch": [
            _step("sort_by_expert", _is_unsorted, optional=False),
            _step("keep_sorted", _is_local),
            _step("exact_exchanges", has("fxpar.dispatch_slots")),
        ],
    },
    ops=[f"{__name__}.expert_ops"],
    choices=(_is_traced, f"{__name__}.expert_axes"),
)

SEEDING[EXPERT_MM] = later(f"{__name__}.expert_axes", "seed_rows")
