"""Adds that rows of a split dim move between ranks, and that shards may be uneven.

In: a graph with ops that shift, join, repeat or interleave rows. Out: rows of the list,
which give these ops forms that may be split; rows of a convolution that come from other
ranks while it runs, for schedules. Never: a change to a graph without them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fxpar.features.feature import Feature, has, later, steps_of
from fxpar.fusion.schedule import OF_PERMUTES
from fxpar.fusion.verbs.overlap import SCHEMES, OverlapScheme

_HALO = f"{__name__}.overlap_halo"


def _is_convolved(_: Sequence[fx.Node], ends: Sequence[fx.Node]) -> bool:
    return ends[0].target is torch.ops.aten.convolution.default


_step = steps_of(f"{__name__}.uneven_steps")

FEATURE = Feature(
    "uneven",
    {
        "causal_masks": [
            _step(
                "find_shifts",
                has(
                    "aten.cat aten.constant_pad_nd aten.slice_scatter aten.index "
                    "aten._unsafe_index aten.index_put "
                    "aten._unsafe_index_put aten.gather aten.scatter_add"
                ),
            ),
            _step(
                "find_backward_scans",
                has(
                    "aten.cumsum aten.cumprod aten.logcumsumexp aten.cummax aten.cummin"
                ),
            ),
            _step("part_repeats", has("aten.repeat")),
            _step("interleave_rows", has("aten.expand")),
            _step("take_rows_in_turn", has("aten.cat")),
            _step("join_cuts", has("aten.select aten.slice")),
        ],
        "localize": [_step("share_exchanges", has("move_rows"))],
    },
)

SCHEMES.append(OverlapScheme(_is_convolved, later(_HALO, "overlap")))
OF_PERMUTES.append(later(_HALO, "candidates"))
