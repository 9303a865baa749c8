"""Adds manual regions (``fxpar.shard_map``), and bodies of branches and loops.

In: a graph with edges of regions or with bodies. Out: rows of the list, which are on
for it. Never: a change to a graph without them.
"""

from __future__ import annotations

from fxpar.features.feature import Feature, steps_of

# Rewrites calls of bodies that draw, from the first trace on.
from fxpar.passes.normalize.body_seeds import refuse_draws
from fxpar.passes.order.order_collectives import Pass

_step = steps_of(f"{__name__}.manual_regions")
# Nodes that hold bodies, among others.
_BODIES = "get_attr"
_REGIONS = f"{_BODIES} fxpar.enter_region fxpar.leave_region"

FEATURE = Feature(
    "regions",
    {
        "traced": [_step("show_bodies", _BODIES, optional=False)],
        "share_by_speed": [
            _step("absorb_regions", _REGIONS, optional=False),
            Pass(
                "refuse_body_draws",
                lambda graph, _: refuse_draws(graph),
                optional=False,
                ops=_BODIES,
            ),
            _step("count_loop_steps", _BODIES, optional=False),
        ],
    },
    choices=("fxpar.choose_body", f"{__name__}.manual_regions"),
)
