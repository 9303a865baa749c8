"""Adds manual regions (``fxpar.shard_map``), and bodies of branches and loops."""

from __future__ import annotations

from fxpar.features.feature import Feature, has, steps_of

_step = steps_of(f"{__name__}.region_steps")
# Nodes that hold bodies, among others.
_BODIES = "get_attr"
_REGIONS = f"{_BODIES} fxpar.enter_region fxpar.leave_region"

FEATURE = Feature(
    "regions",
    {
        "traced": [_step("show_bodies", has(_BODIES), optional=False)],
        "share_by_speed": [
            _step("absorb_regions", has(_REGIONS), optional=False),
            _step("refuse_body_draws", has(_BODIES), optional=False),
            _step("count_loop_steps", has(_BODIES), optional=False),
        ],
    },
)
