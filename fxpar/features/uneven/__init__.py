"""Adds that rows of a split dim move between ranks, and that shards may be uneven.

In: a graph with ops that shift, join, repeat or interleave rows. Out: rows of the list,
which give these ops forms that may be split; rows of a convolution that come from other
ranks while it runs, for schedules. Never: a change to a graph without them.
"""

from __future__ import annotations

from fxpar.features.feature import Feature, later, steps_of
from fxpar.fusion.schedule import OF_PERMUTES
from fxpar.fusion.verbs.overlap import SCHEMES, OverlapScheme

_HALO = f"{__name__}.overlap_halo"
_step = steps_of(f"{__name__}.uneven_steps")

FEATURE = Feature(
    "uneven",
    {
        "causal_masks": [
            _step(
                "find_shifts",
                "aten.cat aten.constant_pad_nd aten.slice_scatter aten.index "
                "aten._unsafe_index aten.index_put "
                "aten._unsafe_index_put aten.gather aten.scatter_add",
            ),
            _step(
                "find_backward_scans",
                "aten.cumsum aten.cumprod aten.logcumsumexp aten.cummax aten.cummin",
            ),
            _step("part_repeats", "aten.repeat"),
            _step("interleave_rows", "aten.expand"),
            _step("take_rows_in_turn", "aten.cat"),
            _step("join_cuts", "aten.select aten.slice"),
        ],
        "localize": [
            steps_of(f"{__name__}.share_exchanges")("share_exchanges", "move_rows")
        ],
    },
)

SCHEMES.append(OverlapScheme("aten.convolution", later(_HALO, "overlap")))
OF_PERMUTES.append(later(_HALO, "candidates"))
