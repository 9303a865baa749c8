"""Ops whose local form is not simply the op on local operands.

Most ops compute their shard from the shards of their operands unchanged. The rows here
are the others: an index into a split dim must be shifted by the rank's offset and
masked where it points elsewhere, a size among the arguments must become the local one,
a random op must count by global index. Each function appends the local form of one call
to the graph and returns its node. Keys are op overloads, or names of ops that torch
registers late.
"""

from __future__ import annotations

from typing import Any

from fxpar.passes import local_indexing, local_own, local_sizes, local_views
from fxpar.passes.local_call import Call, Localizer

__all__ = ["LOCAL", "Call", "Localizer"]

LOCAL: dict[Any, Localizer] = {
    **local_indexing.LOCAL,
    **local_sizes.LOCAL,
    **local_views.LOCAL,
    **local_own.LOCAL,
}
